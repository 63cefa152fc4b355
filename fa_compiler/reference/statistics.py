"""softmax_max and softmax_sum: float32 with 8 equal columns, in the physical orders the operators use.

Not TND: [B,N,S,8]. TND forward with softmax_out_layout "": declared [T,N,8], but physically one block
[N,S_b,8] a batch, back to back; with "same_as_input": truly [T,N,8]. TND backward with softmax_in_layout "":
the same blocks; with "same_as_input" the GE operator wants declared and physical [N,T,8].
"""

from __future__ import annotations

import numpy as np

from fa_compiler.reference.call import Call, Floats
from fa_compiler.reference.layouts import Side

COLUMNS = 8
ORDERS = ("", "same_as_input")


def check_order(call: Call, attribute: str) -> str:
    """The value of softmax_out_layout or softmax_in_layout; an error if it is unknown."""
    order = str(call.attrs[attribute])
    if order not in ORDERS:
        raise call.error(attribute, f'must be "" or "same_as_input", got {order!r}')
    return order


def unrounded(top: Floats, own: Floats) -> Floats:
    """softmax_max in float64: where it is a row's own largest score rounded to float32, that score."""
    with np.errstate(over="ignore"):
        return np.where(own.astype(np.float32) == top, own, top)


def pack(parts: list[Floats], side: Side, order: str) -> Floats:
    """Per-batch [N, S_b] statistics in the forward's output order; tokens that no batch owns have 0."""
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


def unpack(call: Call, name: str, side: Side, order: str) -> list[Floats]:
    """Per-batch [N, S_b] statistics from a backward input."""
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
        return [data[:, start : start + length] for start, length in zip(side.starts, side.lengths, strict=True)]
    blocks = data.reshape(-1)
    return [
        blocks[start * side.heads : (start + length) * side.heads].reshape(side.heads, length)
        for start, length in zip(side.starts, side.lengths, strict=True)
    ]
