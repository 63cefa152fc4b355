"""A change of a graph that is tried: it is kept on request, and otherwise undone.

Match first, build afterwards: a graph is changed when the record of an attention is complete. But
some questions are only answered by a graph that is changed already, such as whether the ordinary
matcher takes an attention in another spelling, or whether the sizes that a layout needs can be
computed. They are asked inside of a trial:

    with Trial(Builder(graph, names, info)) as trial:
        trial.replace((old, made_by(trial.builder)))
        if matches():
            change = trial.keep()

A trial owns what it changes: the nodes, constants and names that are made, the uses of the values
that are replaced, the inputs of the nodes that become superfluous, and what is known of the order
of the graph. What is not kept leaves none of these behind. A kept change may be undone later
(`Change.undo`).

Cost: a trial looks at what it changes, never at the whole graph. So it does not sort the graph, in
which new nodes stand at the end. Its owner sorts it once after all its trials (`restore_order`).

Order: `depends` does not search nodes that stand before the one it is asked about. That holds for
new nodes, too, if each gets the place of the last of its inputs, and if all readers of the replaced
values stand behind that. Where it is not so, the places of all nodes are unknown until the graph is
sorted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType

import onnx_ir as ir

from fa_compiler.passes.emit.build import Builder, Place
from fa_compiler.passes.ir.nodes import makers_of, values_read
from fa_compiler.passes.ir.surgery import ORDER, replace_value, restore_order, superfluous, sweep

Replaced = tuple[tuple[ir.Value, ir.Value], ...]
"""Old values, each with the new one that takes its place."""
Before = tuple[tuple[ir.Node, tuple[ir.Value | None, ...]], ...]
"""Nodes that nothing needs any more, each with the inputs that it had."""
Places = dict[ir.Node, int]


@dataclass(frozen=True)
class Change:
    """A change that was kept. `made` are the names of what was made, and `places` tell the order
    before."""

    graph: ir.Graph
    replaced: Replaced
    before: Before
    initializers: tuple[tuple[ir.Graph, ir.Value], ...]
    """Those that only the nodes before needed, with their graphs."""
    made: frozenset[str]
    places: Places

    def undo(self) -> None:
        """Put the nodes before in their places again, and remove the new ones. The graph is
        sorted."""
        for graph, value in self.initializers:
            graph.initializers.add(value)
        self._insert([node for node, _ in self.before])
        _put_back(self.replaced, self.before, rename=True)
        sweep(self.graph, _makers(new for _, new in self.replaced))
        restore_order(self.graph)

    def _insert(self, nodes: Sequence[ir.Node]) -> None:
        pending = sorted(
            nodes, key=lambda node: self.places.get(node, len(self.places)), reverse=True
        )
        for node in list(self.graph):
            while pending and self.places.get(pending[-1], len(self.places)) < self.places.get(
                node, -1
            ):
                self.graph.insert_before(node, pending.pop())
        self.graph.extend(reversed(pending))


@dataclass
class Trial:
    """Changes one graph by its `builder`. It is undone at the end of the `with`, unless it was
    kept.

    `lists` are of whoever builds: they grow with the graph, and lose again what is undone.
    """

    builder: Builder
    lists: Sequence[list[ir.Node]] = ()
    kept: bool = False
    _replaced: Replaced = ()
    _before: Before = ()
    _place: Place = field(init=False)
    """Where the builder was before."""
    _lengths: list[int] = field(default_factory=list)
    """Those of `lists` before."""
    _places: Places | None = None
    """What was known of the order before."""

    @property
    def graph(self) -> ir.Graph:
        """The graph that is changed."""
        return self.builder.graph

    def __enter__(self) -> Trial:
        self._place = self.builder.place
        self._lengths = [len(made) for made in self.lists]
        self._places = self.graph.meta.get(ORDER)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        if not self.kept:
            self._undo()

    def replace(
        self, *replaced: tuple[ir.Value, ir.Value], nodes: Iterable[ir.Node] | None = None
    ) -> None:
        """Put new values in the places of old ones. At most once in a trial.

        A new value that takes several places has an alias in all but the first, so that each has
        the name of its own old value. The nodes that become superfluous lose their inputs, so that
        nothing counts them as readers: these `nodes`, or all that nothing else needs.
        """
        replaced = tuple(self._apart(replaced))
        self.graph.meta[ORDER] = {}
        if nodes is None:
            _redirect(replaced)
            nodes = superfluous(_makers(old for old, _ in replaced))
            self._before = _without_inputs(nodes)
        else:
            self._before = _without_inputs(nodes)
            _redirect(replaced)
        self._replaced = replaced

    def _apart(self, replaced: Replaced) -> Iterator[tuple[ir.Value, ir.Value]]:
        taken = set[ir.Value]()
        for old, new in replaced:
            yield old, self.builder.alias(new) if new in taken else new
            taken.add(new)

    def keep(self) -> Change | None:
        """Make the change for good: the old nodes are removed, and new values take the names of the
        old ones.

        The graph is to be sorted afterwards. Returns None, and keeps nothing, where nodes of other
        graphs became superfluous, such as those in the branches of an If.
        """
        if any(node.graph is not self.graph for node, _ in self._before):
            return None
        self.kept = True
        places = self._places
        if places is None:
            places = {}
            if self._replaced:
                places = {node: place for place, node in enumerate(self.graph)}
        for old, new in self._replaced:
            replace_value(old, new)
        self.graph.remove([node for node, _ in self._before])
        swept = sweep(self.graph, _makers(value for _, inputs in self._before for value in inputs))
        if self._replaced:
            self.builder.drop_unused_constants()
            self.graph.meta[ORDER] = self._with_new_nodes(places)
        names = self.builder.names.since(self._place.names)
        before = (*self._before, *swept.nodes)
        return Change(self.graph, self._replaced, before, tuple(swept.initializers), names, places)

    def _with_new_nodes(self, places: Places) -> Places:
        """The places of all nodes; none where they were not known before, or where the change
        contradicts them."""
        made = [
            node
            for node in self.builder.nodes_since(self._place.requests)
            if node.graph is self.graph
        ]
        for node in made:
            makers = [maker for maker in _makers(values_read(node)) if maker.graph is self.graph]
            if any(maker not in places for maker in makers):
                return {}
            places[node] = max((places[maker] for maker in makers), default=-1)
        readers = [
            (reader, node)
            for node in made
            for output in node.outputs
            for reader, _ in output.uses()
        ]
        if any(places.get(reader, -1) < places[node] for reader, node in readers):
            return {}
        return places

    def _undo(self) -> None:
        _put_back(self._replaced, self._before, rename=False)
        self.builder.go_back(self._place)
        for made, length in zip(self.lists, self._lengths, strict=True):
            del made[length:]
        if self._replaced and self._places is not None:
            self.graph.meta[ORDER] = self._places
        elif self._replaced:
            self.graph.meta.pop(ORDER, None)


def _redirect(replaced: Replaced) -> None:
    for old, new in replaced:
        replace_value(old, new, rename=False)


def _without_inputs(nodes: Iterable[ir.Node]) -> Before:
    """Take away the inputs of nodes."""
    before = tuple((node, tuple(node.inputs)) for node in nodes)
    for node, inputs in before:
        for index in range(len(inputs)):
            node.replace_input_with(index, None)
    return before


def _put_back(replaced: Replaced, before: Before, rename: bool) -> None:
    """Let readers read the old values again, and give the old nodes their inputs. With `rename` the
    old values take their names back."""
    for old, new in replaced:
        declared = old.type, old.shape
        replace_value(new, old, rename)
        old.type, old.shape = declared
    for node, inputs in before:
        for index, value in enumerate(inputs):
            node.replace_input_with(index, value)


def _makers(values: Iterable[ir.Value | None]) -> list[ir.Node]:
    return makers_of(values)
