"""Equal regions are proven once. The layers of a model are copies of each other, and so are their
regions.

Two regions with the same form (`Form`) are the same function of what enters them: the proof of one
is that of the other, with each value in the place of the one of the same number. The form holds all
that a proof reads:

    region  :=  its nodes in the order in which they are reached from the exits, the exits, the
                values of depth 0 that products read, and whether batch and tokens are open
    node    :=  domain, operator, attributes with their bodies, the numbers of its inputs and
                outputs
    value   :=  its number, shape, type and depth, and its content where it is a constant
    size    :=  a formula of the batch, the tokens and sizes that are not known, each by its kind
                and its number in the order in which they are met
    constant :=
      1         its content
      2       | `free`: floating-point weights of several finite numbers

The contents of case 2 differ from layer to layer, such as the weights of norms and the logarithms
of decays. Where they do, the first region is evaluated with random numbers in the place of those
that differ. If that proves an attention, it is one for all contents. If not, only regions with
equal contents share a proof.

The forms and the proofs live as long as the fusion of one graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.known import if_known
from fa_compiler.passes.algebra.symbolic import Atom, Dim
from fa_compiler.passes.ir.nodes import FLOATS, constant, makers_of, values_read
from fa_compiler.passes.linear.powers import Powers
from fa_compiler.passes.linear.proof import InputSizes, LinearMatch, Prover
from fa_compiler.passes.linear.regions import Region
from fa_compiler.passes.values.bounds import KernelBounds
from fa_compiler.passes.values.shapes import ShapeInfo

PLAIN = frozenset(
    [
        *(ir.AttributeType.INT, ir.AttributeType.FLOAT, ir.AttributeType.STRING),
        *(ir.AttributeType.INTS, ir.AttributeType.FLOATS, ir.AttributeType.STRINGS),
    ]
)
Content: TypeAlias = tuple[str, tuple[int, ...], bytes]
"""The type, the shape and a digest of an array."""


@dataclass(frozen=True)
class Form:
    """What the proof of a region reads. The values of a region are numbered; `contents` has those
    of the free constants, in the order of their numbers."""

    entries: tuple[Hashable, ...]
    values: Sequence[ir.Value]
    contents: tuple[tuple[int, Content], ...]


@dataclass(frozen=True)
class _Member:
    """One of the regions that have the same form but for the contents of free constants."""

    place: int
    prover: Prover
    form: Form


def proven(regions: Sequence[Region], graph: ir.Graph, info: ShapeInfo) -> list[LinearMatch]:
    """The linear attentions among the regions of a graph, in their order."""
    groups, inputs = dict[Hashable, list[_Member]](), InputSizes.of(graph, info)
    for place, region in enumerate(regions):
        prover = Prover(region, info, inputs)
        form = form_of(prover)
        groups.setdefault(form.entries, []).append(_Member(place, prover, form))
    found = dict[int, LinearMatch]()
    for members in groups.values():
        found.update(_proven_together(members))
    return [match for _, match in sorted(found.items())]


def _proven_together(members: Sequence[_Member]) -> Iterator[tuple[int, LinearMatch]]:
    """The attentions among regions of one form, by their places."""
    by_content = dict[Hashable, list[_Member]]()
    for member in members:
        by_content.setdefault(member.form.contents, []).append(member)
    if len(by_content) > 1:  # 2: free constants
        first = members[0]
        differing = zip(*(member.form.contents for member in members), strict=True)
        unknown = frozenset(
            first.form.values[each[0][0]] for each in differing if len(set(each)) > 1
        )
        prover = dataclasses.replace(first.prover, unknown=unknown, powers=Powers(), work=[0, 0])
        if (match := prover.prove()) is not None:
            yield from _carried(match, members)
            return
    for equal in by_content.values():  # 1: the same content
        if (match := equal[0].prover.prove()) is not None:
            yield from _carried(match, equal)


def _carried(match: LinearMatch, members: Sequence[_Member]) -> Iterator[tuple[int, LinearMatch]]:
    """The match of the first of some equal regions, for each of them."""
    for member in members:
        pairs = zip(members[0].form.values, member.form.values, strict=True)
        own = _replaced(match, dict(pairs), member.prover.region)
        if _has_logarithm(own, member.prover.info):
            yield member.place, own


def _has_logarithm(match: LinearMatch, info: ShapeInfo) -> bool:
    """Is a decay that is given as a power never negative? That may depend on what stands in front
    of the region."""
    decay = match.found.decay
    if decay is None or decay.logarithmic:
        return True
    interval = KernelBounds(info).unless_nan(decay.value)
    return interval is not None and interval[0] >= 0


def _replaced(item: Any, others: Mapping[ir.Value, ir.Value], region: Region) -> Any:
    """A record with other values in the places of its own. The decays of tables (powers.py) are in
    no region."""
    if isinstance(item, ir.Value):
        return others.get(item, item)
    if isinstance(item, Region):
        return region
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        fields = {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}
        return dataclasses.replace(
            item, **{name: _replaced(own, others, region) for name, own in fields.items()}
        )
    if isinstance(item, tuple):
        return tuple(_replaced(each, others, region) for each in item)
    if isinstance(item, Mapping):
        return {
            _replaced(key, others, region): _replaced(each, others, region)
            for key, each in item.items()
        }
    return item


def form_of(prover: Prover) -> Form:
    """The form of a prover's region."""
    return _Reader(prover).form()


class _Reader:
    """Reads the form of one region."""

    def __init__(self, prover: Prover) -> None:
        self.region, self.info = prover.region, prover.info
        batch, tokens = prover.open_sizes()[0]
        self.kinds = dict.fromkeys(batch, "batch") | dict.fromkeys(tokens, "tokens")
        self.are_open = bool(batch), bool(tokens)
        self.numbers: dict[ir.Value, int] = {}
        self.entries: list[Hashable] = []
        self.contents: list[tuple[int, Content]] = []
        self.sizes: dict[Dim, Hashable] = {}
        self.names: dict[str, int] = {}

    def form(self) -> Form:
        """The form."""
        for node in self._ordered():
            self._read(node)
        exits = tuple(map(self._number, self.region.exits))
        entering = tuple(sorted(map(self._number, self.region.locals)))
        self.entries.append((exits, entering, self.are_open))
        return Form(tuple(self.entries), [*self.numbers], tuple(self.contents))

    def _ordered(self) -> Iterator[ir.Node]:
        """The nodes of the region, each behind those that it reads, as they are reached from the
        exits."""
        pending = [
            (node, False) for node in reversed([*makers_of(self.region.exits), *self.region.nodes])
        ]
        seen = set[ir.Node]()
        while pending:
            node, is_ready = pending.pop()
            if is_ready:
                yield node
            elif node not in seen and node in self.region.members:
                seen.add(node)
                pending.append((node, True))
                pending.extend((source, False) for source in reversed(makers_of(values_read(node))))

    def _read(self, node: ir.Node) -> None:
        """Enter a node."""
        inputs = tuple(if_known(self._number, value) for value in node.inputs)
        attributes = tuple(
            (name, self._attribute(attr)) for name, attr in sorted(node.attributes.items())
        )
        outputs = tuple(map(self._number, node.outputs))
        self.entries.append((node.domain, node.op_type, inputs, attributes, outputs))

    def _attribute(self, attr: ir.Attr) -> Hashable:
        if attr.is_ref():
            return id(attr)  # unlike all others
        if attr.type in PLAIN:
            return attr.type, repr(attr.value)
        if attr.type == ir.AttributeType.TENSOR:
            return _content(attr.as_tensor().numpy())
        if attr.type == ir.AttributeType.GRAPH:
            return self._body(attr.as_graph())
        return id(attr)

    def _body(self, graph: ir.Graph) -> Hashable:
        """Enter the nodes of a body. Returns where they begin, and the numbers of its inputs and
        outputs."""
        start, inputs = len(self.entries), tuple(map(self._number, graph.inputs))
        for node in graph:
            self._read(node)
        return start, inputs, tuple(map(self._number, graph.outputs))

    def _number(self, value: ir.Value) -> int:
        """The number of a value, which is entered where it is met first."""
        if (known := self.numbers.get(value)) is not None:
            return known
        number = self.numbers[value] = len(self.numbers)
        dims = self.info.shape(value)
        shape = None if dims is None else tuple(map(self._size, dims))
        dtype = self.info.dtype(value)
        self.entries.append(
            (shape, dtype, self.region.depth(value), self._constant(value, number, dtype))
        )
        return number

    def _constant(self, value: ir.Value, number: int, dtype: ir.DataType | None) -> Hashable:
        """What a form holds of the content of a value; None where it is no constant."""
        array = constant(value)
        if array is None:
            return None
        content = _content(array)
        is_weight = value.producer() is None and dtype in FLOATS and array.size > 1
        if is_weight and np.isfinite(array.astype(np.float64)).all():
            self.contents.append((number, content))
            return "free"  # 2: the contents differ from layer to layer
        return content  # 1: its content

    def _size(self, size: Dim) -> Hashable:
        """A size, with the names of its parts replaced by what they are."""
        if size.const is not None:
            return size.const
        if (known := self.sizes.get(size)) is None:
            terms = [
                (factor, _in_order(map(self._atom, product))) for product, factor in size.terms
            ]
            known = self.sizes[size] = _in_order(terms)
        return known

    def _atom(self, atom: Atom) -> Hashable:
        if atom.args:
            return atom.op, tuple(map(self._size, atom.args))
        kind = self.kinds.get(atom.name, "not known")
        return kind, self.names.setdefault(atom.name, len(self.names))


def _in_order(parts: Iterable[Hashable]) -> tuple[Hashable, ...]:
    return tuple(sorted(parts, key=repr))


def _content(array: np.ndarray) -> Content:
    return array.dtype.str, array.shape, blake2b(array.tobytes()).digest()
