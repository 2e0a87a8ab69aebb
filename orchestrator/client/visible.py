"""Which GPUs the process sees. One environment for all threads: it is that of the lease taken last."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence

DEVICES, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"


def environment(gpu_uuids: Sequence[str]) -> dict[str, str]:
    """UUIDs, since an index means another card where the order differs; none at all for a lease of the CPU."""
    return {DEVICES: ",".join(gpu_uuids), ORDER: "PCI_BUS_ID"}


class Visible:
    """Leases may end in any order, as threads do: what was there before the first comes back with the last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shown: dict[object, Mapping[str, str]] = {}
        self._before: dict[str, str | None] = {}

    def show(self, lease: object, gpu_uuids: Sequence[str]) -> None:
        with self._lock:
            if not self._shown:
                self._before = {name: os.environ.get(name) for name in (DEVICES, ORDER)}
            self._shown[lease] = environment(gpu_uuids)
            os.environ.update(self._shown[lease])

    def hide(self, lease: object) -> None:
        """Again is fine."""
        with self._lock:
            if self._shown.pop(lease, None) is None:
                return
            last = next(reversed(self._shown.values()), None)
            for name, value in (last or self._before).items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


visible = Visible()
