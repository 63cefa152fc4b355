"""The fusion passes: attention of any spelling becomes FlashAttentionScore, or is declined with a
reason.

`fuse` runs them on a model (fusion.py). docs/developing.md says what each package is for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fa_compiler.passes.answer.options import ASSUMPTIONS, Options
    from fa_compiler.passes.answer.report import Block, Code, Report
    from fa_compiler.passes.fusion import fuse
    from fa_compiler.passes.values.shapes import ShapeInfo, analyse

__all__ = ["ASSUMPTIONS", "Block", "Code", "Options", "Report", "ShapeInfo", "analyse", "fuse"]

_PLACES = {
    "ASSUMPTIONS": "answer.options",
    "Block": "answer.report",
    "Code": "answer.report",
    "Options": "answer.options",
    "Report": "answer.report",
    "ShapeInfo": "values.shapes",
    "analyse": "values.shapes",
    "fuse": "fusion",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use: the command line needs the options always, and the rest
    seldom."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    globals()[name] = value
    return value
