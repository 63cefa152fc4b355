"""Reads and writes at places of open files, on every system, and opens files that may be replaced
meanwhile.

Windows has no read at a place that leaves the position of the file alone. There one lock for all
files guards the position, so no thread reads at the place of another one. And it does not replace a
file that is open, unless whoever opened it has allowed that.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

if sys.platform != "win32":

    def read_at(descriptor: int, count: int, position: int) -> bytes:
        """At most `count` bytes of an open file from a position on. Raises OSError."""
        return os.pread(descriptor, count, position)

    def write_at(descriptor: int, content: bytes | memoryview, position: int) -> int:
        """Write at a position of an open file, and return how many bytes were written. Raises
        OSError."""
        return os.pwrite(descriptor, content, position)

    def open_shared(path: Path) -> int:
        """Open a file for reading. It may be replaced or removed while it is open. Raises
        OSError."""
        return os.open(path, os.O_RDONLY)

    def replace(written: Path, place: Path) -> None:
        """Move a file to a place, and replace what is there. Raises OSError."""
        written.replace(place)

else:
    import ctypes
    import msvcrt
    import secrets
    import stat

    _position = threading.Lock()
    _GENERIC_READ = 0x80000000
    _SHARE_ALL = 1 | 2 | 4
    _OPEN_EXISTING = 3
    _kernel32 = ctypes.WinDLL("kernel32", use_last_error=True)
    _kernel32.CreateFileW.restype = ctypes.c_void_p
    _kernel32.CreateFileW.argtypes = [
        *(ctypes.c_wchar_p, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p),
        *(ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p),
    ]
    _INVALID = ctypes.c_void_p(-1).value

    def read_at(descriptor: int, count: int, position: int) -> bytes:
        """At most `count` bytes of an open file from a position on. Raises OSError."""
        with _position:
            os.lseek(descriptor, position, os.SEEK_SET)
            return os.read(descriptor, count)

    def write_at(descriptor: int, content: bytes | memoryview, position: int) -> int:
        """Write at a position of an open file, and return how many bytes were written. Raises
        OSError."""
        with _position:
            os.lseek(descriptor, position, os.SEEK_SET)
            return os.write(descriptor, content)

    def open_shared(path: Path) -> int:
        """Open a file for reading. It may be replaced or removed while it is open. Raises
        OSError."""
        path.stat()  # its error names the file
        handle = _kernel32.CreateFileW(
            str(path), _GENERIC_READ, _SHARE_ALL, None, _OPEN_EXISTING, 0, None
        )
        if handle == _INVALID:
            code = ctypes.get_last_error()
            raise OSError(None, ctypes.FormatError(code).strip(), str(path), code)
        return msvcrt.open_osfhandle(handle, os.O_RDONLY | os.O_BINARY)

    def replace(written: Path, place: Path) -> None:
        """Move a file to a place, and replace what is there. An open file moves away first. Raises
        OSError."""
        try:
            written.replace(place)
        except PermissionError:
            aside = place.with_name(f".{place.name}.{secrets.token_hex(4)}.old")
            place.replace(aside)
            try:
                written.replace(place)
            except OSError:
                aside.replace(place)
                raise
            with suppress(OSError):
                aside.chmod(stat.S_IWRITE)  # a file that may only be read is not removed
                aside.unlink()
