"""Query, key and value that are cut from one transposed tensor: the tensor is cut before it is
transposed.

    q, k, v = qkv.reshape(b, s, 3, n, d).permute(2, 0, 3, 1, 4).unbind(0)

Grammar; the code cites the numbers of the cases:

    packed := Transpose(x)                          read by cuts along one axis alone, which leave
                                                    nothing out; each cut leads to a product of two
                                                    tensors that are no weights, by layout
                                                    operators, casts and elementwise sums and
                                                    products
      1     Split(packed)
      2   | Gather(packed, i), ...                  i one constant number, as a scalar or in a
                                                    vector
      3   | Slice(packed), ...                      steps of 1, constant places, no other axis
    emitted
      4     Transpose(Split(x)), ...                the same permutation; Squeeze behind it for the
                                                    scalars of 2
      5     Transpose(Reshape(Split(w))), ...       x = Reshape(w), read by nothing else, that takes
                                                    the last dimension of w apart into that of the
                                                    cuts and known sizes behind it

Moving elements and leaving elements out commute, so every result holds the same bits.

timm and PaddleOCR write Reshape(qkv, [B, S, 3, N, D]), Transpose(2, 0, 3, 1, 4) and three cuts.
Query, key and value then are [B, N, S, D], and the attention had to compute in this layout and to
transpose its result. Cut first they are [B, S, N * D], which no attention has to copy, and the
result is in the order that the model wants. A Transpose that stays because something else reads it
copies its own part: together they copy no more than the one before.

Left alone: cuts that no attention reads as they are, such as the halves of a head that rotary
positions turn, and those of a convolution over the sequence. A Transpose of each would only be one
node more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.algebra.symbolic import Dim, consts
from fa_compiler.passes.emit.build import Builder, Names
from fa_compiler.passes.ir.nodes import (
    distinct_consumers,
    has_row,
    holds_output,
    input_of,
    int_attr,
    is_op,
    is_weight,
    makers_of,
    nodes_of_type,
    only_reader,
    operand_at,
    permutation,
    reached,
    readers_of,
    single,
    sole,
    without_none,
)
from fa_compiler.passes.layout.contraction import Contraction, any_contraction
from fa_compiler.passes.ops.context import Shape, axis_in
from fa_compiler.passes.ops.elementwise import FOUR_OPERATIONS
from fa_compiler.passes.ops.movers import LAYOUT_OPS, element_source
from fa_compiler.passes.ops.parts import cut_from, split_of
from fa_compiler.passes.prepare.changes import change_found
from fa_compiler.passes.values.shapes import ShapeInfo

BETWEEN = (*LAYOUT_OPS, "Cast", *FOUR_OPERATIONS)
LIMIT = 16
"""So many values behind a cut are looked at."""


def cut_early(graphs: Sequence[ir.Graph], info: ShapeInfo, names: Names) -> bool:
    """Cut before transposing. Returns whether anything changed; then `info` does not know all of
    the graphs."""
    return change_found(graphs, info, names, _packed, _Packed.move)


@dataclass(frozen=True)
class _Cut:
    """A value that holds the places `start` to `start + size` of the dimension `axis` of what is
    cut, which it lacks if it is `squeezed`."""

    value: ir.Value
    axis: int
    start: int
    size: int
    squeezed: bool = False


@dataclass(frozen=True)
class _Packed:
    """A Transpose, the dimension of its result along which all of its readers cut, and the cuts."""

    node: ir.Node
    axis: int
    cuts: tuple[_Cut, ...]
    perm: tuple[int, ...]

    @property
    def readers(self) -> list[ir.Node]:
        """The nodes that cut."""
        return list(dict.fromkeys(makers_of(cut.value for cut in self.cuts)))

    def move(self, builder: Builder) -> list[ir.Node]:
        """Make the cuts before the Transpose, and let the readers of the old ones read them.
        Returns the old ones."""
        starts = sorted({(cut.start, cut.size) for cut in self.cuts})
        parts = dict(zip(starts, self._parts([size for _, size in starts], builder), strict=True))
        for cut in self.cuts:
            part = parts[cut.start, cut.size]
            moved = builder.transpose(part, self.perm)
            new = builder.squeeze(moved, [self.axis]) if cut.squeezed else moved
            for reader, place in tuple(cut.value.uses()):
                reader.replace_input_with(place, new)
        return self.readers

    def _parts(self, sizes: list[int], builder: Builder) -> Sequence[ir.Value]:
        """The parts of what is transposed."""
        whole, place, info = operand_at(self.node, 0), self.perm[self.axis], builder.info
        if (joined := _merged_source(whole, place, info)) is None:
            return builder.split(whole, place, sizes)  # 4
        inner = [size.const or 0 for size in info.sizes(whole)[place + 1 :]]
        width = math.prod(inner)
        parts = builder.split(joined, place, [size * width for size in sizes])  # 5
        targets = [builder.ints([*[0] * place, size, *inner]) for size in sizes]
        return [builder.reshape(part, to) for part, to in zip(parts, targets, strict=True)]


def _merged_source(whole: ir.Value, place: int, info: ShapeInfo) -> ir.Value | None:
    """Case 5: the tensor whose last dimension a Reshape takes apart from `place` on; None for other
    values."""
    node, shape = whole.producer(), info.shape(whole)
    source = operand_at(node, 0)
    own = info.sizes(source)
    if not is_op(node, "Reshape") or shape is None or only_reader(whole) is None:
        return None
    if len(own) != place + 1 or own[:place] != shape[:place] or not all(consts(shape[place:])):
        return None
    return source


def _packed(node: ir.Node, info: ShapeInfo) -> _Packed | None:
    """A Transpose that only such cuts read; None for other nodes."""
    if not is_op(node, "Transpose") or node.outputs[0].is_graph_output():
        return None
    shape = info.sizes(node.outputs[0])
    cuts = _all_cuts(node.outputs[0], shape, info) if shape else ()
    axis = sole({cut.axis for cut in cuts})
    if axis is None or len(cuts) < 2 or not _covers(cuts, shape[axis]):
        return None
    perm = permutation(node, len(shape))
    if perm is None or not all(_is_multiplied(cut.value, info) for cut in cuts):
        return None
    return _Packed(node, axis, cuts, tuple(perm))


def _all_cuts(packed: ir.Value, shape: Shape, info: ShapeInfo) -> tuple[_Cut, ...]:
    """What all readers of a tensor of this shape cut out of it; nothing where one of them does
    something else, or a cut is an output."""
    by_reader = [_cuts(reader, packed, shape, info) for reader, _ in packed.uses()]
    cuts = tuple(cut for own in by_reader for cut in own)
    if not all(by_reader) or holds_output(cut.value for cut in cuts):
        return ()
    return cuts


def _covers(cuts: Sequence[_Cut], length: Dim) -> bool:
    """Do cuts of a dimension of this length follow each other, and leave out nothing?"""
    end = 0
    for start, size in sorted({(cut.start, cut.size) for cut in cuts}):
        if start != end or size < 1:
            return False
        end += size
    return length.const == end


def _is_multiplied(value: ir.Value, info: ShapeInfo) -> bool:
    """Does a value lead to a product of two tensors that are no weights?"""

    def following(moved: ir.Value) -> list[ir.Value]:
        return [reader.outputs[0] for reader in nodes_of_type(distinct_consumers(moved), *BETWEEN)]

    values = reached([value], following, LIMIT)
    products = without_none(any_contraction(reader, info) for reader in readers_of(values))
    return not all(_has_weights(product) for product in products)


def _has_weights(product: Contraction) -> bool:
    """Is one of the operands weights?"""
    return any(is_weight(element_source(operand, "Cast")) for operand in product.operands)


def _cuts(reader: ir.Node, packed: ir.Value, shape: Shape, info: ShapeInfo) -> list[_Cut]:
    """The parts of known places that a node cuts out of a tensor, all along one axis; none for
    other nodes."""
    maker = packed.producer()
    if not has_row(reader, CUTTING) or reader.inputs[0] is not packed:
        return []
    if maker is None or reader.graph is not maker.graph:
        return []
    return CUTTING[reader.op_type](reader, shape, info)


def _split_cuts(split: ir.Node, shape: Shape, info: ShapeInfo) -> list[_Cut]:
    """Case 1."""
    cut, cuts = split_of(split, info), list[_Cut]()
    if cut is None:
        return []
    for part, start in zip(cut.parts, cut.starts(info), strict=True):
        size = cut.size(part, info)
        if start is None or size is None or start.const is None or size.const is None:
            return []
        cuts.append(_Cut(part, cut.axis, start.const, size.const))
    return cuts


def _gathered_cut(gather: ir.Node, shape: Shape, info: ShapeInfo) -> list[_Cut]:
    """Case 2."""
    axis, index = int_attr(gather, "axis", 0) % len(shape), single(input_of(gather, 1))
    if index is None or index.ndim > 1:
        return []
    place = axis_in(int(index.item()), shape[axis].const)
    return [] if place is None else [_Cut(gather.outputs[0], axis, place, 1, not index.ndim)]


def _sliced_cut(node: ir.Node, shape: Shape, info: ShapeInfo) -> list[_Cut]:
    """Case 3."""
    part = node.outputs[0]
    cut, own = cut_from(part, info), info.sizes(part)
    if cut is None:
        return []
    _, axis, start = cut
    size = own[axis].const
    return [] if size is None else [_Cut(part, axis, start, size)]


CUTTING: Mapping[str, Callable[[ir.Node, Shape, ShapeInfo], list[_Cut]]] = {
    "Split": _split_cuts,
    "Gather": _gathered_cut,
    "Slice": _sliced_cut,
}
