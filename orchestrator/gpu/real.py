"""Backend `nvml`: the node's real GPUs, and what became of those that are no longer there.

A GPU that was seen once is reported in every later sample, with a reason when it does not answer: so the database
closes its gate at once, and knows why, instead of waiting for the last sample to grow old.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from orchestrator.errors import GpuUnavailable
from orchestrator.gpu import Gpu, GpuProcess, Health, nvml, processes
from orchestrator.gpu.nvml import Device, NvmlError
from orchestrator.gpu.reasons import reason_of, reason_of_xid
from orchestrator.gpu.sampling import Sampling

log = logging.getLogger(__name__)

#: The driver was unloaded. Whatever it knew of earlier faults is gone when it comes back.
_UNLOADED = frozenset({"UNINITIALIZED", "DRIVER_NOT_LOADED"})
#: Indexes of MIG slices begin here, a hundred for each card, so that they never meet that of a whole card.
_SLICES_FROM = 100


class NvmlGpus(Sampling):
    """Identity is the UUID. The index is the place in PCI bus order, for MIG slices (card's index + 1) × 100 + place.

    Not for several threads at a time: `watch` sees to that. `reopen_s`: how often the driver is opened anew while a
    GPU does not answer, since a library that has seen a GPU vanish does not always see it return.
    """

    name = "nvml"

    def __init__(self, reopen_s: float = 30.0) -> None:
        self._reopen_s = reopen_s
        self._events: nvml.Events | None = None
        self._opened_at = 0.0
        self._devices: dict[str, Device] = {}
        self._last: dict[str, Gpu] = {}
        #: Card → XIDs with the GPU instance they hit, until the card was reset or the driver loaded anew.
        self._xids: dict[str, set[tuple[int, int | None]]] = defaultdict(set)
        self._lost_cards: set[str] = set()
        self._refused: list[str] = []

    def environment(self) -> dict[str, str]:
        """CUDA counts cards as we do, and not by speed."""
        return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    def about(self) -> str:
        try:
            self._open()
            return "driver {}, NVML {}".format(*nvml.versions())
        except NvmlError as error:
            raise GpuUnavailable(reason_of(error.name)[1]) from error

    def sample(self) -> list[Gpu]:
        """Raises GpuUnavailable when the driver cannot be asked and no GPU was ever seen."""
        try:
            found, refused = self._survey()
        except NvmlError as error:
            sample = self._without_driver(error)
        else:
            self._devices |= {device.uuid: device for device in found}
            present = {device.uuid for device in found}
            places = self._places()
            sample = [
                self._read(device, places[uuid]) if uuid in present else self._missing(device, places[uuid], refused)
                for uuid, device in self._devices.items()
            ]
        self._remember(sample)
        return sorted(sample, key=lambda gpu: gpu.index)

    # --- the driver ---

    def _survey(self) -> tuple[list[Device], list[NvmlError]]:
        events = self._open()
        found, refused = nvml.devices()
        for xid in events.new():
            self._note(xid)
        self._tell_refused(refused)
        return found, refused

    def _open(self) -> nvml.Events:
        if self._events is not None and self._worth_opening_anew():
            self._close()
        if self._events is None:
            self._opened_at = time.monotonic()
            self._events = nvml.start()
        return self._events

    def _worth_opening_anew(self) -> bool:
        silent = any(gpu.health in {Health.LOST, Health.UNKNOWN} for gpu in self._last.values())
        return silent and time.monotonic() - self._opened_at >= self._reopen_s

    def _close(self) -> None:
        if self._events is not None:
            self._events.close()
            self._events = None
            nvml.stop()

    def _without_driver(self, error: NvmlError) -> list[Gpu]:
        """Nobody is lost because of that: the work on the GPUs may well go on."""
        self._give_up(error)
        reason = reason_of(error.name)[1]
        if not self._last:
            raise GpuUnavailable(reason) from error
        return [_closed(gpu, gpu.index, Health.UNKNOWN, reason) for gpu in self._last.values()]

    def _give_up(self, error: NvmlError) -> None:
        self._close()
        if error.name in _UNLOADED:
            self._xids.clear()
            self._lost_cards.clear()

    # --- its GPUs ---

    def _read(self, device: Device, place: int) -> Gpu:
        try:
            gpu = self._look(device, place)
        except NvmlError as error:
            return self._silent(device, place, *self._verdict(device, error))
        if device.card_uuid in self._lost_cards:
            # It answers again: somebody reset it, and its faults are gone.
            self._lost_cards.discard(device.card_uuid)
            self._xids.pop(device.card_uuid, None)
        health, reason = self._condition(device)
        return replace(gpu, health=health, health_reason=reason)

    def _look(self, device: Device, place: int) -> Gpu:
        if self._events is not None:
            self._events.watch(device)
        memory = nvml.memory(device)
        return Gpu(
            device.uuid,
            place,
            f"{device.name} (unified memory)" if memory.unified else device.name,
            memory.total_mb,
            memory.total_mb - memory.free_mb,
            _holders(device),
            nvml.utilization(device),
            nvml.temperature_c(device),
        )

    def _condition(self, device: Device) -> tuple[Health, str | None]:
        """Of a GPU that answers: a fault that was reported counts until a reset, whatever it answers now."""
        verdicts = [
            verdict
            for number, instance in sorted(self._xids[device.card_uuid], key=lambda xid: xid[0])
            if instance in (None, device.instance) or device.instance is None
            if (verdict := reason_of_xid(number))
        ]
        for verdict in verdicts:
            if verdict[0] is Health.LOST:
                return verdict
        if verdicts:
            return verdicts[0]
        try:
            defect = nvml.defect(device)
        except NvmlError as error:
            return self._verdict(device, error)
        return (Health.UNHEALTHY, defect) if defect else (Health.OK, None)

    def _missing(self, device: Device, place: int, refused: Sequence[NvmlError]) -> Gpu:
        """A GPU that the driver has ceased to list."""
        try:
            split = nvml.is_split(device.card_uuid)
        except NvmlError as error:
            return self._silent(device, place, *self._verdict(device, error))
        if refused:
            return self._silent(device, place, *self._verdict(device, refused[0]))
        if device.slice is not None:
            reason = "the MIG slice was removed"
        elif split:
            reason = "MIG was turned on; the slices of this card are GPUs of their own"
        else:
            reason = "the driver no longer lists this GPU"
        return self._silent(device, place, Health.LOST, reason)

    def _verdict(self, device: Device, error: NvmlError) -> tuple[Health, str]:
        health, reason = reason_of(error.name)
        if health is Health.LOST:
            self._lost_cards.add(device.card_uuid)
        if error.name in _UNLOADED:
            self._give_up(error)
        return health, reason

    def _silent(self, device: Device, place: int, health: Health, reason: str) -> Gpu:
        known = self._last.get(device.uuid) or Gpu(device.uuid, place, device.name, total_mb=0, used_mb=0)
        return _closed(known, place, health, reason)

    def _places(self) -> dict[str, int]:
        """UUID → index. A card that is gone keeps its place, so that the others keep theirs."""
        cards = sorted({device.bus_id for device in self._devices.values()})
        card = {uuid: cards.index(device.bus_id) for uuid, device in self._devices.items()}
        return {
            uuid: card[uuid] if device.slice is None else (card[uuid] + 1) * _SLICES_FROM + device.slice
            for uuid, device in self._devices.items()
        }

    # --- news ---

    def _note(self, xid: nvml.Xid) -> None:
        log.warning("XID", extra={"xid": xid.number, "gpu_uuid": xid.card_uuid})
        # Of a fault that nobody can place, every card is suspected.
        cards = [xid.card_uuid] if xid.card_uuid else {device.card_uuid for device in self._devices.values()}
        for card in cards:
            self._xids[card].add((xid.number, xid.instance))

    def _remember(self, sample: list[Gpu]) -> None:
        for gpu in sample:
            before = self._last.get(gpu.uuid)
            if gpu.health_reason != (before.health_reason if before else None):
                log.warning(
                    "GPU health changed",
                    extra={"gpu_uuid": gpu.uuid, "health": gpu.health.value, "reason": gpu.health_reason},
                )
            self._last[gpu.uuid] = gpu

    def _tell_refused(self, refused: list[NvmlError]) -> None:
        reasons = [reason_of(error.name)[1] for error in refused]
        if reasons and reasons != self._refused:
            log.warning("the driver lists GPUs that it does not identify", extra={"reason": "; ".join(reasons)})
        self._refused = reasons


def _closed(gpu: Gpu, place: int, health: Health, reason: str) -> Gpu:
    """As it was when it still answered, with a closed gate."""
    return replace(
        gpu, index=place, processes=None, utilization=None, temperature_c=None, health=health, health_reason=reason
    )


def _holders(device: Device) -> tuple[GpuProcess, ...] | None:
    if not processes.driver_ids_are_ours():
        return None
    held = nvml.processes(device)
    if held is None:
        return None
    return tuple(
        processes.describe(pid, None if size is None else _rounded_up(size)) for pid, size in sorted(held.items())
    )


def _rounded_up(size: int) -> int:
    return -(-size >> 20)
