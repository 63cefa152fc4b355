"""The programs of the pages, the model that they run, and the comparison of what they print."""

from __future__ import annotations

import re
from pathlib import Path

from tools.processes import ROOT

MODEL = ROOT / "examples" / "models" / "bert.onnx"
_AGREE = 2e-5
"""ONNX Runtime's release in npm is another one than Python's; the programs print six digits."""


def block(page: str, language: str) -> str:
    """The program of a language in a page of the documents."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    (found,) = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    return str(found)


def headers_of(modules: Path) -> Path:
    """The folder of ONNX Runtime's headers in npm's folder node_modules."""
    return next((modules / "com.github.asus4.onnxruntime").rglob("onnxruntime_cxx_api.h")).parent


def differs(program: str, got: float, want: float) -> bool:
    """Print a line with the results of a program and of Python. Do they differ?"""
    agrees = abs(got - want) <= _AGREE
    print(f"{program}: {got:.6f}, in Python {want:.6f}{'' if agrees else ': differs'}")
    return not agrees
