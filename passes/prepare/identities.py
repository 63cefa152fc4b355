"""Operators that hand on what they are given: their readers read what is behind them.

    y = torch.cat(torch.split(x, sizes, 1), 1)
    y = torch.nn.functional.interpolate(x, scale_factor=1)

Grammar of what a value is read from instead; the code cites the numbers of the cases:

    value :=
      1     Concat(x)                                      x
      2   | Split(x) -> value                              x     the only output, which is all of x
      3   | Concat(y1, ..., yn)                            x     Split(x) -> y1, ..., yn along the
                                                                 same axis
          | Split(Concat(x1, ..., xn)) -> ..., value, ...  xi    along the same axis, in parts of
                                                                 the same sizes
      4   | Resize(x) | Upsample(x)                        x     factors of 1, or the sizes of x:
                                                                 ONNX Runtime copies then in every
                                                                 mode; not with tf_crop_and_resize
      5   | SequenceAt(sequence, i)                        its element i; i constant
      6   | ConcatFromSequence(sequence)                   Concat of its elements (1, 3), after
                                                           Unsqueeze for new_axis 1
      7   | ConcatFromSequence(SplitToSequence(x))         x     along the same axis
    sequence :=
      8     SequenceConstruct(x1, ..., xn) | SequenceEmpty
      9   | SequenceInsert(sequence, x, i) | SequenceErase(sequence, i)        i constant or absent
     10   | SplitToSequence(x, sizes)                      the outputs of Split(x, sizes): a known
                                                           number of parts
            | SplitToSequence(x)                           parts of 1, with Squeeze for keepdims 0;
                                                           a known length
     11   | Identity(sequence)

In a run that succeeds both sides hold the same bits. An index out of range is left alone: the run
fails.

The nodes that nothing reads any more are removed. One whose result is an output stays, but not
between the other nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.known import if_known
from fa_compiler.passes.emit.build import Builder, Names
from fa_compiler.passes.ir.nodes import (
    ABSENT,
    certain,
    constant,
    graph_opset,
    input_of,
    inputs_of,
    int_attr,
    is_op,
    number_of,
    operand_at,
    operands,
    text_attr,
)
from fa_compiler.passes.ir.surgery import restore_order, sweep
from fa_compiler.passes.ops.context import Shape, axis_in
from fa_compiler.passes.ops.parts import CONCAT_AXIS, concat_of, split_of
from fa_compiler.passes.values.shapes import ShapeInfo

MOST_PARTS = 64
"""A sequence of more elements is left alone."""
INT64 = ir.DataType.INT64


def bypass_identities(graphs: Sequence[ir.Graph], info: ShapeInfo, names: Names) -> bool:
    """Let the readers of such operators read what is behind them. Returns whether anything changed;
    then `info` does not know all of the graphs."""
    changed = [_Bypass(Builder(graph, names, info)).run() for graph in graphs]
    return any(changed)


@dataclass(frozen=True)
class _Parts:
    """Case 10: the parts of `whole`, cut along `axis`. `sizes` is an int64 tensor of their sizes,
    or the sizes. Each part loses the dimension if it is `squeezed`."""

    whole: ir.Value
    axis: int
    count: int
    sizes: ir.Value | tuple[int, ...]
    squeezed: bool

    @staticmethod
    def of_sizes(
        whole: ir.Value, axis: int, sizes: tuple[int, ...] | None, squeezed: bool = False
    ) -> _Parts | None:
        """The parts of these sizes; None where they are unknown."""
        return None if sizes is None else _Parts(whole, axis, len(sizes), sizes, squeezed)

    def elements(self, builder: Builder) -> tuple[ir.Value, ...]:
        """The parts as outputs of a Split."""
        if isinstance(self.sizes, ir.Value):
            inputs = [self.whole, builder.cast(self.sizes, INT64)]
            first = builder.op("Split", inputs, {"axis": self.axis}, outputs=self.count)
            maker = certain(first.producer())
            parts: Sequence[ir.Value] = maker.outputs
        else:
            parts = builder.split(self.whole, self.axis, self.sizes)
        if self.squeezed:
            return tuple(builder.squeeze(part, [self.axis]) for part in parts)
        return tuple(parts)


_Sequence = tuple[ir.Value, ...] | _Parts


@dataclass
class _Bypass:
    """The changes of one graph."""

    builder: Builder
    sequences: dict[ir.Value, _Sequence] = field(default_factory=dict)

    @property
    def info(self) -> ShapeInfo:
        return self.builder.info

    def run(self) -> bool:
        """Make the changes. Returns whether there were any."""
        graph, left = self.builder.graph, list[ir.Node]()
        for node in list(graph):
            if not is_op(node, *_READ) or not node.outputs:
                continue
            if (sequence := self._sequence(node)) is not None:
                self.sequences[node.outputs[0]] = sequence
                continue
            for output, source in zip(node.outputs, self._sources(node), strict=False):
                left.append(node)
                for reader, place in tuple(output.uses()):
                    reader.replace_input_with(place, source)
        # elements that nothing took were made for nothing
        sweep(graph, [*left, *self.builder.nodes])
        self.builder.drop_unused_constants()
        if left:
            restore_order(graph)
        return bool(left)

    def _sources(self, node: ir.Node) -> Sequence[ir.Value]:
        """What the readers of a node's outputs can read instead; empty where that is the outputs
        themselves."""
        rule = _SOURCES.get(node.op_type)
        if rule is None or not any(output.uses() for output in node.outputs):
            return []
        sources = rule(self, node) or []
        return [sources] if isinstance(sources, ir.Value) else sources

    def _sequence(self, node: ir.Node) -> _Sequence | None:
        rule = _SEQUENCES.get(node.op_type, _Bypass.no_sequence)
        return rule(self, node)

    def _elements(self, value: ir.Value | None) -> tuple[ir.Value, ...] | None:
        """The elements of a known sequence."""
        sequence = self.sequences.get(value or ABSENT)
        return sequence.elements(self.builder) if isinstance(sequence, _Parts) else sequence

    def _place(self, value: ir.Value, axis: int) -> int | None:
        """An axis of a value, counted from the first one."""
        return axis_in(axis, len(self.info.sizes(value)))

    # -- values ---------------------------------------------------------------------------------

    def joined(self, node: ir.Node) -> ir.Value | None:
        """Cases 1 and 3."""
        return self._common_whole(operands(node), int_attr(node, "axis", CONCAT_AXIS))

    def _common_whole(self, parts: Sequence[ir.Value], axis: int) -> ir.Value | None:
        """What these values are all parts of, in order; None for other values."""
        if len(parts) == 1:
            return parts[0]
        split = split_of(parts[0].producer(), self.info)
        if (
            split is None
            or split.parts != tuple(parts)
            or split.axis != self._place(parts[0], axis)
        ):
            return None
        return split.whole

    def parts(self, node: ir.Node) -> Sequence[ir.Value]:
        """Cases 2 and 3."""
        whole = operand_at(node, 0)
        if len(node.outputs) == 1:
            return [whole]
        joined, split = concat_of(whole.producer(), self.info), split_of(node, self.info)
        if (
            joined is None
            or split is None
            or joined.axis != split.axis
            or len(joined.parts) != len(split.parts)
        ):
            return []
        for one, other in zip(joined.parts, split.parts, strict=True):
            if not joined.size(one, self.info) == split.size(other, self.info) is not None:
                return []
        return joined.parts

    def resized(self, node: ir.Node) -> ir.Value | None:
        """Case 4."""
        source = operand_at(node, 0)
        shape = self.info.shape(source)
        mode = text_attr(node, "coordinate_transformation_mode", "half_pixel")
        if shape is None or mode == "tf_crop_and_resize" or "axes" in node.attributes:
            return None
        return source if self._keeps_sizes(node, shape) else None

    def _keeps_sizes(self, node: ir.Node, shape: Shape) -> bool:
        """Case 4: are the sizes those of the input, or the factors 1?"""
        if (sizes := input_of(node, 3)) is not None:
            plain = text_attr(node, "keep_aspect_ratio_policy", "stretch") == "stretch"
            return plain and self.info.content(sizes) == shape
        factors = self._factors(node)
        return factors is not None and factors.size == len(shape) and bool((factors == 1).all())

    def _factors(self, node: ir.Node) -> np.ndarray | None:
        """Case 4: the factors of a Resize or Upsample; None where they are unknown."""
        if (attr := node.attributes.get("scales")) is not None:
            return np.array(attr.as_floats())
        place = 1
        if is_op(node, "Resize") and graph_opset(self.builder.graph) >= 11:
            place = 2
        return constant(input_of(node, place), limit=16)

    def element(self, node: ir.Node) -> ir.Value | None:
        """Case 5."""
        elements = self._elements(node.inputs[0]) or ()
        place = axis_in(_index(input_of(node, 1)), len(elements))
        return None if place is None else elements[place]

    def joined_sequence(self, node: ir.Node) -> ir.Value | None:
        """Cases 6 and 7."""
        sequence = self.sequences.get(operand_at(node, 0))
        axis, stacked = int_attr(node, "axis", 0), bool(int_attr(node, "new_axis", 0))
        if isinstance(sequence, _Parts):
            shape = self.info.sizes(sequence.whole)
            if sequence.squeezed == stacked and axis in (sequence.axis, sequence.axis - len(shape)):
                return sequence.whole
        elements = self._elements(node.inputs[0])
        if not elements:
            return None
        if stacked:
            elements = tuple(self.builder.unsqueeze(element, [axis]) for element in elements)
        whole = self._common_whole(elements, axis)
        return whole or self.builder.concat(elements, axis)

    # -- sequences ------------------------------------------------------------------------------

    def constructed(self, node: ir.Node) -> _Sequence | None:
        """Case 8."""
        elements = tuple(inputs_of(node))
        return elements if len(elements) == len(node.inputs) <= MOST_PARTS else None

    def inserted(self, node: ir.Node) -> _Sequence | None:
        """Case 9, with one element more."""
        elements, element = self._elements(node.inputs[0]), input_of(node, 1)
        if elements is None or element is None or len(elements) >= MOST_PARTS:
            return None
        index = _index(input_of(node, 2), absent=len(elements))
        if index is None or not -len(elements) <= index <= len(elements):
            return None
        if index < 0:
            index += len(elements)
        return (*elements[:index], element, *elements[index:])

    def erased(self, node: ir.Node) -> _Sequence | None:
        """Case 9, with one element less."""
        elements = self._elements(node.inputs[0]) or ()
        place = axis_in(_index(input_of(node, 1), absent=-1), len(elements))
        return None if place is None else (*elements[:place], *elements[place + 1 :])

    def split(self, node: ir.Node) -> _Sequence | None:
        """Case 10."""
        whole, given, keepdims = (
            operand_at(node, 0),
            input_of(node, 1),
            int_attr(node, "keepdims", 1),
        )
        axis = self._place(whole, int_attr(node, "axis", 0))
        if axis is None:
            return None
        if given is None:
            return _Parts.of_sizes(
                whole, axis, self._equal_parts(whole, axis, 1), squeezed=not keepdims
            )
        # ONNX ignores keepdims here, ONNX Runtime does not
        return self._given_parts(whole, axis, given) if keepdims else None

    def _given_parts(self, whole: ir.Value, axis: int, given: ir.Value) -> _Parts | None:
        """Case 10: the parts of given sizes, one for all parts or one for each."""
        shape, numbers = self.info.shape(given), constant(given, limit=MOST_PARTS)
        if numbers is not None and numbers.ndim == 0:
            return _Parts.of_sizes(whole, axis, self._equal_parts(whole, axis, int(numbers.item())))
        if numbers is not None and numbers.size:
            return _Parts.of_sizes(whole, axis, tuple(map(int, numbers)))
        count = shape[0].const if shape else None
        if not count or count > MOST_PARTS or self.builder.opset < _COMPUTED_SIZES:
            return None
        return _Parts(whole, axis, count, given, False)

    def _equal_parts(self, whole: ir.Value, axis: int, part: int) -> tuple[int, ...] | None:
        """The sizes of parts of one size, of which the last may be smaller; None for an unknown
        number of parts."""
        length = self.info.sizes(whole)[axis].const
        if not length or part < 1 or length > part * MOST_PARTS:
            return None
        return tuple(min(part, length - start) for start in range(0, length, part))

    def no_sequence(self, node: ir.Node) -> None:
        """Other operators make no sequence that is known."""

    def same(self, node: ir.Node) -> _Sequence | None:
        """Case 11."""
        return self.sequences.get(operand_at(node, 0))


_COMPUTED_SIZES = 13
"""The opset since which a Split takes sizes that are computed."""
_SOURCES: Mapping[str, Callable[[_Bypass, ir.Node], ir.Value | Sequence[ir.Value] | None]] = {
    "Concat": _Bypass.joined,
    "Split": _Bypass.parts,
    "Resize": _Bypass.resized,
    "Upsample": _Bypass.resized,
    "SequenceAt": _Bypass.element,
    "ConcatFromSequence": _Bypass.joined_sequence,
}
_SEQUENCES: Mapping[str, Callable[[_Bypass, ir.Node], _Sequence | None]] = {
    "SequenceConstruct": _Bypass.constructed,
    "SequenceEmpty": _Bypass.constructed,
    "SequenceInsert": _Bypass.inserted,
    "SequenceErase": _Bypass.erased,
    "SplitToSequence": _Bypass.split,
    "Identity": _Bypass.same,
}
_READ = (*_SOURCES, *_SEQUENCES)


def _index(value: ir.Value | None, absent: int | None = None) -> int | None:
    """The one number of a constant; `absent` where there is no value, and None for other values."""
    if value is None:
        return absent
    number = number_of(value)
    return if_known(int, number)
