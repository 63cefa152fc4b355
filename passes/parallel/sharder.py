"""Makes the graph of a rank from the graph of one process, value by value and on demand.

A value of the given graph has up to two forms in the new one:

    whole(v)      equal on all ranks, and equal to v
    local(v, p)   the rank's own part of v: v with only the rank's positions along the sequence,
                  which v carries at p

Both are defined by v alone. So a rule that makes one of them is right if it is right for its own
operator, whatever the graph around it does; there is no plan that the rules have to keep to. What
an operator demands of its inputs follows from what is demanded of its result, and the first demand
is that of the model's outputs.

whole(v) of an input that every rank reads a part of is an AllGather. This is meant for masks and
token ids: a value that a projection, a norm or an embedding makes of the tokens is refused, because
every rank would compute the whole model. Only a bias of an attention may be made of such a value
(relative positions that are looked up by the keys): the ranks compute their parts of it and gather
them. Sizes are those of the whole sequence in both forms. A rule that needs the number of the
rank's own tokens computes it (`part_of_target`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from fa_compiler.op_registry import DOMAIN, collectives
from fa_compiler.passes.algebra.known import if_known
from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.emit.build import Names
from fa_compiler.passes.emit.operators import AttrValue, Operators
from fa_compiler.passes.ir.nodes import (
    RANDOM,
    STANDARD,
    all_nodes,
    certain,
    elsewhere,
    graph_opset,
    int_attr,
    is_op,
    is_overridable,
    name_of,
    subgraphs,
    values_read,
    without_none,
)
from fa_compiler.passes.ir.signatures import unknown_part
from fa_compiler.passes.ops.context import Known, Shape
from fa_compiler.passes.ops.elementwise import drops_nothing
from fa_compiler.passes.ops.linear import PRODUCTS
from fa_compiler.passes.ops.parts import Parts
from fa_compiler.passes.parallel.methods import AttentionSizes, Choice, Handed
from fa_compiler.passes.parallel.places import Place, Refusal
from fa_compiler.passes.values.shapes import ShapeInfo

INT64 = ir.DataType.INT64
LIGHT_FEATURES = 16
"""The most numbers per token of an input, or of a looked-up table, of which every rank may have the
whole sequence."""

CIRCLE = Refusal("it mixes the sequence", None)
"""The refusal of a form while it is made: a form that needs itself cannot be made."""

HEAVY = frozenset(
    {
        *(
            *PRODUCTS,
            "MatMulInteger",
            "MatMulNBits",
            "Conv",
            "ConvTranspose",
            "FlashAttentionScore",
        ),
        *("FlashAttentionScoreGrad", "FlashLinearAttention", "ShortConvolution"),
        *(
            "LayerNormalization",
            "RMSNormalization",
            "SimplifiedLayerNormalization",
            "SkipLayerNormalization",
        ),
        *(
            "SkipSimplifiedLayerNormalization",
            "InstanceNormalization",
            "GroupNormalization",
            "Attention",
        ),
    }
)
"""Operators whose whole result no rank computes if it carries the sequence."""

Choose: TypeAlias = Callable[[AttentionSizes], Choice]
LocalRule: TypeAlias = Callable[["Sharder", ir.Node, int, Place], ir.Value]
"""Makes the local form of an output of a node: (sharder, node, number of the output, place). Raises
Refusal."""
WholeRule: TypeAlias = Callable[["Sharder", ir.Node, int], ir.Value]
"""Makes the whole form of an output of a node from local forms of its inputs. Raises Refusal."""

LOCAL_RULES: dict[str, LocalRule] = {}
COLLAPSING_RULES: dict[str, WholeRule] = {}
"""The rules of operators that take tokens out of the sequence, or reduce it."""


def local_rule(*op_types: str) -> Callable[[LocalRule], LocalRule]:
    """Enter a rule for the local form of these operators' results."""

    def enter(rule: LocalRule) -> LocalRule:
        LOCAL_RULES.update(dict.fromkeys(op_types, rule))
        return rule

    return enter


def collapsing_rule(*op_types: str) -> Callable[[WholeRule], WholeRule]:
    """Enter a rule for the whole form of these operators' results, which reads local forms."""

    def enter(rule: WholeRule) -> WholeRule:
        COLLAPSING_RULES.update(dict.fromkeys(op_types, rule))
        return rule

    return enter


class Sharder(Operators):
    """The new graph while it is made.

    Args:
        graph: the graph of one process. It stays as it is; the new nodes share its attributes and
            weights.
        info: what is known of it.
        length: the length of the sequence.
        axes: the inputs of which every rank reads its part, and the dimension along which.
        ranks: the number of ranks.
        choose: chooses the method of an attention (methods.py).
    """

    def __init__(
        self,
        graph: ir.Graph,
        info: ShapeInfo,
        length: Dim,
        axes: Mapping[str, int],
        ranks: int,
        choose: Choose,
    ) -> None:
        self.graph, self.info, self.length, self.axes = graph, info, length, axes
        self.ranks, self.choose = ranks, choose
        self.choices: list[Choice] = []
        self.handed: list[Handed] = []
        self.attentions: dict[ir.Node, ir.Node] = {}
        """The operator of all ranks that was made for a node of ours."""
        self.names = Names(
            {
                name
                for output in graph.outputs
                if (name := output.name) and not output.is_graph_input()
            }
        )
        self.nodes: list[ir.Node] = []
        self.initializers: dict[str, ir.Value] = {}
        """The weights, with the defaults of inputs among them."""
        self.inputs = {
            value: self._input(value)
            for value in graph.inputs
            if value.const_value is None and value.name is not None
        }
        self.defaults = {
            value: self._default(value) for value in graph.inputs if is_overridable(value)
        }
        """The inputs that have a default, which every rank has whole."""
        self._wholes: dict[ir.Value, ir.Value] = {}
        self._locals: dict[tuple[ir.Value, Place], ir.Value] = {}
        self._refusals: dict[tuple[ir.Value, Place | None, bool], Refusal] = {}
        self._clones: dict[tuple[object, ...], ir.Node] = {}
        self._touched = self._find_touched()
        self.own_graphs, self.no_ring = False, ""
        """Does each rank get a graph of its own? Why may no attention be computed in a ring?"""
        self._gathers = False
        self._part: tuple[ir.Value, ir.Value, ir.Value] | None = None

    # -- the two forms ------------------------------------------------------------------------

    def whole(self, value: ir.Value, reader: ir.Node | None) -> ir.Value:
        """The whole form of a value. `reader` is the node that a refusal names."""
        try:
            return self._whole(value)
        except Refusal as refusal:
            raise Refusal(refusal.reason, refusal.node or reader) from None

    def local(self, value: ir.Value, place: Place, reader: ir.Node | None) -> ir.Value:
        """The local form of a value that carries the sequence at this place. `reader` is the node
        that a refusal names."""
        if (known := self._locals.get((value, place))) is not None:
            return known
        key = (value, place, self._gathers)
        if key not in self._refusals:
            self._refusals[key] = CIRCLE
            try:
                made = self._locals[value, place] = self._make_local(value, place, reader)
            except Refusal as refusal:
                self._refusals[key] = refusal
            else:
                del self._refusals[key]
                return made
        refused = self._refusals[key]
        raise Refusal(refused.reason, refused.node or reader)

    @property
    def settled(self) -> Known:
        """What is known of the given graph, with shapes as `shape` has them."""
        return _Settled(self)

    def shape(self, value: ir.Value, node: ir.Node | None) -> tuple[Dim, ...]:
        """The shape of a value of the given graph. Raises Refusal where the rank is unknown.

        A sequence has two tokens at least. So a size that is the sequence's broadcast with another
        one is the sequence's.
        """
        shape = self.settled.shape(value)
        if shape is None:
            raise Refusal(f"the rank of {value.name!r} is unknown", node)
        return shape

    def settled_size(self, size: Dim) -> Dim:
        """A size in which the sequence stands for what it is broadcast with."""
        wider = {
            atom: self.length
            for atom in size.atoms
            if atom.op == "broadcast" and self.length in atom.args
        }
        if not wider:
            return size
        return size.substitute(wider)

    def carries(self, value: ir.Value) -> bool:
        """May the value have a dimension of the sequence? True where a size is unknown."""
        shape = self.info.shape(value)
        return shape is None or any(self.may_be_sequence(size) for size in shape)

    def may_be_sequence(self, size: Dim) -> bool:
        """May a dimension of this size run over the sequence, alone or merged with others?"""
        length = self.length.const
        if length is not None:
            return size.const is None or (size.const > 0 and size.const % length == 0)
        return (
            not size.is_known
            or bool(size.atoms & self.length.atoms)
            or any(atom.args for atom in size.atoms)
        )

    def is_touched(self, value: ir.Value) -> bool:
        """Do the elements of the value depend on those of an input of which every rank reads a
        part?"""
        return value in self._touched

    def _whole(self, value: ir.Value) -> ir.Value:
        """`whole`, whose refusal names no node where the one that reads the value is to blame."""
        if (known := self._wholes.get(value)) is not None:
            return known
        key = (value, None, self._gathers)
        if key not in self._refusals:
            self._refusals[key] = CIRCLE
            try:
                made = self._wholes[value] = self._make_whole(value)
            except Refusal as refusal:
                self._refusals[key] = refusal
            else:
                del self._refusals[key]
                return made
        raise self._refusals[key]

    def _make_whole(self, value: ir.Value) -> ir.Value:
        node = value.producer()
        if node is None:
            return self._whole_leaf(value)
        if is_op(node, "Shape"):
            return self._whole_shape(node)
        try:
            self._check_light(value, node)
            return self._clone_whole(value, node)
        except Refusal:
            if self._gathers and (dim := self._sequence_dim(value)) is not None:
                return self._gathered(self.local(value, Place(dim), node), dim)
            rule = self.collapsing_rule(node)
            if rule is None:
                raise
            return rule(self, node, node.outputs.index(value))

    def collapsing_rule(self, node: ir.Node) -> WholeRule | None:
        """The rule that makes the whole form of a node's results from local forms; None if there is
        none."""
        if node.domain not in (*STANDARD, DOMAIN):
            return None
        return COLLAPSING_RULES.get(node.op_type)

    def _sequence_dim(self, value: ir.Value) -> int | None:
        """The first dimension that is as long as the sequence."""
        return next(
            (
                dim
                for dim, size in enumerate(self.shape(value, value.producer()))
                if size == self.length
            ),
            None,
        )

    def _gathered(self, part: ir.Value, axis: int) -> ir.Value:
        return self.collective(collectives.ALL_GATHER, [part], {"axis": axis})

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Gather the whole form of anything that carries the sequence, meanwhile. This is for
        biases that are made of the keys: they need all keys, as attention does."""
        before, self._gathers = self._gathers, True
        try:
            yield
        finally:
            self._gathers = before

    def _check_light(self, value: ir.Value, node: ir.Node) -> None:
        if not self.is_touched(value) or not self.carries(value):
            return
        heavy = node.op_type in HEAVY
        if (
            is_op(node, "Gather")
            and node.inputs[0] is not None
            and not self.is_touched(node.inputs[0])
        ):
            table = self.info.shape(node.inputs[0])
            heavy = (
                table is None or math.prod(size.const or 1 for size in table[1:]) > LIGHT_FEATURES
            )
        if heavy:
            raise Refusal(
                f"it mixes the sequence: each rank would need {value.name!r} of all tokens", None
            )

    def _clone_whole(self, value: ir.Value, node: ir.Node) -> ir.Value:
        for inner in chain([node], *map(all_nodes, subgraphs(node))):
            if is_op(inner, *RANDOM) and not drops_nothing(inner):
                raise Refusal("it draws random numbers", inner)
        inputs = _forms(node.inputs, self._whole)
        attrs = None
        if subgraphs(node):
            attrs = {name: self._own_attribute(attr, {}) for name, attr in node.attributes.items()}
        return self.clone(node, inputs, attrs).outputs[node.outputs.index(value)]

    def _own_attribute(self, attr: ir.Attr, known: Mapping[ir.Value, ir.Value]) -> ir.Attr:
        """An attribute for a node of the new graph. Graphs are copied: what they read of the graph
        around them is whole. `known` are the values of the copied graphs around the attribute."""
        if attr.type == ir.AttributeType.GRAPH:
            return ir.AttrGraph(attr.name, self._copied(attr.as_graph(), known))
        if attr.type == ir.AttributeType.GRAPHS:
            return ir.AttrGraphs(
                attr.name, [self._copied(body, known) for body in attr.as_graphs()]
            )
        return attr

    def _copied(self, body: ir.Graph, known: Mapping[ir.Value, ir.Value]) -> ir.Graph:
        own = dict(known)
        for value in (*body.inputs, *body.initializers.values()):
            own[value] = self._named_like(value)

        def form(value: ir.Value) -> ir.Value:
            return own.get(value) or self._whole(value)

        nodes = []
        for node in body:
            made = ir.Node(
                node.domain,
                node.op_type,
                _forms(node.inputs, form),
                [self._own_attribute(attr, own) for attr in node.attributes.values()],
                overload=node.overload,
                outputs=[self._named_like(output) for output in node.outputs],
                name=self.names.new(node.name or node.op_type),
            )
            own.update(zip(node.outputs, made.outputs, strict=True))
            nodes.append(made)
        return ir.Graph(
            [own[value] for value in body.inputs],
            [form(value) for value in body.outputs],
            nodes=nodes,
            initializers=[own[value] for value in body.initializers.values()],
            name=body.name,
        )

    def _named_like(self, value: ir.Value) -> ir.Value:
        """A new value of the type, shape and content of another one."""
        return ir.Value(
            name=self._new_name(value),
            type=value.type,
            shape=value.shape,
            const_value=value.const_value,
        )

    def _new_name(self, value: ir.Value) -> str:
        """A new name like that of a value; empty where that has none."""
        if not value.name:
            return ""
        return self.names.new(value.name)

    def _whole_leaf(self, value: ir.Value) -> ir.Value:
        if value in self.defaults:
            return self.defaults[value]
        if value.const_value is not None:
            return self._initializer(value)
        if value not in self.inputs:
            raise Refusal(f"it reads {value.name!r}, which the graph does not make", None)
        axis = self.axes.get(name_of(value))
        if axis is None:
            return self.inputs[value]
        features = elsewhere(self.shape(value, None), (0, axis))
        if math.prod(size.const or 1 for size in features) > LIGHT_FEATURES:
            reason = f"it mixes the sequence: each rank would need {value.name!r} of all tokens"
            # another dimension may have this number, such as one of a weight
            if self.length.const is not None:
                reason += (
                    f"; dimension {axis} of this input has the size {self.length} and counts as the sequence: if it is "
                    "not, name the inputs with the sequence by --sequence-axis INPUT:DIM"
                )
            raise Refusal(reason, None)
        return self._gathered(self.inputs[value], axis)

    def _whole_shape(self, node: ir.Node) -> ir.Value:
        source = certain(node.inputs[0])
        shape = self.shape(source, node)
        start, end = int_attr(node, "start", 0), int_attr(node, "end", len(shape))
        parts = [self.size(size) for size in shape[start:end]]
        if not parts:
            return self.ints([])
        known = without_none(parts)
        if len(known) < len(parts):
            known = self._sizes_of_part(source, parts, range(len(shape))[start:end], node)
        return self.concat(known, 0)

    def _sizes_of_part(
        self, source: ir.Value, parts: Sequence[ir.Value | None], dims: Sequence[int], node: ir.Node
    ) -> list[ir.Value]:
        """The sizes of dimensions: those that are known, and the others from the rank's part of the
        tensor, which differs from the whole one only along the sequence."""
        own = self.own_form(source, node)
        return [
            self.dimension(own, dim) if part is None else part
            for part, dim in zip(parts, dims, strict=True)
        ]

    def own_form(self, value: ir.Value, node: ir.Node) -> ir.Value:
        """The local form of a value that is as long as the sequence, and the whole form of any
        other."""
        dim = self._sequence_dim(value)
        if dim is None:
            return self.whole(value, node)
        return self.local(value, Place(dim), node)

    def _make_local(self, value: ir.Value, place: Place, reader: ir.Node | None) -> ir.Value:
        node = value.producer()
        if node is None:
            if value in self.inputs and place.alone and self.axes.get(name_of(value)) == place.dim:
                return self.inputs[value]
            return self.take(value, place, reader)
        rule = LOCAL_RULES.get(node.op_type)
        if rule is None or node.domain not in (*STANDARD, "com.microsoft", DOMAIN):
            first = Refusal("it is not known how the operator treats the sequence", node)
        elif (unknown := unknown_part(node)) is not None:
            first = Refusal(f"it has {unknown}, and what it means is not known here", node)
        else:
            try:
                return rule(self, node, node.outputs.index(value), place)
            except Refusal as refusal:
                first = refusal
        try:
            return self.take(value, place, reader)
        except Refusal:
            raise first from None

    # -- pieces that rules use ----------------------------------------------------------------

    def take(self, value: ir.Value, place: Place, reader: ir.Node | None) -> ir.Value:
        """The local form, taken out of the whole form."""
        if not place.alone:
            raise Refusal(f"{value.name!r} has the sequence merged with other dimensions", reader)
        whole, (positions, _, _) = self.whole(value, reader), self.part
        return self.gather(whole, positions, place.dim)

    def aligned(
        self, value: ir.Value | None, place: Place, rank: int, size: Dim, node: ir.Node
    ) -> ir.Value | None:
        """The form of an operand that is broadcast to a result of this rank, whose dimension at the
        place has this size: local if the operand has it, whole if it has 1 there. The rank's part
        of a dimension that may be either is chosen when the model runs. Any other size, which the
        model cannot broadcast, has an index beyond its end: the run fails, as that of the model
        does.
        """
        if value is None:
            return None
        shape = self.shape(value, node)
        own = place.at(place.dim - (rank - len(shape)))
        if own.dim < 0 or shape[own.dim].const == 1:
            return self.whole(value, node)
        if shape[own.dim] == size:
            return self.local(value, own, node)
        if not own.alone:
            raise Refusal(f"the sizes of {value.name!r} are not proven to fit the sequence", node)
        whole, (positions, length, _) = self.whole(value, node), self.part
        found = self.dimension(whole, own.dim)
        first_or_beyond = self.mul(self.sub(found, self.ints([1])), self.ints([2]))
        return self.gather(
            whole, self.where(self.equal(found, length), positions, first_or_beyond), own.dim
        )

    def part_of_target(self, target: ir.Value, dim: int, rank: int, node: ir.Node) -> ir.Value:
        """The sizes of a Reshape or Expand whose dimension `dim` runs over the sequence, for the
        rank's own part.

        A size above 1 there is the whole one, which is scaled. 1, 0 and -1 mean the same for the
        part.
        """
        whole = self.whole(target, node)
        _, length, count = self.part
        here = self.constant(np.arange(rank) == dim)
        divisor, least = self.scale_of_sizes(length)
        above = self.greater(whole, least)
        scaled = self.mul(self.div(whole, divisor), count)
        return self.where(self.and_(here, above), scaled, whole)

    def scale_of_sizes(self, length: ir.Value) -> tuple[ir.Value, ir.Value]:
        """By what the sizes of a target are divided for the rank's part, and above which number
        they are scaled."""
        return length, self.ints([1])

    def size(self, size: Dim) -> ir.Value | None:
        """A size as int64 [1], computed from the inputs; None where that is not possible."""
        if size.const is not None:
            return self.ints([size.const])
        if size == self.length:
            return self.part[1]
        for value, own in self.inputs.items():
            for dim, own_size in enumerate(self.info.sizes(value)):
                if own_size == size and self.axes.get(name_of(value)) != dim:
                    return self.dimension(own, dim)
        return self._composed(size)

    def _composed(self, size: Dim) -> ir.Value | None:
        """A size that is a sum of products of sizes."""
        if size.single_atom is not None:
            return None
        total: ir.Value | None = None
        for factor, atoms in size.products:
            term = self.ints([factor])
            for atom in atoms:
                other = self.size(atom)
                if other is None:
                    return None
                term = self.mul(term, other)
            total = term if total is None else self.add(total, term)
        return total

    @property
    def part(self) -> tuple[ir.Value, ir.Value, ir.Value]:
        """The rank's positions, the number of all tokens and the number of the rank's own."""
        if self._part is None:
            node = self.part_node([], ("positions", "length", "count"))
            self.nodes.insert(0, node)
            self._part = (node.outputs[0], node.outputs[1], node.outputs[2])
        return self._part

    def part_node(self, inputs: Sequence[ir.Value], outputs: Sequence[str]) -> ir.Node:
        """A SequencePart, which is not yet among the nodes."""
        node = ir.node(
            collectives.SEQUENCE_PART,
            list(inputs),
            domain=collectives.DOMAIN,
            num_outputs=len(outputs),
            name=self.names.new("part"),
        )
        for output, stem in zip(node.outputs, outputs, strict=True):
            output.name, output.dtype = self.names.new(stem), INT64
        return node

    def joined(self, joined: Parts, place: Place) -> ir.Value:
        """The local form of tensors that a Concat joins along the sequence. Raises Refusal."""
        raise Refusal("it mixes the sequence: it joins tensors along it", joined.node)

    def wholes(self, node: ir.Node, first: int) -> list[ir.Value | None]:
        """The whole forms of a node's inputs from the one at `first` on; None for an absent one."""
        return _forms(node.inputs[first:], lambda value: self.whole(value, node))

    def clone(
        self,
        node: ir.Node,
        inputs: Sequence[ir.Value | None],
        attrs: Mapping[str, ir.Attr] | None = None,
    ) -> ir.Node:
        """A copy of a node with other inputs; the same one for an equal request."""
        if attrs is None:
            attrs = node.attributes
        attributes = list(attrs.values())
        key = (node, tuple(map(id, inputs)), tuple(map(id, attributes)))
        if key not in self._clones:
            made = ir.Node(
                node.domain,
                node.op_type,
                list(inputs),
                attributes,
                overload=node.overload,
                num_outputs=len(node.outputs),
                name=self.names.new(node.name or node.op_type),
            )
            for old, new in zip(node.outputs, made.outputs, strict=True):
                new.name = self._new_name(old)
                self.state_type(new, self.info.dtype(old))
            self.nodes.append(made)
            self._clones[key] = made
        return self._clones[key]

    def op(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attrs: Mapping[str, AttrValue] | None = None,
    ) -> ir.Value:
        """The output of a new standard node; the same value for an equal request."""
        return self._new(op_type, inputs, attrs or {}, "")

    def collective(
        self, op_type: str, inputs: Sequence[ir.Value], attrs: Mapping[str, AttrValue] | None = None
    ) -> ir.Value:
        """The output of an operator of all ranks (op_registry/collectives.py), which has the type
        of the first input; the same value for an equal request."""
        made = self._new(op_type, inputs, attrs or {}, collectives.DOMAIN)
        self.state_type(made, self.info.dtype(inputs[0]))
        return made

    def _new(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attrs: Mapping[str, AttrValue],
        domain: str,
    ) -> ir.Value:
        key = (domain, op_type, tuple(map(id, inputs)), repr(sorted(attrs.items())))
        if key not in self._clones:
            name, version = self.names.new(f"fa_{op_type}"), graph_opset(self.graph, domain)
            node = ir.node(
                op_type, list(inputs), dict(attrs), domain=domain, version=version, name=name
            )
            output = node.outputs[0]
            output.name = self.names.new(f"fa_{op_type}_output")
            self.state_type(output, self.info.dtype(output))
            self.nodes.append(node)
            self._clones[key] = node
        return self._clones[key].outputs[0]

    def state_type(self, value: ir.Value, dtype: ir.DataType | None) -> None:
        """State the type of a new value. Nothing else is inferred of it."""
        if dtype is not None:
            value.dtype = dtype
        self.info.set(value, None, dtype)

    def range(self, count: ir.Value) -> ir.Value:
        """The numbers 0, 1, ... below a count, which is int64 [1]."""
        zero, one = self.number(0), self.number(1)
        return self.op("Range", [zero, self.scalar(count), one])

    def scalar(self, vector: ir.Value) -> ir.Value:
        """The one element of a vector, without a dimension."""
        return self.reshape(vector, [])

    def smaller(self, one: ir.Value, other: ir.Value) -> ir.Value:
        """The smaller of int64 numbers. Min and Max take them from opset 12 on."""
        return self.where(self.less(one, other), one, other)

    def larger(self, one: ir.Value, other: ir.Value) -> ir.Value:
        """The larger of int64 numbers."""
        return self.where(self.less(one, other), other, one)

    def emit_copy(self, value: ir.Value) -> ir.Value:
        """The same tensor as another value, which can have a name of its own."""
        node = ir.node("Identity", [value], name=self.names.new("fa_Identity"))
        node.outputs[0].name = self.names.new("fa_Identity_output")
        self.nodes.append(node)
        return node.outputs[0]

    def ints(self, numbers: Sequence[int]) -> ir.Value:
        """A vector of int64."""
        return self.constant(np.array(numbers, np.int64))

    def number(self, number: int) -> ir.Value:
        """One int64 number, without a dimension."""
        return self.constant(np.array(number, np.int64))

    def constant(self, array: np.ndarray) -> ir.Value:
        """An initializer with this content; the same one for equal content."""
        name = f"fa_{array.dtype}_{'_'.join(map(str, array.shape))}_{array.tobytes().hex()[:64]}"
        key = ("constant", array.dtype.str, array.shape, array.tobytes())
        if key not in self._clones:
            tensor = ir.tensor(array, name=self.names.new(name))
            value = ir.Value(name=tensor.name, const_value=tensor)
            value.dtype, value.shape = tensor.dtype, ir.Shape(array.shape)
            self.initializers[name_of(tensor)] = value
            self._clones[key] = ir.node("Identity", [value])
        (known,) = self._clones[key].inputs
        assert known is not None
        return known

    # -- internals ----------------------------------------------------------------------------

    def _default(self, value: ir.Value) -> ir.Value:
        made = ir.Value(
            name=value.name, type=value.type, shape=value.shape, const_value=value.const_value
        )
        self.initializers[self.names.new(name_of(value))] = made
        return made

    def _initializer(self, value: ir.Value) -> ir.Value:
        tensor = value.const_value
        assert tensor is not None and value.name is not None
        name = self.names.new(value.name)
        made = ir.Value(name=name, const_value=tensor)
        made.dtype, made.shape = tensor.dtype, value.shape
        self.initializers[name] = made
        return made

    def _input(self, value: ir.Value) -> ir.Value:
        """The rank's own input, with a name for the size of its part."""
        axis = self.axes.get(name_of(value))
        made = ir.Value(name=self.names.new(name_of(value)), type=value.type)
        if value.shape is not None:
            sizes = list(value.shape)
            if axis is not None:
                sizes[axis] = ir.SymbolicDim("part_of_sequence")
            made.shape = ir.Shape(sizes)
        return made

    def _find_touched(self) -> set[ir.Value]:
        touched = {value for value in self.graph.inputs if name_of(value) in self.axes}
        for node in self.graph:
            if not is_op(node, "Shape", "Size") and any(
                value in touched for value in values_read(node)
            ):
                touched.update(node.outputs)
        return touched


@dataclass(frozen=True)
class _Settled:
    """What is known of the given graph, with settled sizes."""

    sharder: Sharder

    def shape(self, value: ir.Value | None) -> Shape | None:
        """The shape; None where the rank is unknown."""
        shape = self.sharder.info.shape(value)
        return None if shape is None else tuple(map(self.sharder.settled_size, shape))

    def sizes(self, value: ir.Value | None) -> Shape:
        """The shape; () where the rank is unknown."""
        return self.shape(value) or ()

    def dtype(self, value: ir.Value | None) -> ir.DataType | None:
        """The element type."""
        return self.sharder.info.dtype(value)

    def content(self, value: ir.Value | None) -> tuple[Dim, ...] | Dim | None:
        """The elements of a small integer tensor."""
        return self.sharder.info.content(value)

    def integer(self, value: ir.Value | None) -> Dim | None:
        """The one element of a small integer tensor."""
        return self.sharder.info.integer(value)

    def scalar(self, value: ir.Value | None) -> float | None:
        """The one element of a tensor."""
        return self.sharder.info.scalar(value)


def _forms(
    values: Sequence[ir.Value | None], form: Callable[[ir.Value], ir.Value]
) -> list[ir.Value | None]:
    """The forms of a node's inputs; an absent one stays absent."""
    return [if_known(form, value) for value in values]
