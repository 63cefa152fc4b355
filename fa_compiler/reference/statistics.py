"""softmax_max and softmax_sum: float32 with 8 equal columns, in the orders in which the operators
store them.

    all layouts but TND                 [B,N,S,8]
    TND forward, softmax_out_layout ""  declared as [T,N,8], but stored as blocks [N,S_b,8], one for
                                        each batch entry
    TND forward, "same_as_input"        [T,N,8]
    TND backward, softmax_in_layout ""  the same blocks
    TND backward, "same_as_input"       [N,T,8]

The blocks lie back to back. The GE operator declares and stores [N,T,8] in the last case.
"""

from __future__ import annotations

import numpy as np

from fa_compiler.reference.call import Floats, OpCall
from fa_compiler.reference.layouts import Side

COLUMNS = 8
ORDERS = ("", "same_as_input")


def check_order(call: OpCall, attribute: str) -> str:
    """The value of softmax_out_layout or softmax_in_layout. Raises ReferenceInputError for an
    unknown value."""
    order = str(call.attrs[attribute])
    if order not in ORDERS:
        raise call.error(attribute, f'must be "" or "same_as_input", got {order!r}')
    return order


def unrounded(top: Floats, own: Floats) -> Floats:
    """softmax_max in float64: the largest score `own` of a row where `top` is `own` rounded to
    float32, else `top`."""
    with np.errstate(over="ignore"):
        return np.where(own.astype(np.float32) == top, own, top)


def pack(parts: list[Floats], side: Side, order: str) -> Floats:
    """The statistics [N, S_b] of each batch entry in the order of the forward pass. Tokens of no
    batch entry have 0."""
    if side.layout != "TND":
        out = np.zeros((len(parts), side.heads, side.total))
        for batch, part in enumerate(parts):
            out[batch] = part
    else:
        out = np.zeros((side.total, side.heads))
        if order == "same_as_input":
            for start, length, part in zip(side.starts, side.lengths, parts, strict=True):
                out[start : start + length] = part.T
        else:
            blocks = out.reshape(-1)
            for start, part in zip(side.starts, parts, strict=True):
                blocks[start * side.heads : start * side.heads + part.size] = part.reshape(-1)
    return np.repeat(out[..., None], COLUMNS, axis=-1)


def unpack(call: OpCall, name: str, side: Side, order: str) -> list[Floats]:
    """The statistics [N, S_b] of each batch entry from an input of the backward pass."""
    tensor = call.tensor(name)
    if side.layout != "TND":
        expected: tuple[int, ...] = (len(side.lengths), side.heads, side.total, COLUMNS)
    elif order == "same_as_input":
        expected = (side.heads, side.total, COLUMNS)
    else:
        expected = (side.total, side.heads, COLUMNS)
    if tensor.shape != expected:
        raise call.error(name, f"shape {list(tensor.shape)} is not {list(expected)}")
    data = tensor[..., 0].astype(np.float64)
    if side.layout != "TND":
        return list(data)
    if order == "same_as_input":
        if side.total != sum(side.lengths):
            raise call.error(
                name,
                f"[N,T,8] statistics need T = {side.total} to be the last value of "
                f"actual_seq_qlen, which is {sum(side.lengths)}",
            )
        return [
            data[:, start : start + length]
            for start, length in zip(side.starts, side.lengths, strict=True)
        ]
    blocks = data.reshape(-1)
    return [
        blocks[start * side.heads : (start + length) * side.heads].reshape(side.heads, length)
        for start, length in zip(side.starts, side.lengths, strict=True)
    ]
