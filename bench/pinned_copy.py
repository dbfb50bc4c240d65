"""Time copies between device and pinned host memory by the NVIDIA driver, the fastest transfer."""

import ctypes
import statistics
import time


def pinned_copy_seconds(num_bytes: int, repeats: int) -> tuple[float, float] | None:
    """Return the median seconds of a copy to pinned host memory, and of a copy back.

    If there is no NVIDIA driver, return None.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    context, host, device = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64()
    size = ctypes.c_size_t(num_bytes)
    _check(driver.cuInit(0))
    # The primary context is the one that JAX uses.
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
    _check(driver.cuCtxPushCurrent_v2(context))
    try:
        _check(driver.cuMemAllocHost_v2(ctypes.byref(host), size))
        _check(driver.cuMemAlloc_v2(ctypes.byref(device), size))
        out = _median(repeats, lambda: driver.cuMemcpyDtoH_v2(host, device, size))
        back = _median(repeats, lambda: driver.cuMemcpyHtoD_v2(device, host, size))
    finally:
        if device:
            driver.cuMemFree_v2(device)
        if host:
            driver.cuMemFreeHost(host)
        driver.cuCtxPopCurrent_v2(ctypes.byref(context))
        driver.cuDevicePrimaryCtxRelease(0)
    return out, back


def _median(repeats: int, copy) -> float:
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        _check(copy())
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"the CUDA driver returned error {code}")
