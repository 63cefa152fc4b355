"""A part of a graph at a random point: the sizes of one run, random numbers for what is not
followed, and from them the numbers of every value. Loops run as often as they do with these
sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.known import if_known
from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.ir.nodes import (
    STANDARD,
    all_known,
    constant,
    input_of,
    inputs_of,
    instances,
    int_attr,
    ints_attr,
    is_op,
    operand_at,
    outputs_of,
    subgraphs,
    values_read,
    without_absent,
    without_none,
)
from fa_compiler.passes.linear.field import hashed
from fa_compiler.passes.linear.meetings import ROUGH, UNNOTED, Meetings, names_of
from fa_compiler.passes.linear.operators import SUMS, chooses, evaluated
from fa_compiler.passes.linear.powers import Powers
from fa_compiler.passes.linear.tensors import (
    FailedError,
    Tensor,
    TooLongError,
    UnknownError,
    exact,
    moved,
    of_field,
)
from fa_compiler.passes.values.shapes import ShapeInfo

MOST_ITERATIONS = 64
MOST_STEPS = 10_000
"""So many nodes are evaluated at one point, those of a loop once for each iteration. Real models
have up to 3,000."""
LARGEST = 1 << 26
"""No tensor has more elements, 512 MiB, whatever sizes a graph declares: a damaged one may declare
any."""
SIZED = ("ConstantOfShape", "Expand", "EyeLike", "OneHot", "Pad", "Range", "Resize", "Tile")
"""The operators that are told a size. No other one gives more elements than all pairs of those of
its operands."""
MOST_SCALARS = 64
Sequenced: TypeAlias = "Tensor | list[Tensor]"
"""A tensor, or a sequence of them."""


def with_exponents(nodes: Iterable[ir.Node]) -> set[ir.Value]:
    """The values that reach an exponential as sums."""
    wanted = set[ir.Value]()
    for node in reversed([*nodes]):
        if is_op(node, "Exp") or (node.op_type in SUMS and not wanted.isdisjoint(node.outputs)):
            wanted.update(inputs_of(node))
        for graph in subgraphs(node):
            wanted |= with_exponents(graph)
            pairs = zip(graph.inputs, node.inputs, strict=False)
            wanted.update(outer for inner, outer in pairs if inner in wanted and outer is not None)
    return wanted


@dataclass
class Evaluation:
    """The numbers of values for given sizes. `sizes` holds the names of sizes that are open in the
    graph. No tensor has more elements than `most`, if that is not 0. The constants in `unknown` get
    random numbers."""

    info: ShapeInfo
    sizes: Mapping[str, int]
    seed: int
    exponents: set[ir.Value]
    powers: Powers = field(default_factory=Powers)
    most: int = 0
    unknown: frozenset[ir.Value] = frozenset()
    known: dict[ir.Value, Sequenced] = field(default_factory=dict)
    scalars: set[float] = field(default_factory=set)
    """The single numbers that were met: one of them may be the scale."""
    leaves: int = 0
    """How many tensors of random numbers were made: a body makes new ones in each run."""
    steps: int = 0
    """How many nodes were evaluated."""
    meetings: Meetings = UNNOTED
    """Notes of what the nodes read."""
    names: set[str] = field(default_factory=set)
    """The names of `sizes` that shapes depended on."""
    elements: dict[ir.Node, int] = field(default_factory=dict)
    """The number of elements of the largest tensor that each node made."""
    firsts: dict[ir.Value, frozenset[int]] = field(default_factory=dict)
    """The integers of the bodies of loops in the first iteration, where they are others in the
    second one."""
    lasting: dict[ir.Value, int] = field(default_factory=dict)
    """The single integers of the bodies of loops that are the same in all iterations."""
    ends: dict[ir.Value, tuple[tuple[int, ...], int, int]] = field(default_factory=dict)
    """The shape, the first and the last element of known integers that comparisons and the like
    read."""
    freed: frozenset[ir.Node] = frozenset()
    """The loops that carry random numbers from the first iteration on, in the place of what they
    begin with. Integers that are the same in every run stay."""
    states: list[ir.Value] = field(default_factory=list)
    """Values that stand for these numbers."""
    counts: dict[ir.Node, int] = field(default_factory=dict)
    """The most iterations of each loop."""
    repeated: dict[ir.Node, int] = field(default_factory=dict)
    """The iterations of each loop in a body when it ran first."""
    choices: set[ir.Node] = field(default_factory=set)
    """The nodes that choose by truth values that differ from run to run, other than one of two
    finite constants."""
    depth: int = 0
    """In how many bodies the node is that is evaluated now."""
    begun: dict[ir.Graph, dict[ir.Value, tuple[int, np.ndarray]]] = field(default_factory=dict)
    """The integers of each body in the iteration in which they are first known, and its place; -1
    where a later one differs."""

    def tensor(self, value: ir.Value) -> Tensor:
        """The numbers of a value."""
        result = self._get(value)
        if isinstance(result, list):
            raise FailedError("a sequence")
        return result

    def _get(self, value: ir.Value) -> Sequenced:
        if value not in self.known:
            self.known[value] = self._leaf(value)
        return self.known[value]

    def _leaf(self, value: ir.Value) -> Tensor:
        array = None if value in self.unknown else constant(value)
        if array is not None:
            tensor = exact(array)
            self._meet(tensor)
            return tensor
        return self._random(self.shape(value))

    def _random(self, shape: tuple[int, ...]) -> Tensor:
        """Random numbers, unlike those of every other tensor."""
        count = math.prod(shape)
        if count > (self.most or LARGEST):
            raise TooLongError("a tensor of too many elements")
        places = np.arange(count, dtype=np.int64)
        self.leaves += 1
        seed = self.seed + (self.leaves << 32)
        return of_field(hashed([places], seed).reshape(shape))

    def shape(self, value: ir.Value) -> tuple[int, ...]:
        """The sizes of a value in this run. Raises FailedError where one is not known."""
        if value in self.known and isinstance(known := self.known[value], Tensor):
            return known.shape
        dims = self.info.sizes(value)
        self._enter(dims)
        sizes = all_known(dim.evaluate(self.sizes) for dim in dims)
        if self.info.shape(value) is None or sizes is None or min(sizes, default=0) < 0:
            raise FailedError(f"the shape of {value.name!r} is not known")
        return tuple(sizes)

    def _enter(self, dims: Iterable[Dim]) -> None:
        """Note sizes that were asked for."""
        for dim in dims:
            self.names.update(names_of(dim))
            self.meetings.ask(dim)

    def run(self, nodes: Sequence[ir.Node], kept: Iterable[ir.Value] = ()) -> None:
        """Evaluate nodes in order. What no later node reads is forgotten, but for what is kept."""
        last = {value: place for place, node in enumerate(nodes) for value in values_read(node)}
        held = set(kept)
        made = {*outputs_of(nodes)}
        for place, node in enumerate(nodes):
            for output, result in zip(node.outputs, self._outputs(node), strict=False):
                self.known[output] = result
                self.meetings.make(output, result if isinstance(result, list) else [result])
            for value in values_read(node):
                if last[value] == place and value in made and value not in held:
                    self.known.pop(value, None)

    def _outputs(self, node: ir.Node) -> Sequence[Sequenced]:
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise TooLongError("too many steps")
        if node.domain not in STANDARD:
            raise FailedError(f"{node.op_type} is not followed")
        if node.op_type in _CONTROL:
            try:
                return _CONTROL[node.op_type](self, node)
            except (ValueError, IndexError) as error:  # shapes or numbers of values that do not fit
                raise FailedError(f"{node.op_type} {node.name}: {error}") from None
        operands = self._operands(node)
        self.meetings.add(node, operands)
        self._expect_small(node, operands)
        if chooses(node, operands):
            self.choices.add(node)
        dtype = self.info.dtype(input_of(node, 0))
        with_sums = not self.exponents.isdisjoint(node.outputs)
        try:
            results = evaluated(node, operands, dtype, with_sums)
        except UnknownError:  # whatever it gives: what is proven holds for every number
            return self._leaves(node)
        for result in results:
            self._meet(result)
            self.elements[node] = max(self.elements.get(node, 0), math.prod(result.shape))
        self._note_ends(node, operands)
        return results

    def _leaves(self, node: ir.Node) -> list[Sequenced]:
        """Constants, or random numbers in the place of what a node gives."""
        return [self._leaf(output) for output in node.outputs]

    def _note_ends(self, node: ir.Node, operands: Sequence[Tensor | None]) -> None:
        """Note where the integers begin and end that a comparison or the like reads."""
        if not is_op(node, *ROUGH):
            return
        for value, operand in zip(node.inputs, operands, strict=True):
            array = None if operand is None else operand.integers
            if value is not None and array is not None and array.size:
                self.ends[value] = (array.shape, int(array.flat[0]), int(array.flat[-1]))

    def _operands(self, node: ir.Node) -> list[Tensor | None]:
        """What a node reads. Of a tensor whose Shape is read, the numbers are not needed."""
        if is_op(node, "Shape") and operand_at(node, 0) not in self.known:
            return [Tensor(self.shape(operand_at(node, 0)))]
        return [if_known(self.tensor, value) for value in node.inputs]

    def _expect_small(self, node: ir.Node, operands: Iterable[Tensor | None]) -> None:
        """Raises TooLongError where a result is known to have too many elements."""
        pairs = math.prod(max(1, math.prod(each.shape)) for each in without_none(operands))
        if node.op_type not in SIZED and pairs <= LARGEST:
            return
        for output in node.outputs:
            sizes = all_known(dim.evaluate(self.sizes) for dim in self.info.sizes(output))
            if sizes is not None and math.prod(sizes) > LARGEST:
                raise TooLongError("a tensor of too many elements")

    def _meet(self, tensor: Tensor) -> None:
        if self.most and math.prod(tensor.shape) > self.most:
            raise TooLongError("a tensor of many elements")
        array = tensor.exact
        if array is None:
            return
        if tensor.field is None:
            self.powers.meet(array)
            tensor.field = self.powers.read(array, self.seed)
        if array.size == 1 and array.dtype.kind == "f" and len(self.scalars) < MOST_SCALARS:
            number = float(array.reshape(-1)[0])
            if np.isfinite(number) and number != 0.0:
                self.scalars.add(number)

    def _body(self, graph: ir.Graph, inputs: Sequence[Sequenced]) -> list[Sequenced]:
        """The results of one run of a body."""
        for value, tensor in zip(graph.inputs, inputs, strict=True):
            self.known[value] = tensor
        nodes = [*graph]
        for output in outputs_of(nodes):
            self.known.pop(output, None)
        self.depth += 1
        for node in nodes:
            for output, result in zip(node.outputs, self._outputs(node), strict=False):
                self.known[output] = result
        self.depth -= 1
        return [self._get(value) for value in graph.outputs]

    def _integers(self, graph: ir.Graph) -> dict[ir.Value, np.ndarray]:
        """The integers that a body has in this iteration, and that are the same in every run."""
        values = [*graph.inputs, *outputs_of(graph.all_nodes())]
        known = {
            value: tensor for value in values if isinstance(tensor := self.known.get(value), Tensor)
        }
        return without_absent({value: tensor.integers for value, tensor in known.items()})

    def _note_first(self, graph: ir.Graph, step: int) -> None:
        """Note what the integers of a body are in the first iteration, as two of them tell: a
        branch may have none before."""
        if self.meetings is UNNOTED:
            return
        if not step:
            self.begun[graph] = {}
        begun = self.begun[graph]
        for value, array in self._integers(graph).items():
            place, before = begun.setdefault(value, (step, array))
            if place < 0 or before.shape != array.shape:
                continue
            if not (differs := before != array).any():
                if array.size == 1:
                    self.lasting[value] = int(array.flat[0])
                continue
            self.lasting.pop(value, None)
            begun[value] = (-1, array)
            slopes = (array[differs] - before[differs]) // (step - place)
            self.firsts[value] = self.firsts.get(value, frozenset()) | {
                *map(int, before[differs] - place * slopes)
            }

    def _number(self, value: ir.Value | None, default: int) -> int:
        """An integer or truth value that is the same in every run with these sizes."""
        if value is None:
            return default
        array = self.tensor(value).exact
        if array is None or array.size != 1:
            raise FailedError(f"{value.name!r} is not known")
        return int(array.reshape(-1)[0])

    def _loop(self, node: ir.Node) -> Sequence[Sequenced]:
        (body,) = subgraphs(node)
        count, condition = (
            self._number(node.inputs[0], MOST_ITERATIONS + 1),
            self._number(node.inputs[1], 1),
        )
        self.meetings.add(node, [if_known(self.tensor, value) for value in node.inputs[:1]])
        states = self._first_states(node, without_none(node.inputs[2:]))
        stacked = len(body.outputs) - 1 - len(states)
        made: list[Sequence[Sequenced]] = []
        carried: list[Sequence[Sequenced]] = []
        for step in range(count):
            if not condition:
                break
            if step >= MOST_ITERATIONS:
                raise TooLongError("a Loop of many iterations")
            given = [exact(np.array(step)), exact(np.array(bool(condition))), *states]
            carried.append(states)
            results = self._body(body, given)
            self._note_first(body, step)
            condition = self._number(body.outputs[0], 1)
            states = results[1 : 1 + len(states)]
            made.append(results[1 + len(states) :])
        self._note_carried(node, [*carried, states])
        return self._given(
            node, len(made), [*states, *(_stacked(part, 0) for part in _columns(made, stacked))]
        )

    def _scan(self, node: ir.Node) -> Sequence[Sequenced]:
        (body,) = subgraphs(node)
        if len(node.inputs) != len(body.inputs):
            raise FailedError(
                "a Scan of opset 8, which has lengths, and a batch in front of the tokens"
            )
        count = int_attr(node, "num_scan_inputs", 0)
        inputs = inputs_of(node)
        states, scanned = (
            self._first_states(node, inputs[:-count]),
            [self.tensor(each) for each in inputs[-count:]],
        )
        axes, turned = (
            _listed(node, name, count) for name in ("scan_input_axes", "scan_input_directions")
        )
        outputs = len(body.outputs) - len(states)
        axes_out, turned_out = (
            _listed(node, name, outputs) for name in ("scan_output_axes", "scan_output_directions")
        )
        rows = [_slices(*each) for each in zip(scanned, axes, turned, strict=True)]
        self.meetings.add(node, [exact(np.array(len(each))) for each in rows])
        if len({*map(len, rows)}) != 1:
            raise FailedError("a Scan of inputs of other lengths")
        made: list[Sequence[Sequenced]] = []
        carried: list[Sequence[Sequenced]] = [states]
        for step, slices in enumerate(zip(*rows, strict=True)):
            results = self._body(body, [*states, *slices])
            self._note_first(body, step)
            states = results[: len(states)]
            carried.append(states)
            made.append(results[len(states) :])
        self._note_carried(node, carried)
        parts = [
            part[::-1] if back else part
            for part, back in zip(_columns(made, outputs), turned_out, strict=True)
        ]
        results = [
            *states,
            *(_stacked(part, axis) for part, axis in zip(parts, axes_out, strict=True)),
        ]
        return self._given(node, len(made), results)

    def _given(
        self, node: ir.Node, count: int, results: Sequence[Sequenced]
    ) -> Sequence[Sequenced]:
        """The results of a loop of so many iterations, which are noted. One in a body is bent if
        they are more or fewer than before, or if it gives other integers."""
        self.counts[node] = max(self.counts.get(node, 0), count)
        if self.depth:
            is_same = self.repeated.setdefault(node, count) == count
            read = [
                result for value, result in zip(node.outputs, results, strict=False) if value.uses()
            ]
            if not self.meetings.gives_same(node, instances(read, Tensor)) or not is_same:
                self.meetings.bend(node)
        return results

    def _first_states(self, node: ir.Node, values: Sequence[ir.Value]) -> list[Sequenced]:
        """What a loop carries into the first iteration."""
        states = [self._get(value) for value in values]
        return [self._freed(state) for state in states] if node in self.freed else states

    def _freed(self, state: Sequenced) -> Sequenced:
        """Random numbers in the place of what a loop begins with, a sequence's tensors included.
        Integers that are the same in every run stay."""
        if isinstance(state, list):
            return [self._freed_tensor(each) for each in state]
        return self._freed_tensor(state)

    def _freed_tensor(self, state: Tensor) -> Tensor:
        if state.is_known_integer:
            return state
        self.states.append(ir.Value(name="state"))
        self.known[self.states[-1]] = result = self._random(state.shape)
        return result

    def _note_carried(self, node: ir.Node, carried: Sequence[Sequence[Sequenced]]) -> None:
        """Note a loop that carries a number which is the same in every run, and no multiple of the
        iteration."""
        if self.meetings is not UNNOTED and not all(map(_is_even, zip(*carried, strict=True))):
            self.meetings.bend(node)

    def _if(self, node: ir.Node) -> list[Sequenced]:
        name = "then_branch" if self._number(node.inputs[0], 1) else "else_branch"
        return self._body(node.attributes[name].as_graph(), [])

    def _parts(self, node: ir.Node) -> list[Tensor]:
        """The sequence that a node reads."""
        parts = self._get(operand_at(node, 0))
        if not isinstance(parts, list):
            raise FailedError("no sequence")
        return parts

    def _empty(self, node: ir.Node) -> list[Sequenced]:
        return [[]]

    def _construct(self, node: ir.Node) -> list[Sequenced]:
        return [[self.tensor(value) for value in inputs_of(node)]]

    def _insert(self, node: ir.Node) -> list[Sequenced]:
        parts, inserted = self._parts(node), node.inputs[1:]
        if len(inserted) != 1 or inserted[0] is None:
            raise FailedError(f"{node.op_type} is not followed")
        return [[*parts, self.tensor(inserted[0])]]

    def _join(self, node: ir.Node) -> list[Sequenced]:
        parts, axis = self._parts(node), int_attr(node, "axis", 0)
        if int_attr(node, "new_axis", 0):
            return [_stacked(parts, axis)]
        return [moved(parts, lambda *arrays: np.concatenate(arrays, axis), False)]


_CONTROL: Mapping[str, Callable[[Evaluation, ir.Node], Sequence[Sequenced]]] = {
    "Constant": Evaluation._leaves,
    "Loop": Evaluation._loop,
    "Scan": Evaluation._scan,
    "If": Evaluation._if,
    "SequenceEmpty": Evaluation._empty,
    "SequenceConstruct": Evaluation._construct,
    "SequenceInsert": Evaluation._insert,
    "ConcatFromSequence": Evaluation._join,
}


def _is_even(states: Sequence[Sequenced]) -> bool:
    """Do all sizes that a loop carries in one place differ by one step from iteration to iteration,
    and all its numbers that are the same in every run?"""
    tensors = instances(states, Tensor)
    if len(tensors) < len(states):
        return _are_even(instances(states, list))
    if not _has_one_step([np.array(state.shape) for state in tensors]):
        return False
    arrays = all_known(state.exact for state in tensors)
    if arrays is None:
        return not any(state.is_known_integer for state in tensors)
    return _has_one_step([array.astype(np.float64) for array in arrays])


def _are_even(lists: Sequence[list[Tensor]]) -> bool:
    """Do the sequences that a loop carries grow by one step? What is in them may come in any later
    iteration, so no integer in it may be known, and it has one shape."""
    tensors = [*chain.from_iterable(lists)]
    has_one_shape = len({tensor.shape for tensor in tensors}) <= 1
    has_integers = any(tensor.is_known_integer for tensor in tensors)
    return (
        has_one_shape
        and not has_integers
        and _has_one_step([np.array(len(each)) for each in lists])
    )


def _has_one_step(arrays: Sequence[np.ndarray]) -> bool:
    """Do arrays have one shape, and differ by the same from one to the next?"""
    steps = [after - before for before, after in pairwise(arrays) if after.shape == before.shape]
    return len(steps) == len(arrays) - 1 and all((step == steps[0]).all() for step in steps)


def _slices(tensor: Tensor, axis: int, is_backward: int) -> list[Tensor]:
    """The parts of a tensor that a Scan reads one after the other."""
    length = tensor.shape[axis]
    if length > MOST_ITERATIONS:
        raise TooLongError("a Scan of many iterations")
    places = reversed(range(length)) if is_backward else range(length)
    with_sums = tensor.sums is not None
    return [
        moved((tensor,), lambda array, place=place: np.take(array, place, axis), with_sums)
        for place in places
    ]


def _columns(made: Sequence[Sequence[Sequenced]], count: int) -> list[list[Tensor]]:
    """What a body gave in all its runs, for each of its last outputs."""
    return [[_single(results[place]) for results in made] for place in range(count)]


def _single(value: Sequenced) -> Tensor:
    if isinstance(value, list):
        raise FailedError("a sequence")
    return value


def _stacked(parts: Sequence[Tensor], axis: int) -> Tensor:
    if not parts:
        raise FailedError("a loop without an iteration")
    return moved(parts, lambda *arrays: np.stack(arrays, axis), False)


def _listed(node: ir.Node, name: str, count: int) -> list[int]:
    return ints_attr(node, name, [0] * count)
