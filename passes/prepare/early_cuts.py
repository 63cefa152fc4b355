"""Query, key and value that are cut from one transposed tensor: the tensor is cut before it is transposed.

Grammar; the code cites the numbers of the cases:

    packed := Transpose(x)                          read by cuts along one axis alone, which leave nothing out; each
                                                    cut leads to a product of two tensors that are no weights, by
                                                    layout operators, casts and elementwise sums and products
      1     Split(packed)
      2   | Gather(packed, i), ...                  i one constant number, as a scalar or in a vector
      3   | Slice(packed), ...                      steps of 1, constant places, no other axis
    emitted
      4     Transpose(Split(x)), ...                the same permutation; Squeeze behind it for the scalars of 2
      5     Transpose(Reshape(Split(w))), ...       x = Reshape(w), read by nothing else, that takes the last dimension
                                                    of w apart into that of the cuts and known sizes behind it

Moving elements and leaving elements out commute, so every result holds the same bits.

timm and PaddleOCR write Reshape(qkv, [B, S, 3, N, D]), Transpose(2, 0, 3, 1, 4) and three cuts. Query, key and value
then are [B, N, S, D], and the attention had to compute in this layout and to transpose its result. Cut first they are
[B, S, N * D], which no attention has to copy, and the result is in the order that the model wants. A Transpose that
stays because something else reads it copies its own part: together they copy no more than the one before.

Left alone: cuts that no attention reads as they are, such as the halves of a head that rotary positions turn, and those
of a convolution over the sequence. A Transpose of each would only be one node more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.emit.build import Builder, Names
from fa_compiler.passes.ir.nodes import (
    constant,
    distinct_consumers,
    input_of,
    int_attr,
    is_op,
    is_weight,
    only_reader,
    permutation,
    reached,
)
from fa_compiler.passes.ir.surgery import restore_order, sweep
from fa_compiler.passes.layout.contraction import any_contraction
from fa_compiler.passes.ops.cuts import cut_from
from fa_compiler.passes.ops.movers import LAYOUT_OPS, element_source
from fa_compiler.passes.values.shapes import ShapeInfo

BETWEEN = (*LAYOUT_OPS, "Cast", "Mul", "Div", "Add", "Sub")
LIMIT = 16
"""So many values behind a cut are looked at."""


def cut_early(graphs: Sequence[ir.Graph], info: ShapeInfo, names: Names) -> bool:
    """Cut before transposing. Returns whether anything changed; then `info` does not know all of the graphs."""
    found = [(graph, list(filter(None, (_packed(node, info) for node in graph)))) for graph in graphs]
    for graph, all_packed in found:
        builder = Builder(graph, names, info)
        for packed in all_packed:
            packed.move(builder)
        if all_packed:
            restore_order(graph)
            sweep(graph, [node for packed in all_packed for node in packed.readers])
    return any(all_packed for _, all_packed in found)


@dataclass(frozen=True)
class _Cut:
    """A value that holds the places `start` to `start + size` of the packed dimension, which it lacks if it is
    `squeezed`."""

    value: ir.Value
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
        return list(dict.fromkeys(maker for cut in self.cuts if (maker := cut.value.producer()) is not None))

    def move(self, builder: Builder) -> None:
        """Make the cuts before the Transpose, and let the readers of the old ones read them."""
        starts = sorted({(cut.start, cut.size) for cut in self.cuts})
        parts = dict(zip(starts, self._parts([size for _, size in starts], builder), strict=True))
        for cut in self.cuts:
            part = parts[cut.start, cut.size]
            moved = builder.op("Transpose", [part], builder.info.dtype(part), {"perm": self.perm})
            new = builder.units("Squeeze", moved, [self.axis]) if cut.squeezed else moved
            for reader, place in tuple(cut.value.uses()):
                reader.replace_input_with(place, new)

    def _parts(self, sizes: list[int], builder: Builder) -> Sequence[ir.Value]:
        """The parts of what is transposed."""
        whole, place, info = self.node.inputs[0], self.perm[self.axis], builder.info
        assert whole is not None
        if (joined := _joined(whole, place, info)) is None:
            return builder.split(whole, place, sizes)  # 4
        inner = [size.const or 0 for size in (info.shape(whole) or ())[place + 1 :]]
        width = 1
        for size in inner:
            width *= size
        parts = builder.split(joined, place, [size * width for size in sizes])  # 5
        targets = [builder.ints([*[0] * place, size, *inner]) for size in sizes]
        dtype = info.dtype(whole)
        return [builder.op("Reshape", [part, to], dtype) for part, to in zip(parts, targets, strict=True)]


def _joined(whole: ir.Value, place: int, info: ShapeInfo) -> ir.Value | None:
    """Case 5: the tensor whose last dimension a Reshape takes apart from `place` on; None for other values."""
    node, shape = whole.producer(), info.shape(whole)
    source = node.inputs[0] if is_op(node, "Reshape") else None
    own = None if source is None else info.shape(source)
    if source is None or own is None or shape is None or only_reader(whole) is None:
        return None
    known = all(size.const for size in shape[place:])
    return source if known and len(own) == place + 1 and own[:place] == shape[:place] else None


def _packed(node: ir.Node, info: ShapeInfo) -> _Packed | None:
    """A Transpose that only such cuts read; None for other nodes."""
    shape = info.shape(node.outputs[0]) if is_op(node, "Transpose") else None
    perm = None if shape is None else permutation(node, len(shape))
    if shape is None or perm is None or node.outputs[0].is_graph_output():
        return None
    found = [_cuts(reader, node.outputs[0], info) for reader, _ in node.outputs[0].uses()]
    axes = {axis for axis, _ in filter(None, found)}
    cuts = tuple(cut for _, own in filter(None, found) for cut in own)
    if len(axes) != 1 or None in found or any(cut.value.is_graph_output() for cut in cuts):
        return None
    (axis,) = axes
    end = 0
    for start, size in sorted({(cut.start, cut.size) for cut in cuts}):
        if start != end or size < 1:
            return None
        end += size
    whole = shape[axis].const == end and len(cuts) > 1 and all(_is_multiplied(cut.value, info) for cut in cuts)
    return _Packed(node, axis, cuts, tuple(perm)) if whole else None


def _is_multiplied(value: ir.Value, info: ShapeInfo) -> bool:
    """Does a value lead to a product of two tensors that are no weights?"""

    def following(each: ir.Value) -> list[ir.Value]:
        return [reader.outputs[0] for reader in distinct_consumers(each) if is_op(reader, *BETWEEN)]

    values = reached([value], following, LIMIT)
    readers = (reader for each in values for reader in distinct_consumers(each))
    products = (product for reader in readers if (product := any_contraction(reader, info)) is not None)
    return any(not any(is_weight(element_source(each, "Cast")) for each in product.operands) for product in products)


def _cuts(reader: ir.Node, packed: ir.Value, info: ShapeInfo) -> tuple[int, list[_Cut]] | None:
    """The axis along which a node cuts a tensor, and the parts of known places; None for other nodes."""
    shape, output = info.shape(packed) or (), reader.outputs[0]
    if reader.inputs[0] is not packed or reader.graph is not getattr(packed.producer(), "graph", None):
        return None
    axis = int_attr(reader, "axis", 0) % max(len(shape), 1)
    if is_op(reader, "Split"):  # 1
        sizes = [(info.shape(each) or ())[axis : axis + 1] for each in reader.outputs]
        known = [size[0].const for size in sizes if size and size[0].const is not None]
        starts = [sum(known[:index]) for index in range(len(known))]
        cuts = [
            _Cut(each, *place) for each, place in zip(reader.outputs, zip(starts, known, strict=True), strict=False)
        ]
        return (axis, cuts) if len(known) == len(reader.outputs) else None
    if is_op(reader, "Gather"):  # 2
        index, length = constant(input_of(reader, 1), limit=1), shape[axis].const
        if index is None or index.size != 1 or index.ndim > 1 or length is None:
            return None
        place = int(index.item())
        return (axis, [_Cut(output, place % length, 1, not index.ndim)]) if -length <= place < length else None
    found = cut_from(output, info) if is_op(reader, "Slice") else None  # 3
    if found is None:
        return None
    size = (info.shape(output) or ())[found[1]].const
    return None if size is None else (found[1], [_Cut(output, found[2], size)])
