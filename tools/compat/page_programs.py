"""The programs of the pages, and the model that they run."""

from __future__ import annotations

import re

from tools.processes import ROOT

MODEL = ROOT / "examples" / "models" / "bert.onnx"
AGREE = 2e-5
"""ONNX Runtime's release in npm is another one than Python's; the programs print six digits."""


def block(page: str, language: str) -> str:
    """The program of a language in a page of the documents."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    (found,) = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    return str(found)
