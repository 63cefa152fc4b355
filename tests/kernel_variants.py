"""The variants of the CPU kernels: which ones the library was built with, and which ones this machine runs."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from fa_compiler import ops


@cache
def compiled() -> tuple[str, ...]:
    """The variants of the library, the reference last: it names them when asked for one that it does not know."""
    known = _refusal("?").partition("; this library has ")[2].rstrip()
    assert known.endswith("reference"), known
    return tuple(known.split(", "))


@cache
def runs(variant: str) -> bool:
    """Whether the processor has the instructions of a compiled variant."""
    refusal = _refusal(variant)
    assert not refusal or "lacks these instructions" in refusal, refusal
    return not refusal


def _refusal(variant: str) -> str:
    """What the library answers to the name of a variant; empty where it runs it."""
    one = np.ones((1, 1, 1, 1), np.float32)
    inputs = {"query": one, "key": one, "value": one}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FA_COMPILER_ISA", variant)
        try:
            ops.run("FlashAttentionScore", inputs, {"head_num": 1, "input_layout": "BNSD"}, ["attention_out"])
        except ops.KernelError as error:
            return str(error)
    return ""
