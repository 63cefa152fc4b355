"""The memory of this process and of the machine, as Windows tells it."""

from __future__ import annotations

import sys

if sys.platform == "win32":
    import ctypes

    class _Counters(ctypes.Structure):
        """PROCESS_MEMORY_COUNTERS of psapi.h."""

        _fields_ = (
            ("cb", ctypes.c_uint32),
            ("page_faults", ctypes.c_uint32),
            ("peak_working_set", ctypes.c_size_t),
            ("others", ctypes.c_size_t * 7),
        )

    class _Status(ctypes.Structure):
        """MEMORYSTATUSEX of sysinfoapi.h."""

        _fields_ = (
            ("length", ctypes.c_uint32),
            ("load", ctypes.c_uint32),
            ("total", ctypes.c_uint64),
            ("available", ctypes.c_uint64),
            ("others", ctypes.c_uint64 * 5),
        )

    _kernel32 = ctypes.WinDLL("kernel32", use_last_error=True)
    _kernel32.GetCurrentProcess.restype = ctypes.c_void_p
    _kernel32.K32GetProcessMemoryInfo.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32]

    def own_peak() -> int:
        """The peak memory of this process in bytes. Raises OSError."""
        counters = _Counters(cb=ctypes.sizeof(_Counters))
        process = _kernel32.GetCurrentProcess()
        if not _kernel32.K32GetProcessMemoryInfo(process, ctypes.byref(counters), counters.cb):
            raise ctypes.WinError(ctypes.get_last_error())
        return int(counters.peak_working_set)

    def free_memory() -> int | None:
        """The bytes that a process could have on this machine; None where the system does not
        tell."""
        status = _Status(length=ctypes.sizeof(_Status))
        return (
            int(status.available) if _kernel32.GlobalMemoryStatusEx(ctypes.byref(status)) else None
        )
