"""Can a GPU's switch multicast? Asked of the driver; nothing is created, and nothing needs it."""

from __future__ import annotations

import ctypes

# CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, since CUDA 12.1.
_MULTICAST_SUPPORTED = 132


def is_multicast_supported(device: int) -> bool:
    """What the driver says of GPU `device`; False without an NVIDIA driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    value, handle = ctypes.c_int(0), ctypes.c_int(0)
    return (
        driver.cuInit(0) == 0
        and driver.cuDeviceGet(ctypes.byref(handle), device) == 0
        and driver.cuDeviceGetAttribute(ctypes.byref(value), _MULTICAST_SUPPORTED, handle) == 0
        and value.value == 1
    )
