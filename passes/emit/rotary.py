"""Rotary position embedding in plain operators.

    x1 cos - x2 sin, x2 cos + x1 sin        (x1, x2): the halves of each head, or its even and odd
                                            elements

Each product and sum is computed in the type of x, as the ONNX specification defines
RotaryEmbedding.
"""

from __future__ import annotations

import onnx_ir as ir

from fa_compiler.passes.emit.build import Builder


def rotate_heads(
    builder: Builder,
    x: ir.Value,
    cos: ir.Value,
    sin: ir.Value,
    size: int,
    part: int,
    interleaved: bool,
) -> ir.Value:
    """x with the first `part` elements of each head rotated.

    x has rank 4 and heads of `size` elements along its last axis. cos and sin broadcast to [...,
    part / 2].
    """

    def cut(start: int, end: int, step: int = 1) -> ir.Value:
        return builder.slice(x, [start], [end], [3], [step])

    def combined(sign: str, first: ir.Value, second: ir.Value) -> ir.Value:
        products = [builder.mul(cos, first), builder.mul(sin, second)]
        return builder.op(sign, products)

    if interleaved:
        x1, x2 = cut(0, part, 2), cut(1, part, 2)
    else:
        x1, x2 = cut(0, part // 2), cut(part // 2, part)
    parts = [combined("Sub", x1, x2), combined("Add", x2, x1)]
    if interleaved:
        pair = builder.concat([builder.unsqueeze(half, [4]) for half in parts], 4)
        parts = [builder.reshape(pair, [0, 0, 0, part])]
    if part < size:
        parts.append(cut(part, size))
    return builder.concat(parts, 3)
