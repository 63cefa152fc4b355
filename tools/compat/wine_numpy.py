"""Lets NumPy 2 for Windows run in Wine 8, whose C library has no functions for complex numbers.

NumPy imports them from a part of Windows' C library by its name. In the copy for Wine it imports them from a library of
ours, which Zig compiles, and which hands everything else on to Wine's.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pefile

MATH = b"api-ms-win-crt-math-l1-1-0.dll"
_TO_REAL = ("cabs", "carg", "cimag", "creal")
_TO_COMPLEX = ("ccos", "ccosh", "cexp", "csin", "csinh", "ctan", "ctanh")
_OF_TWO = ("cpow",)

# Microsoft's complex types are handed over as structures are, unlike Clang's, and its long double is a double.
SOURCE = """
#include <math.h>
typedef struct { double re, im; } D;
typedef struct { float re, im; } F;
static double creal_(D z) { return z.re; }
static double cimag_(D z) { return z.im; }
static double cabs_(D z) { return hypot(z.re, z.im); }
static double carg_(D z) { return atan2(z.im, z.re); }
static D turned(D z) { return (D){-z.im, z.re}; }
static D turned_back(D z) { return (D){z.im, -z.re}; }
static D divided(D z, D by) {
  double square = by.re * by.re + by.im * by.im;
  return (D){(z.re * by.re + z.im * by.im) / square, (z.im * by.re - z.re * by.im) / square};
}
static D cexp_(D z) { return (D){exp(z.re) * cos(z.im), exp(z.re) * sin(z.im)}; }
static D csinh_(D z) { return (D){sinh(z.re) * cos(z.im), cosh(z.re) * sin(z.im)}; }
static D ccosh_(D z) { return (D){cosh(z.re) * cos(z.im), sinh(z.re) * sin(z.im)}; }
static D ctanh_(D z) { return divided(csinh_(z), ccosh_(z)); }
static D csin_(D z) { return turned_back(csinh_(turned(z))); }
static D ccos_(D z) { return ccosh_(turned(z)); }
static D ctan_(D z) { return turned_back(ctanh_(turned(z))); }
static D cpow_(D z, D p) {
  double size = log(cabs_(z)), angle = carg_(z);
  return cexp_((D){p.re * size - p.im * angle, p.re * angle + p.im * size});
}
#define TO_REAL(name, of, T, REAL) REAL ours_##name(T z) { return (REAL)of((D){z.re, z.im}); }
#define TO_COMPLEX(name, of, T, REAL) \\
  T ours_##name(T z) { D y = of((D){z.re, z.im}); return (T){(REAL)y.re, (REAL)y.im}; }
#define OF_TWO(name, of, T, REAL) \\
  T ours_##name(T z, T p) { D y = of((D){z.re, z.im}, (D){p.re, p.im}); return (T){(REAL)y.re, (REAL)y.im}; }
"""


def complete(site: Path) -> None:
    """Have NumPy in a folder of packages for Windows import from our library, unless it does already."""
    for path in sorted((site / "numpy").rglob("*.pyd")):
        binary = pefile.PE(str(path))
        for entry in binary.DIRECTORY_ENTRY_IMPORT:
            names = {symbol.name.decode() for symbol in entry.imports if symbol.name}
            if entry.dll == MATH and names & _lines().keys():
                # A process has one library of a name, so each folder has a name of its own.
                name = f"wine_{path.parent.name}"
                _compile(path.parent / name, names)
                binary.set_bytes_at_rva(entry.struct.Name, f"{name}.dll".encode() + b"\0")
                content = binary.write()
                binary.close()
                path.write_bytes(content)
                break


def _lines() -> dict[str, str]:
    """The line of the library's source that makes each function."""
    made = {}
    for macro, names in (("TO_REAL", _TO_REAL), ("TO_COMPLEX", _TO_COMPLEX), ("OF_TWO", _OF_TWO)):
        for name in names:
            for end, types in (("", "D, double"), ("f", "F, float"), ("l", "D, double")):
                made[f"{name}{end}"] = f"{macro}({name}{end}, {name}_, {types})"
    return made


def _compile(library: Path, names: set[str]) -> None:
    """Make a library, whose path is given without its suffix, with functions of these names."""
    ours = {name: line for name, line in _lines().items() if name in names}
    exports = [f"  {name} = {f'ours_{name}' if name in ours else f'ucrtbase.{name}'}" for name in sorted(names)]
    source, listed = library.with_suffix(".c"), library.with_suffix(".def")
    source.write_text("\n".join([SOURCE, *ours.values(), ""]), encoding="utf-8")
    listed.write_text("\n".join(["EXPORTS", *exports, ""]), encoding="utf-8")
    command = [sys.executable, "-m", "ziglang", "cc", "-target", "x86_64-windows-gnu", "-O2", "-g0", "-s", "-shared"]
    subprocess.run([*command, str(source), str(listed), "-o", str(library.with_suffix(".dll"))], check=True)
