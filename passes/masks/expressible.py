"""The bands that a target's operators have as attributes; every other band stays a mask.

The CPU kernel has all of band.py. Ascend's operators fail in a run whose band misses the scores. A band that contains
the diagonal S2 - S1 never does. One to the left of it (negative next_tockens) has to be proven to leave the first row a
key, and one to the right of it (negative pre_tockens) always leaves the last row none.

The operators of ONNX and ONNX Runtime have these:

causal from the first row and key    is_causal of Attention. `unidirectional` of MultiHeadAttention and the causal
                                     mask of GroupQueryAttention where there are as many rows as keys
causal to the last row and key       where there are as many rows as keys, as above. A single row sees all keys,
                                     also where only the user says that it is one (`decode`, target contrib).
                                     is_causal of Attention whose keys are a past and as many new ones as rows
a window that ends at the row        local_window_size of GroupQueryAttention, where there are as many rows as keys
any window with the row's own key    left_window_size and right_window_size of Attention from opset 25 on, where there
                                     are as many rows as keys
"""

from __future__ import annotations

from fa_compiler.op_registry.runtimes import ATTENTION, SCHEMA_SINCE, Feature
from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.answer.options import DECODE, Options
from fa_compiler.passes.masks.band import SparseMode

FIRST_CAUSAL, LAST_CAUSAL, WINDOW = 2, 3, 4
"""The sparse_modes of these bands."""


def is_single_row(rows: Dim, options: Options) -> bool:
    """Is there one row in every run, by its size or, for the target contrib, by the user's word?"""
    return rows.const == 1 or (rows.const is None and options.target == "contrib" and DECODE in options.assume)


def why_not_expressible(
    mode: SparseMode, rows: Dim, keys: Dim, options: Options, *, may_grow: bool = False
) -> str | None:
    """Why the target's operators do not have this band of rows and keys as an attribute; None where they do, or
    `may_grow` and they do for a past and new keys (rewrite/grown.py)."""
    if mode.sparse_mode == WINDOW and min(mode.pre_tockens, mode.next_tockens) < 0:
        return _why_beside_the_diagonal(mode, rows, keys, options)
    if not options.is_standard:
        return None
    if mode.sparse_mode == LAST_CAUSAL and options.target == "onnx" and may_grow:
        return None
    if mode.sparse_mode == FIRST_CAUSAL and options.target == "onnx":
        return None
    if mode.sparse_mode == LAST_CAUSAL and is_single_row(rows, options):
        return None
    if rows != keys:
        return f"the target's operators count rows from the first key, and {rows} rows are not {keys} keys in every run"
    if mode.sparse_mode in (FIRST_CAUSAL, LAST_CAUSAL):
        return None
    if mode.sparse_mode == WINDOW and mode.next_tockens == 0 and options.target == "contrib":
        return None
    has_windows = options.target == "onnx" and options.opset >= SCHEMA_SINCE[ATTENTION, Feature.WINDOW]
    if mode.sparse_mode == WINDOW and has_windows:
        return None
    return f"no operator of the target {options.target!r} has this band as an attribute"


def _why_beside_the_diagonal(mode: SparseMode, rows: Dim, keys: Dim, options: Options) -> str | None:
    """`why_not_expressible` for a band to one side of the diagonal of the last row and key."""
    if options.divided:
        return "a rank of a model that is divided along the sequence needs the key of the row itself"
    if options.target == "ort":
        return None
    if options.is_standard:
        return f"no operator of the target {options.target!r} has a band beside the diagonal as an attribute"
    meets = mode.pre_tockens >= 0 and (keys - rows + mode.next_tockens).is_at_least(0)
    if meets and mode.pre_tockens + mode.next_tockens >= 0:
        return None
    return "the operator fails in a run whose band misses the scores"
