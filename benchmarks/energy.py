"""The energy that a GPU has used, by NVML."""

from __future__ import annotations

import ctypes


def joules() -> float | None:
    """Joules of the first GPU since its driver was loaded; None if there is no NVML, or the GPU does not measure its energy."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    device, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
    calls = (
        lambda: nvml.nvmlInit_v2(),
        lambda: nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)),
        lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(millijoules)),
    )
    return None if any(call() for call in calls) else millijoules.value / 1e3
