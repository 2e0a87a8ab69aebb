"""Why a GPU is not ok: what each error of the driver and each XID means for leases, and what to do about it.

`lost` is said only where the driver itself says that the GPU is gone, since it also ends the work that runs there.
Any other error leaves us without an answer, and without an answer the gate is closed.
"""

from __future__ import annotations

from orchestrator.gpu import Health

#: XIDs that a program causes, not the card: it goes on working for everybody else.
APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})
#: The card fell off the bus.
LOST_XID = 79

_UPDATE = "driver and nvidia-ml-py do not fit together; update one of them"
_RESET = "stop the workers of this node and whatever else uses the GPU, then: nvidia-smi --gpu-reset; or reboot"

_UNKNOWN: dict[str, str] = {
    "UNINITIALIZED": "the connection to the driver is gone; it is opened again with the next sample",
    "INVALID_ARGUMENT": f"the driver did not understand the question; {_UPDATE}",
    "NOT_SUPPORTED": "the driver does not tell the memory of this device",
    "NO_PERMISSION": "no permission to ask the driver; check the rights of /dev/nvidia* and what the container may use",
    "ALREADY_INITIALIZED": "the driver was opened twice; restart the worker",
    "INSUFFICIENT_SIZE": f"the driver's answer was larger than expected; {_UPDATE}",
    "INSUFFICIENT_POWER": "the GPU's power cables are not connected; plug them in and reboot the node",
    "DRIVER_NOT_LOADED": "the NVIDIA driver is not loaded; load it: modprobe nvidia, then nvidia-smi",
    "TIMEOUT": "the driver did not answer in time; see nvidia-smi and the kernel log",
    "IRQ_ISSUE": "the kernel has an interrupt problem with a GPU; see the kernel log and reboot the node",
    "LIBRARY_NOT_FOUND": "libnvidia-ml.so.1 cannot be loaded; install the NVIDIA driver, or give it to the container",
    "FUNCTION_NOT_FOUND": f"the driver is too old for a question; {_UPDATE}",
    "CORRUPTED_INFOROM": "the GPU's infoROM is corrupted; have the card checked",
    "OPERATING_SYSTEM": "the operating system blocked the question (cgroup, container); restart the container",
    "LIB_RM_VERSION_MISMATCH": "driver and library versions differ after an update; reboot, or reload the kernel "
    "modules and restart the workers",
    "IN_USE": "the GPU is in exclusive use; see who holds it: nvidia-smi",
    "MEMORY": "the driver has no memory left to answer; see the memory of the host",
    "NO_DATA": "the driver tells nothing sensible about the memory of this device; see nvidia-smi",
    "VGPU_ECC_NOT_SUPPORTED": "the vGPU host does not support the guest's ECC setting; turn ECC off on one of them",
    "INSUFFICIENT_RESOURCES": "the driver lacks resources to answer; see the kernel log",
    "FREQ_NOT_SUPPORTED": f"the driver refused the question; {_UPDATE}",
    "ARGUMENT_VERSION_MISMATCH": f"the driver expects another version of the question; {_UPDATE}",
    "DEPRECATED": f"the driver no longer answers this question; {_UPDATE}",
    "NOT_READY": "the GPU is not ready yet; it is asked again with the next sample",
    "INVALID_STATE": "the GPU is in a state in which it cannot be asked; see nvidia-smi and the kernel log",
    "RESET_TYPE_NOT_SUPPORTED": "the driver refused a kind of reset; reboot the node",
    "UNKNOWN": "the driver answered 'Unknown Error'; in a container, recreate it (a daemon-reload takes its GPUs "
    "away); on a host, see the kernel log",
}
_LOST: dict[str, str] = {
    "NOT_FOUND": "the driver no longer knows this device: removed, or its MIG slice was destroyed",
    "GPU_NOT_FOUND": "the driver finds no such GPU any more; see lspci and the kernel log",
    "GPU_IS_LOST": "the GPU is lost: it fell off the bus; reboot the node, then have the card checked",
    "RESET_REQUIRED": f"the GPU needs a reset: {_RESET}",
}


def reason_of(error: str) -> tuple[Health, str]:
    """What an error of NVML, by its name without the prefix NVML_ERROR_, says about a GPU. Never that it is ok."""
    if error in _LOST:
        return Health.LOST, f"{_LOST[error]} ({error})"
    text = _UNKNOWN.get(error, "the driver answered with an error that this version does not know")
    return Health.UNKNOWN, f"{text} ({error})"


def reason_of_xid(number: int) -> tuple[Health, str] | None:
    """What an XID says about the GPU it came from; None for those that only the program at fault feels."""
    if number in APPLICATION_XIDS:
        return None
    if number == LOST_XID:
        return Health.LOST, f"XID {number}: the GPU fell off the bus; reboot the node, then have the card checked"
    return Health.UNHEALTHY, f"XID {number}: {_RESET}"
