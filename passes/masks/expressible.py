"""The bands that a target's operators have as attributes; every other band stays a mask.

The CPU kernel has all of band.py. Ascend's operators fail in a run whose band misses the scores. A
band that contains the diagonal S2 - S1 never does. One to the left of it (negative next_tockens)
has to be proven to leave the first row a key, and one to the right of it (negative pre_tockens)
always leaves the last row none.

The operators of ONNX and ONNX Runtime have these:

causal from the first row and key    is_causal of Attention. `unidirectional` of MultiHeadAttention
                                     and the causal mask of GroupQueryAttention where there are as
                                     many rows as keys
causal to the last row and key       where there are as many rows as keys, as above. A single row
                                     sees all keys, also where only the user says that it is one
                                     (`decode`, target contrib). is_causal of Attention whose keys
                                     are a past and as many new ones as rows
a window that ends at the row        local_window_size of GroupQueryAttention, where there are as
                                     many rows as keys
any window with the row's own key    left_window_size and right_window_size of Attention from opset
                                     25 on, where there are as many rows as keys
"""

from __future__ import annotations

from fa_compiler.op_registry.runtimes import ATTENTION, SCHEMA_SINCE, Feature
from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.answer.options import DECODE, Options
from fa_compiler.passes.masks.band import SparseMode


def is_single_row(rows: Dim, options: Options) -> bool:
    """Is there one row in every run, by its size or, for the target contrib, by the user's word?"""
    return rows.const == 1 or (
        rows.const is None and options.target == "contrib" and DECODE in options.assume
    )


def why_not_expressible(
    mode: SparseMode, rows: Dim, keys: Dim, options: Options, *, may_grow: bool = False
) -> str | None:
    """Why the target's operators do not have this band of rows and keys as an attribute; None where
    they do, or `may_grow` and they do for a past and new keys (rewrite/grown.py)."""
    if mode.is_beside_diagonal:
        return _why_beside_the_diagonal(mode, rows, keys, options)
    if not options.is_standard or _has_band_of_all_sizes(mode, rows, options, may_grow):
        return None
    if rows != keys:
        return f"the target's operators count rows from the first key, and {rows} rows are not {keys} keys in every run"
    if _has_band_of_square(mode, options):
        return None
    return f"no operator of the target {options.target!r} has this band as an attribute"


def _has_band_of_all_sizes(mode: SparseMode, rows: Dim, options: Options, may_grow: bool) -> bool:
    """Do operators of ONNX or ONNX Runtime have the band for these rows and any keys?"""
    if mode.is_first_causal:
        return options.target == "onnx"
    return mode.is_last_causal and (
        (options.target == "onnx" and may_grow) or is_single_row(rows, options)
    )


def _has_band_of_square(mode: SparseMode, options: Options) -> bool:
    """Do operators of ONNX or ONNX Runtime have the band for as many rows as keys?"""
    if not mode.is_window:
        return mode.is_first_causal or mode.is_last_causal
    if options.target == "contrib":
        return mode.next_tockens == 0
    return options.opset >= SCHEMA_SINCE[ATTENTION, Feature.WINDOW]


def _why_beside_the_diagonal(
    mode: SparseMode, rows: Dim, keys: Dim, options: Options
) -> str | None:
    """`why_not_expressible` for a band to one side of the diagonal of the last row and key."""
    if options.divided:
        return (
            "a rank of a model that is divided along the sequence needs the key of the row itself"
        )
    if options.target == "ort":
        return None
    if options.is_standard:
        return f"no operator of the target {options.target!r} has a band beside the diagonal as an attribute"
    meets = mode.pre_tockens >= 0 and (keys - rows + mode.next_tockens).is_at_least(0)
    if meets and mode.pre_tockens + mode.next_tockens >= 0:
        return None
    return "the operator fails in a run whose band misses the scores"
