"""The only door to NVML: questions to the driver, answered in plain types or refused with `NvmlError`.

Nothing here remembers a GPU or decides what an answer means for leases; `real` does. Calls may block for as long
as the driver likes; `watch` bounds them.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

from orchestrator.gpu import Health
from orchestrator.gpu.reasons import reason_of

LIBRARY = "libnvidia-ml.so.1"

_NAMES: dict[int, str] = {
    code: name.removeprefix("NVML_ERROR_")
    for name, code in vars(pynvml).items()
    if name.startswith("NVML_ERROR_") and isinstance(code, int)
}
#: "I do not do that": a fact about the device or the driver's age, not a fault.
_ABSENT = frozenset(
    {
        "NOT_SUPPORTED",
        "FUNCTION_NOT_FOUND",
        "NO_DATA",
        "DEPRECATED",
        "ARGUMENT_VERSION_MISMATCH",
        "VGPU_ECC_NOT_SUPPORTED",
    }
)
#: How drivers refuse the second version of the memory question; some under WSL with UNKNOWN.
_NO_MEMORY_V2 = _ABSENT | {"UNKNOWN", "INVALID_ARGUMENT"}
#: Parts of a processor: they have no memory of their own, and NVML says so, or tells the host's as theirs.
_INTEGRATED = re.compile(r"\b(GB10|Thor|Orin|Xavier|Tegra|Jetson)\b", re.IGNORECASE)
_NO_INSTANCE = 0xFFFFFFFF
#: The kernel's limit. Drivers of R535 and R550 fill the process list with a longer structure than they promise; read
#: with the promised one, from the second entry on ids are 0 or far too large.
_MAX_PID = 1 << 22
#: Not 0: for some drivers that may mean to wait for ever.
_EVENT_WAIT_MS = 1
_MAX_EVENTS = 64
_RECOVERY = {
    pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET: "a reset of the GPU",
    pynvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT: "a reboot of the node",
    pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_P2P: "an end of all peer-to-peer work",
    pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET: "an end of all work, then a reset of the GPU",
    pynvml.NVML_GPU_RECOVERY_ACTION_BUS_RESET: "a reset of the GPU's bus",
    pynvml.NVML_GPU_RECOVERY_ACTION_SYSTEM_REBOOT: "a reboot of the system",
}


class NvmlError(Exception):
    """The driver refused; `name` is its error without the prefix NVML_ERROR_."""

    def __init__(self, code: int) -> None:
        self.name = _NAMES.get(code, f"code {code}")
        super().__init__(self.name)


@dataclass(frozen=True)
class Device:
    """A GPU, or a MIG slice of one, as the driver lists it now. Handles die with the next `close`."""

    uuid: str
    name: str
    #: Where its card sits: the order of cards that CUDA follows with CUDA_DEVICE_ORDER=PCI_BUS_ID.
    bus_id: str
    handle: Any
    #: The card itself: the same, or the one that the slice is part of.
    card_uuid: str
    card_handle: Any
    #: Place of a slice on its card; None for a whole card.
    slice: int | None = None
    #: Number of a slice's GPU instance, by which events name it.
    instance: int | None = None


@dataclass(frozen=True)
class Memory:
    """In MB, without what the driver keeps for itself."""

    total_mb: int
    free_mb: int
    #: Of the host: the device has none of its own.
    unified: bool = False


@dataclass(frozen=True)
class Xid:
    """An error that the driver reported; `card_uuid` is None when nobody can tell for which card."""

    number: int
    card_uuid: str | None
    instance: int | None = None


# --- the library ---


def installed() -> bool:
    """Whether there is a library to ask at all. Does not open the driver, which might take its time."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def start() -> Events:
    """Open the driver, and listen from now on."""
    _ask("nvmlInit")
    try:
        return Events()
    except NvmlError:
        stop()
        raise


def stop() -> None:
    """Let go of the driver, as far as it is still there to be let go of."""
    with suppress(NvmlError):
        _ask("nvmlShutdown")


def versions() -> tuple[str, str]:
    """Of the driver and of NVML."""
    return str(_ask("nvmlSystemGetDriverVersion")), str(_ask("nvmlSystemGetNVMLVersion"))


# --- devices ---


def devices() -> tuple[list[Device], list[NvmlError]]:
    """All that can be leased, and the refusals of those that could not be identified."""
    found: list[Device] = []
    refused: list[NvmlError] = []
    for position in range(_ask("nvmlDeviceGetCount")):
        try:
            found += _on_card(_ask("nvmlDeviceGetHandleByIndex", position))
        except NvmlError as error:
            refused.append(error)
    return found, refused


def is_split(uuid: str) -> bool:
    """Whether a card is divided into MIG slices now. Raises what the driver says when it does not know the card."""
    return _mig_is_on(_ask("nvmlDeviceGetHandleByUUID", uuid))


def _on_card(handle: Any) -> list[Device]:
    uuid, name = _ask("nvmlDeviceGetUUID", handle), _ask("nvmlDeviceGetName", handle)
    bus_id = str(_ask("nvmlDeviceGetPciInfo_v3", handle).busId).lower()
    card = Device(uuid, name, bus_id, handle, uuid, handle)
    return list(_slices(card)) if _mig_is_on(handle) else [card]


def _mig_is_on(handle: Any) -> bool:
    mode = _if_known("nvmlDeviceGetMigMode", handle)
    return mode is not None and mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE


def _slices(card: Device) -> Iterator[Device]:
    for position in range(_ask("nvmlDeviceGetMaxMigDeviceCount", card.handle)):
        try:
            handle = _ask("nvmlDeviceGetMigDeviceHandleByIndex", card.handle, position)
        except NvmlError as error:
            if error.name != "NOT_FOUND":
                raise
            continue  # a place without a slice
        yield Device(
            _ask("nvmlDeviceGetUUID", handle),
            _slice_name(card, handle),
            card.bus_id,
            handle,
            card.uuid,
            card.handle,
            position,
            _ask("nvmlDeviceGetGpuInstanceId", handle),
        )


def _slice_name(card: Device, handle: Any) -> str:
    """With its profile: newer drivers tell it with the name, of older ones it is made of the attributes."""
    name = str(_ask("nvmlDeviceGetName", handle))
    if "MIG" in name:
        return name
    sizes = _ask("nvmlDeviceGetAttributes_v2", handle)
    return f"{card.name} MIG {sizes.gpuInstanceSliceCount}g.{round(sizes.memorySizeMB / 1024)}gb"


# --- what a device does ---


def memory(device: Device) -> Memory:
    """Raises NvmlError with NOT_SUPPORTED or NO_DATA where the driver does not tell (anything sensible)."""
    unified = device.slice is None and _INTEGRATED.search(device.name) is not None
    try:
        total, free = _memory_v2(device.handle)
    except NvmlError as error:
        if unified and error.name in {"NOT_SUPPORTED", "NO_DATA"}:
            return _memory_of_host()
        raise
    # Some drivers tell the host's memory as theirs, but as free only what no page cache fills.
    return _memory_of_host() if unified else Memory(total >> 20, free >> 20)


def _memory_v2(handle: Any) -> tuple[int, int]:
    try:
        found = _ask("nvmlDeviceGetMemoryInfo", handle, pynvml.nvmlMemory_v2)
    except NvmlError as error:
        if error.name not in _NO_MEMORY_V2:
            raise
        found = _ask("nvmlDeviceGetMemoryInfo", handle)
        return _sensible(found.total, 0, found.free)
    return _sensible(found.total, found.reserved, found.free)


def _sensible(total: int, reserved: int, free: int) -> tuple[int, int]:
    """Total and free without what the driver keeps. Numbers that cannot be true are no answer."""
    if reserved >= total or free > total:
        raise NvmlError(pynvml.NVML_ERROR_NO_DATA)
    return total - reserved, min(free, total - reserved)


def _memory_of_host() -> Memory:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    kilobytes = {words[0].rstrip(":"): int(words[1]) for words in lines}
    return Memory(kilobytes["MemTotal"] >> 10, kilobytes["MemAvailable"] >> 10, unified=True)


def processes(device: Device) -> dict[int, int | None] | None:
    """Process id → bytes (None: not told), of all kinds of work. None when the list cannot be had or trusted."""
    found: dict[int, int | None] = {}
    for kind in ("Compute", "Graphics", "MPSCompute"):
        try:
            listed = _running(kind, device.handle)
        except NvmlError as error:
            if reason_of(error.name)[0] is Health.LOST:
                raise
            if kind == "Compute" or error.name not in _ABSENT:
                return None
            continue  # a device that draws no pictures, or a driver without MPS
        for process in listed:
            # One process may be in several lists, each time with all it holds.
            known = [size for size in (found.get(process.pid), process.usedGpuMemory) if size is not None]
            found[process.pid] = max(known, default=None)
    return found if all(0 < pid <= _MAX_PID for pid in found) else None


def _running(kind: str, handle: Any) -> list[Any]:
    try:
        return list(_ask(f"nvmlDeviceGet{kind}RunningProcesses_v3", handle))
    except NvmlError as error:
        if error.name != "FUNCTION_NOT_FOUND":
            raise
        return list(_ask(f"nvmlDeviceGet{kind}RunningProcesses_v2", handle))


def utilization(device: Device) -> float | None:
    """A fraction of the time."""
    rates = _if_told("nvmlDeviceGetUtilizationRates", device.handle)
    return None if rates is None else float(rates.gpu) / 100


def temperature_c(device: Device) -> int | None:
    """Of the card: slices have no thermometer."""
    degrees = _if_told("nvmlDeviceGetTemperature", device.card_handle, pynvml.NVML_TEMPERATURE_GPU)
    return None if degrees is None else int(degrees)


def defect(device: Device) -> str | None:
    """What is wrong with the memory of the card, or what the driver asks for; None when nothing is known to be."""
    return next(filter(None, (check(device.card_handle) for check in _DEFECTS)), None)


def _ecc_errors(handle: Any) -> str | None:
    kinds = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
    count = _if_known("nvmlDeviceGetTotalEccErrors", handle, *kinds)
    return f"{count} uncorrectable memory errors since the driver was loaded; reset the GPU" if count else None


def _remapped_rows(handle: Any) -> str | None:
    rows = _if_known("nvmlDeviceGetRemappedRows", handle)
    if rows is None:
        return None
    _, _, pending, failed = rows
    if failed:
        return "remapping broken memory rows failed; have the card replaced"
    return "broken memory rows wait for remapping; reset the GPU" if pending else None


def _retired_pages(handle: Any) -> str | None:
    pending = _if_known("nvmlDeviceGetRetiredPagesPendingStatus", handle)
    return "broken memory pages wait for retirement; reset the GPU" if pending else None


def _recovery_action(handle: Any) -> str | None:
    """Newer drivers remember what a fault left behind, also for those who were not there when it happened."""
    values = _if_told("nvmlDeviceGetFieldValues", handle, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    if values is None or values[0].nvmlReturn != pynvml.NVML_SUCCESS:
        return None
    wanted = values[0].value.uiVal
    if wanted == pynvml.NVML_GPU_RECOVERY_ACTION_NONE:
        return None
    return f"after a fault the driver asks for {_RECOVERY.get(wanted, f'recovery action {wanted}')}"


_DEFECTS: tuple[Callable[[Any], str | None], ...] = (_recovery_action, _ecc_errors, _remapped_rows, _retired_pages)


# --- events ---


class Events:
    """XIDs since the last look. Cards and drivers too old for events never have any."""

    def __init__(self) -> None:
        self._set = _if_known("nvmlEventSetCreate")
        self._cards: dict[int, str] = {}

    def watch(self, device: Device) -> None:
        """Hear of this device's card from now on."""
        if self._set is None or device.card_uuid in self._cards.values():
            return
        supported = _if_known("nvmlDeviceGetSupportedEventTypes", device.card_handle) or 0
        wanted = pynvml.nvmlEventTypeXidCriticalError & supported
        if wanted:
            _if_known("nvmlDeviceRegisterEvents", device.card_handle, wanted, self._set)
        self._cards[_address(device.card_handle)] = device.card_uuid

    def new(self) -> list[Xid]:
        found: list[Xid] = []
        while self._set is not None and len(found) < _MAX_EVENTS:
            try:
                event = _ask("nvmlEventSetWait_v2", self._set, _EVENT_WAIT_MS)
            except NvmlError as error:
                if error.name == "TIMEOUT":
                    break
                if error.name not in _ABSENT and reason_of(error.name)[0] is not Health.LOST:
                    raise
                self._begin_anew()  # one lost card spoils the set for the others
                break
            if event.eventType == pynvml.nvmlEventTypeXidCriticalError:
                found.append(self._xid(event))
        return found

    def close(self) -> None:
        if self._set is not None:
            with suppress(NvmlError):
                _ask("nvmlEventSetFree", self._set)
            self._set = None

    def _begin_anew(self) -> None:
        self.close()
        self._set = _if_known("nvmlEventSetCreate")
        self._cards.clear()

    def _xid(self, event: Any) -> Xid:
        # By its address: a card that fell off the bus can no longer be asked for its name.
        card = self._cards.get(_address(event.device))
        instance = None if event.gpuInstanceId == _NO_INSTANCE else int(event.gpuInstanceId)
        return Xid(int(event.eventData), card, instance)


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


# --- asking ---


def _ask(question: str, *arguments: Any) -> Any:
    try:
        return getattr(pynvml, question)(*arguments)
    except pynvml.NVMLError as error:
        raise NvmlError(error.value) from error


def _if_known(question: str, *arguments: Any) -> Any:
    """The answer, or None where device or driver have no such thing."""
    try:
        return _ask(question, *arguments)
    except NvmlError as error:
        if error.name not in _ABSENT:
            raise
        return None


def _if_told(question: str, *arguments: Any) -> Any:
    """The answer, or None: nothing depends on it, unless the refusal says that the device is gone."""
    try:
        return _ask(question, *arguments)
    except NvmlError as error:
        if reason_of(error.name)[0] is Health.LOST:
            raise
        return None
