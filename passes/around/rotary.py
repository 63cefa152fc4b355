"""Rotary positions: pairs of numbers are rotated by an angle that grows with the token, in the
spellings of exporters.

    x1, x2 = x[..., : d // 2], x[..., d // 2 :];  y = x * cos + torch.cat((-x2, x1), -1) * sin

Grammar; the code cites the numbers of the cases, and rotary_ops.py has the operators that are
rotary positions already:

    x1, x2 :=
      1     the halves of x                along the last axis, by Split or by Slices
      2   | the elements of even and of odd places along the last axis
     14   | the two elements of the last axis of Reshape(x), of which each is a pair: as complex
          numbers are exported
     17   | the two elements of the last axis of any other tensor of pairs, [.., D / 2, 2]: a
          Reshape makes x from it
    joined(u, v) :=
      3     Concat(u, v)                   along the last axis
      4   | Reshape(Concat(Unsqueeze(u), Unsqueeze(v)))       along a new last axis, and in the
                                           shape of x again: pairs
     15   | Reshape(Concat(u, v))          in cases 14 and 17, along the last axis, and in the shape
                                           of x again: pairs
     16   | Concat(.., u, v, ..)           only in case 6, along the last axis: the others are
                                           joined to the result
    result :=
      5     Add(Mul(x, cos), Mul(joined(Neg(x2), x1), sin))
      6   | joined(Sub(Mul(x1, c), Mul(x2, s)), Add(Mul(x2, c), Mul(x1, s)))
                                           cos and sin are c and s twice, below
    the operator's mode :=
      7     0 (half)                       halves, joined as halves
      8   | 1 (interleave)                 pairs, joined as pairs; always in cases 14 and 17, where
                                           cos and sin have a further axis of 1
      9   | 3 (interleave-half)            pairs, joined as halves; only in case 6. Where the
                                           product does not have this mode, a Transpose moves the
                                           pairs into halves in front of mode 0
    x, cos and sin :=
     10     [B, N, S, D] and [1 or B, 1, S, D]         heads in front of the tokens
     11   | [B, S, N, D] and [1 or B, S, 1, D]         tokens in front of the heads
    x, where heads stand in front :=
     12     Transpose(z)                   of these two axes, and read here only: the operator reads
                                           z
     13   | x                              it is transposed
    x, where it is read :=
     18     Cast(x)                        to the type that it has, any number of times; in case 5

The operator tells the tokens from the heads by the shape of cos. Where heads stand in front, A2 and
A3 take few of them for each token. Open sizes do not prove this, and a decoder of one token breaks
it. So the operator always gets the tokens in front. A Transpose that is made for this moves the
tensor once; the nodes that it replaces do so six times.

The sizes of cos are those of x, or 1: this is proven, because the operator does not broadcast in
other ways. In case 6 the last axis of c has half of them: a Concat of two makes cos for halves, and
a Gather that takes each number twice makes it for pairs. What is computed is the same, operation by
operation. In 16 bits the operator may compute in float32 and round once, where the model rounds
three times; the report says so. What overflows in the model need not do so in the operator. That
all numbers are finite is assumed for Ascend; without this assumption 16 bits are declined.

The parts of a partial rotation (rotation of the first dimensions of a head) are matched as any
other tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import onnx_ir as ir

from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.options import Options
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.around.halves import Halves, halves_of, pairs_of
from fa_compiler.passes.around.records import (
    HALF,
    INTERLEAVE,
    INTERLEAVE_HALF,
    Rotary,
    expect_finite,
    is_float,
    known_shape,
)
from fa_compiler.passes.around.rows import before_idle_casts
from fa_compiler.passes.ir.nodes import (
    certain,
    data_readers,
    is_op,
    only_reader,
    operand_at,
    operand_beside,
    operand_orders,
    operands,
    permutation,
    places_of,
    sole,
    without_none,
)
from fa_compiler.passes.ops.context import Shape
from fa_compiler.passes.ops.parts import concat_of
from fa_compiler.passes.values.patterns import Bind, Op, match, matches
from fa_compiler.passes.values.shapes import ShapeInfo

_C, _S, _X1, _X2 = (Bind(name) for name in ("cos", "sin", "first", "second"))
_REAL = Op("Sub", Op("Mul", _X1, _C), Op("Mul", _X2, _S))
_IMAGINARY = Op("Add", Op("Mul", _X2, _C), Op("Mul", _X1, _S))
SWAP = (0, 2, 1, 3)
"""The Transpose between tokens in front of heads and heads in front of tokens."""
# 7 to 9
_MODES = {
    ("halves", "halves"): HALF,
    ("pairs", "pairs"): INTERLEAVE,
    ("pairs", "halves"): INTERLEAVE_HALF,
}


def is_anchor(node: ir.Node) -> bool:
    """May this join the two parts of what is rotated?"""
    if not is_op(node, "Concat") or (place := _place(node)) is None:
        return False
    first = _before_unsqueeze(operand_at(node, place))
    return is_op(first.producer(), "Neg", "Sub")


def _place(node: ir.Node) -> int | None:
    """The place of the first of the two parts that a Concat joins; None where it joins something
    else."""
    if len(node.inputs) == 2:
        return 0
    makers = [value.producer() for value in operands(node)]
    pairs = enumerate(pairwise(makers))
    # 16
    return next(
        (place for place, pair in pairs if is_op(pair[0], "Sub") and is_op(pair[1], "Add")), None
    )


def rotary(node: ir.Node, info: ShapeInfo, options: Options) -> list[Rotary]:
    """The rotary positions around a Concat, the best form of them first; none where there are none.

    Raises:
        Decline: they are positions that the operator does not compute.
    """
    joined = _joined(node, info)
    found = None if joined is None else _added(joined, info) or _written_out(joined, info)
    if found is None:
        return []
    checked = _checked(found, info, options)
    if found.mode != INTERLEAVE_HALF:
        return [checked]
    return [checked, replace(checked, mode=HALF, moves_pairs=True)]  # 9


@dataclass(frozen=True)
class _Joined:
    """Two values that are joined, as halves or as pairs, and the nodes that do so. `others` stand
    in front of them and behind them."""

    node: ir.Node
    first: ir.Value
    second: ir.Value
    result: ir.Value
    form: str
    nodes: tuple[ir.Node, ...]
    others: tuple[Sequence[ir.Value], Sequence[ir.Value]] = ((), ())

    def shape(self, info: ShapeInfo) -> Shape | None:
        """The shape of the two, joined alone; None where it is not known."""
        part = info.shape(self.first)
        if not any(self.others):
            return info.shape(self.result)
        return None if not part or info.shape(self.second) != part else (*part[:-1], part[-1] * 2)


def _joined(node: ir.Node, info: ShapeInfo) -> _Joined | None:
    """What a Concat joins; None where it joins along another axis than the last one."""
    place = _place(node) or 0
    values = operand_at(node, place), operand_at(node, place + 1)
    inner = _before_unsqueeze(values[0]), _before_unsqueeze(values[1])
    whole, shape = concat_of(node, info), info.shape(values[0])
    if whole is None or not whole.is_last or not shape:
        return None
    others = operands(node)[:place], operands(node)[place + 2 :]
    if inner == values:
        return _Joined(node, *values, node.outputs[0], "halves", (node,), others)  # 3
    added = [value.producer() for value in values]
    reshape = sole(data_readers(node.outputs[0]))
    last = all(
        is_op(one, "Unsqueeze") and places_of(one, len(shape)) == [len(shape) - 1] for one in added
    )
    if not last or not is_op(reshape, "Reshape"):
        return None
    nodes = tuple(without_none((*added, node, reshape)))
    return _Joined(node, *inner, reshape.outputs[0], "pairs", nodes)  # 4


def _before_unsqueeze(value: ir.Value) -> ir.Value:
    node = value.producer()
    return operand_at(node, 0) if is_op(node, "Unsqueeze") else value


def _added(joined: _Joined, info: ShapeInfo) -> Rotary | None:
    """x * cos plus what is joined * sin; None where something else is computed."""
    negative, product = joined.first.producer(), only_reader(joined.result)
    if not is_op(negative, "Neg") or not is_op(product, "Mul"):
        return None
    parts = _parts(joined.second, operand_at(negative, 0), joined, info)
    total = only_reader(product.outputs[0])
    sin = certain(operand_beside(product, joined.result, "Mul"))
    if parts is None or total is None:
        return None
    if parts.mode == INTERLEAVE_HALF:
        return None
    x = before_idle_casts(parts.cut.whole, info)  # 18
    for straight, factor, cos in _times(x, total, product.outputs[0], info):  # 5
        casts = (*_idle_casts(parts.cut.whole, x), *_idle_casts(factor, x))
        nodes = dict.fromkeys(
            (*casts, *parts.cut.nodes, negative, *joined.nodes, product, straight, total)
        )
        return Rotary(joined.node, x, cos, sin, total.outputs[0], tuple(nodes), parts.mode)
    return None


def _times(
    x: ir.Value, total: ir.Node, rotated: ir.Value, info: ShapeInfo
) -> Iterator[tuple[ir.Node, ir.Value, ir.Value]]:
    """The product of x and a table that is added to what is rotated, with its factor that is x, and
    with the table."""
    for one, other in operand_orders(total, "Add"):
        straight = other.producer()
        for factor, cos in operand_orders(straight, "Mul"):
            if one is rotated and before_idle_casts(factor, info) is x and straight is not None:
                yield straight, factor, cos


def _idle_casts(value: ir.Value, x: ir.Value) -> list[ir.Node]:
    """The Casts that make a value from x, in order."""
    found: list[ir.Node] = []
    while value is not x and (node := value.producer()) is not None:
        found.insert(0, node)
        value = operand_at(node, 0)
    return found


def _written_out(joined: _Joined, info: ShapeInfo) -> Rotary | None:
    """The rotation of both parts, which are joined then; None where something else is computed."""
    for real in matches(_REAL, joined.first, info):  # 6
        imaginary = match(_IMAGINARY, joined.second, info, real.values)
        parts = _parts(real["first"], real["second"], joined, info)
        if imaginary is not None and parts is not None:
            nodes = tuple(
                dict.fromkeys((*parts.cut.nodes, *real.nodes, *imaginary.nodes, *joined.nodes))
            )
            found = Rotary(
                joined.node,
                parts.cut.whole,
                real["cos"],
                real["sin"],
                joined.result,
                nodes,
                parts.mode,
            )
            found = replace(found, is_half_table=True, others=joined.others)
            return _of_complex_numbers(found, info) or found
    return None


def _of_complex_numbers(found: Rotary, info: ShapeInfo) -> Rotary | None:
    """The rotation of a tensor whose pairs are the parts of complex numbers; None where they are
    not."""
    shape, cut, last = info.sizes(found.x), found.x.producer(), sole(data_readers(found.result))
    if len(shape) != 5 or shape[-1] != 2 or not is_op(last, "Reshape"):
        return None
    result, whole = last.outputs[0], _without_pairs(shape)
    if info.shape(result) != whole:  # 15
        return None
    # 8
    made = replace(
        found, result=result, nodes=(*found.nodes, last), mode=INTERLEAVE, is_complex=True
    )
    if not is_op(cut, "Reshape") or info.shape(operand_at(cut, 0)) != whole:
        return made  # 17
    return replace(made, x=operand_at(cut, 0), nodes=(cut, *made.nodes))  # 14


def _without_pairs(shape: Shape) -> Shape:
    """The shape in which the last two axes, of pairs and of the parts of each, are one."""
    return (*shape[:-2], shape[-2] * shape[-1])


@dataclass(frozen=True)
class _Parts:
    """The tensor whose parts are rotated, and the mode that says so."""

    cut: Halves
    mode: int


def _parts(first: ir.Value, second: ir.Value, joined: _Joined, info: ShapeInfo) -> _Parts | None:
    """The tensor whose parts are these, cut along its last axis; None for other values, and where
    they are joined otherwise than the operator does."""
    # 1 and 2
    for form, cut in (
        ("halves", halves_of(first, second, info)),
        ("pairs", pairs_of(first, second, info)),
    ):
        mode = _MODES.get((form, joined.form))
        if (
            cut is not None
            and mode is not None
            and cut.axis == -1
            and joined.shape(info) == info.shape(cut.whole)
        ):
            return _Parts(cut, mode)
    return None


def _checked(found: Rotary, info: ShapeInfo, options: Options) -> Rotary:
    """The rotary positions with the order of their axes. Raises Decline."""
    node, dtype = found.anchor, is_float(found.x, info, found.anchor)
    if info.dtype(found.cos) != dtype or info.dtype(found.sin) != dtype:
        raise Decline(
            Code.DTYPE,
            "the tables of cosines and sines have another type than what is rotated",
            node,
        )
    expect_finite(dtype, options, node)
    if any(_is_read_elsewhere(inner, found.nodes) for inner in found.nodes[:-1]):
        raise Decline(
            Code.READ_INSIDE,
            "a number inside of the rotation is read elsewhere, or is an output",
            node,
        )
    heads_first = _has_heads_first(found, info)
    return replace(
        found, heads_first=heads_first, read_behind=_behind(found, info) if heads_first else None
    )


def _is_read_elsewhere(node: ir.Node, nodes: tuple[ir.Node, ...]) -> bool:
    """Does another node read what a node computes? A Cast computes nothing here."""
    if is_op(node, "Cast"):
        return False
    return any(
        value.is_graph_output() or any(reader not in nodes for reader in data_readers(value))
        for value in node.outputs
    )


def _has_heads_first(found: Rotary, info: ShapeInfo) -> bool:
    """Do the heads stand in front of the tokens? The sizes of the tables tell. Raises Decline where
    they do not fit."""
    shape = known_shape(found.x, info, found.anchor)
    shape = _without_pairs(shape) if found.is_complex and len(shape) == 5 else shape
    tables = [_table_shape(found, value, info) for value in (found.cos, found.sin)]
    orders = [
        order
        for order in (False, True)
        if all(_fits(shape, own, order, found.is_half_table) for own in tables)
    ]
    if not orders or tables[0] != tables[1]:
        reason = "the sizes of the tables are not proven to be those of what is rotated"
        raise Decline(Code.SHAPE, reason, found.anchor, "")
    return orders[0]


def _table_shape(found: Rotary, table: ir.Value, info: ShapeInfo) -> Shape:
    """The shape of a table, without the axis of 1 that it has beside complex numbers; () where it
    is not known."""
    shape = info.sizes(table)
    if not found.is_complex:
        return shape
    return shape[:-1] if shape[-1:] == (Dim(1),) else ()


def _fits(x: Shape, table: Shape, heads_first: bool, is_half: bool) -> bool:
    """Do the axes of a table have the sizes of x, or 1 where they are to be repeated? The last one
    may have half."""
    if not len(x) == len(table) == 4:
        return False
    tokens, heads = (2, 1) if heads_first else (1, 2)  # 10 and 11
    one, width = Dim(1), table[3] * 2 if is_half else table[3]
    return (
        table[0] in (one, x[0])
        and table[heads] == one
        and table[tokens] == x[tokens]
        and width == x[3]
    )


def _behind(found: Rotary, info: ShapeInfo) -> ir.Value | None:
    """What the Transpose of tokens and heads makes x from, where only the rotation reads x."""
    node = found.x.producer()
    if not is_op(node, "Transpose") or permutation(node, 4) != list(SWAP):  # 12
        return None
    alone = not found.x.is_graph_output() and all(
        reader in found.nodes for reader in data_readers(found.x)
    )
    return operand_at(node, 0) if alone else None  # 13 where it is not
