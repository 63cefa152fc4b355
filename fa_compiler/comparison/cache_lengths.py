"""Random inputs for attention over caches: sizes and lengths that are consistent.

Three things give the number of keys: shapes, a total, and a length for each batch entry.

    com.microsoft.GroupQueryAttention   S rows, past of P keys, T = total_sequence_length, length =
                                        seqlens_k + 1
        without a past   T = S
        prompt           T = S, for any past
        after it         S < T <= P + S, with one row or one batch entry; no entry has fewer keys
                         than rows
        always           1 <= length <= T
    ai.onnx.Attention                   T keys, length = nonpad_kv_seqlen
        always           1 <= length <= T
    com.microsoft.MultiHeadAttention, DecoderMaskedMultiHeadAttention
                                        S rows, past with a capacity of P keys, length =
                                        past_sequence_length
        always           length + S = T <= P, with a mask or bias for T keys

Sizes are tried in turn: one token after a full cache, several tokens of one batch entry after it, a
prompt. A length or total may be an input of the model, apart from casts, reshapes and added
constants; this input then gets the right number. If a length is the sum of an input, that input is
a mask. If the model computes a length in another way, ONNX Runtime runs these nodes, and their
result has to be consistent with the sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from fa_compiler.lowering.ort.own_session import OwnSession
from fa_compiler.passes import ShapeInfo
from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.ir.nodes import constant, input_of, is_op
from fa_compiler.protos.tensors import is_external

GROUP_QUERY = ("com.microsoft", "GroupQueryAttention")
PASTS, SEQLENS, TOTAL = (3, 4), 5, 6
NONPAD = 6
"""The indices of inputs: of GroupQueryAttention above, of ai.onnx Attention here."""
PREALLOCATED = {
    ("com.microsoft", "MultiHeadAttention"): 6,
    ("com.microsoft", "DecoderMaskedMultiHeadAttention"): 5,
}
"""Operators that may have preallocated caches, and the index of the first cache. The mask and the
bias precede it."""
CACHED_OPERATORS = frozenset(
    {GROUP_QUERY, ("", "Attention"), ("ai.onnx", "Attention"), *PREALLOCATED}
)
"""The operators of which `cached_attention` makes a CachedAttention."""

MAX_NODES = 1000
"""Lengths that need more nodes than this are not computed; the run of the model will show whether
they fit."""


@dataclass(frozen=True)
class Sizes:
    """Sizes to try: batch size, rows of the query and keys of a past. In a prompt, the rows have
    all the keys."""

    batch: int
    rows: int
    past: int
    prompt: bool = False


@dataclass(frozen=True)
class CachedAttention:
    """One attention node over a cache.

    `batch`, `rows` and `past` are sizes of its inputs. `total` is the number of keys, as a size or
    as a value of the graph. The length of a batch entry is the value `lengths` plus
    `length_offset`. A `preallocated` past has a capacity of `past` keys, and the length counts the
    keys before the new ones.
    """

    node: ir.Node
    batch: Dim
    rows: Dim
    past: Dim | None
    total: Dim | ir.Value
    lengths: ir.Value
    length_offset: int
    preallocated: bool = False

    @property
    def name(self) -> str:
        """The operator and name of the node, for messages."""
        return f"{self.node.op_type} {self.node.name!r}"


@dataclass(frozen=True)
class Requirements:
    """Requirements on the inputs: the batch size, the other symbolic sizes, the values of inputs by
    name, and the names of the inputs that are masks."""

    batch: int
    sizes: Mapping[str, int]
    numbers: Mapping[str, np.ndarray]
    masks: frozenset[str]


def size_name(name: str, axis: int) -> str:
    """The symbol for a size of an input that has no symbol in the model."""
    return f"size {axis} of {name}"


def named_sizes(model: onnx.ModelProto) -> ir.Model:
    """The model, with a symbol for each size of an input that has no name in the original."""
    loaded = ir.from_proto(model)
    for value in loaded.graph.inputs:
        if value.shape is not None:
            named = [
                size_name(value.name or "", axis) if _is_unnamed(dim) else dim
                for axis, dim in enumerate(value.shape)
            ]
            value.shape = ir.Shape(named)
    return loaded


def cached_attention(graph: ir.Graph, info: ShapeInfo) -> list[CachedAttention]:
    """The attention nodes of a graph (of `named_sizes`) that take the lengths as an input."""
    found = (_call(node, info) for node in graph)
    return [call for call in found if call is not None]


def attempts(
    calls: Sequence[CachedAttention],
    length: int,
    batch: int,
    shared: bool,
    demanded: Mapping[str, int],
) -> Iterator[Requirements]:
    """The requirements to try, the likeliest first. With `shared` all keys, new ones included, fit
    into the past. `demanded` holds the sizes that are known (demanded_sizes.py)."""
    past = 2 * length if shared else length
    after = (
        (Sizes(batch, 1, past), Sizes(1, length, past))
        if any(call.past is not None for call in calls)
        else ()
    )
    for sizes in (*after, *(Sizes(count, length, past, prompt=True) for count in (batch, 1))):
        yield _given(calls, sizes, shared, demanded)


def attempts_of(
    calls: Sequence[CachedAttention],
    batch: int,
    rows: int,
    past: int,
    shared: bool,
    demanded: Mapping[str, int],
) -> Iterator[Requirements]:
    """`attempts` with this number of new rows, and of cached keys before them. `shared` caches have
    room for both."""
    room = past + rows if shared else past
    for count in dict.fromkeys((batch, 1)):
        yield _given(calls, Sizes(count, rows, room, prompt=not past), shared, demanded)


def disagreement(
    model: onnx.ModelProto,
    calls: Sequence[CachedAttention],
    sizes: Mapping[str, int],
    feeds: Mapping[str, np.ndarray],
) -> str | None:
    """Why these inputs are inconsistent, or None if no inconsistency is known."""
    values = {
        value
        for call in calls
        for value in (call.total, call.lengths)
        if isinstance(value, ir.Value)
    }
    numbers = _computed(model, values, feeds)
    for call in calls:
        if (fault := _fault(call, sizes, numbers)) is not None:
            return f"{fault} in {call.name}"
    return None


def shared_pairs(model: onnx.ModelProto) -> dict[str, str]:
    """The present of each past of a GroupQueryAttention, where the past is an input and the present
    an output."""
    inputs, outputs = (
        {value.name for value in values} for values in (model.graph.input, model.graph.output)
    )
    pairs: dict[str, str] = {}
    for node in model.graph.node:
        if (node.domain, node.op_type) == GROUP_QUERY:
            pairs.update(zip(node.input[PASTS[0] : PASTS[-1] + 1], node.output[1:3], strict=False))
    return {
        past: present for past, present in pairs.items() if past in inputs and present in outputs
    }


def _is_unnamed(dim: int | ir.SymbolicDim) -> bool:
    return isinstance(dim, ir.SymbolicDim) and dim.value is None


def _call(node: ir.Node, info: ShapeInfo) -> CachedAttention | None:
    def size(index: int, axis: int) -> Dim:
        value = input_of(node, index)
        shape = None if value is None else info.shape(value)
        return shape[axis] if shape is not None and len(shape) > 1 else Dim.fresh()

    if (node.domain, node.op_type) == GROUP_QUERY:
        lengths, total = input_of(node, SEQLENS), input_of(node, TOTAL)
        if lengths is None or total is None:
            return None
        known = info.integer(total)
        past = None if input_of(node, PASTS[0]) is None else size(PASTS[0], 2)
        return CachedAttention(
            node, size(0, 0), size(0, 1), past, total if known is None else known, lengths, 1
        )
    if (first := PREALLOCATED.get((node.domain, node.op_type))) is not None:
        lengths = input_of(node, first + 2)
        beside = first - 2 if input_of(node, first - 2) is not None else first - 1
        if lengths is None:
            return None
        return CachedAttention(
            node,
            size(0, 0),
            size(0, 1),
            size(first, 2),
            size(beside, -1),
            lengths,
            0,
            preallocated=True,
        )
    lengths = input_of(node, NONPAD) if is_op(node, "Attention") else None
    if lengths is None:
        return None
    return CachedAttention(node, size(0, 0), size(0, -2), None, size(1, -2), lengths, 0)


def _given(
    calls: Sequence[CachedAttention], tried: Sizes, shared: bool, demanded: Mapping[str, int]
) -> Requirements:
    attempt = _Attempt(tried, shared, dict(demanded))
    for call in calls:
        attempt.fit(call)
    return Requirements(tried.batch, attempt.sizes, attempt.numbers, frozenset(attempt.masks))


@dataclass
class _Attempt:
    """The sizes, numbers and masks that fit the calls so far, where `tried` are the sizes of a call
    that has none."""

    tried: Sizes
    shared: bool
    sizes: dict[str, int]
    numbers: dict[str, np.ndarray] = field(default_factory=dict)
    masks: set[str] = field(default_factory=set)

    def fit(self, call: CachedAttention) -> None:
        """Adds what the call needs: its sizes, its total and its lengths."""
        batch, rows = (
            self._size(call.batch, self.tried.batch),
            self._size(call.rows, self.tried.rows),
        )
        past = None if call.past is None else self._size(call.past, self.tried.past)
        keys = self._keys(call, rows, past)
        total = self._size(call.total, keys) if isinstance(call.total, Dim) else keys
        if isinstance(call.total, ir.Value):
            origin = _origin(call.total)
            if origin is not None and not origin.summed:
                self.numbers[origin.name] = np.array(total - origin.added)
        origin = _origin(call.lengths)
        if origin is not None and origin.summed:
            self.masks.add(origin.name)
        elif origin is not None:
            lengths = _lengths(call, batch, rows, total)
            self.numbers[origin.name] = lengths - call.length_offset - origin.added

    def _size(self, dim: Dim, wanted: int) -> int:
        """The value of a size; a symbol without a value gets the wanted one."""
        atom = dim.single_atom
        if atom is not None and atom.op == "symbol":
            return self.sizes.setdefault(atom.name, wanted)
        known = dim.evaluate(self.sizes)
        return wanted if known is None else known

    def _keys(self, call: CachedAttention, rows: int, past: int | None) -> int:
        """The number of keys of a call: those of its rows, behind a past or written into it."""
        if call.preallocated and past is not None:
            return max(rows, past - past // 4)
        if past is None or self.tried.prompt:
            return rows
        keys_in_past = self.shared or (call.past is not None and call.past.is_const)
        return past if keys_in_past else past + rows


def _lengths(call: CachedAttention, batch: int, rows: int, total: int) -> np.ndarray:
    """The lengths of the batch entries: every other entry is a quarter shorter than the total, if
    its rows allow it. A preallocated cache has one length, without the rows."""
    if call.preallocated:
        return np.array(total - rows)
    least = 1 if total == rows else min(rows, total)
    shortened = np.arange(batch) % 2 * max(1, total // 4)
    return np.maximum(total - shortened, least)


@dataclass(frozen=True)
class _Origin:
    """The input from which a value is computed: the value is the input, or its sum if `summed`,
    plus `added`."""

    name: str
    added: int
    summed: bool


def _origin(value: ir.Value | None) -> _Origin | None:
    added, summed = 0, False
    while value is not None and not value.is_graph_input():
        node = value.producer()
        if is_op(node, "Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze"):
            assert node is not None
            value = node.inputs[0]
        elif is_op(node, "ReduceSum"):
            assert node is not None
            value, summed = node.inputs[0], True
        elif is_op(node, "Add", "Sub") and not summed:
            assert node is not None
            number = constant(node.inputs[1])
            if number is None or number.size != 1:
                return None
            added += int(number.reshape(())) * (1 if node.op_type == "Add" else -1)
            value = node.inputs[0]
        else:
            return None
    return None if value is None or not value.name else _Origin(value.name, added, summed)


def _fault(
    call: CachedAttention, sizes: Mapping[str, int], numbers: Mapping[str, np.ndarray]
) -> str | None:
    rows = call.rows.evaluate(sizes)
    past = None if call.past is None else call.past.evaluate(sizes)
    total, lengths = _total(call, sizes, numbers), numbers.get(call.lengths.name or "")
    if call.preallocated:
        return _preallocated_fault(rows, past, total, lengths)
    if lengths is None:
        return _rows_fault(call, sizes, total, None)
    if not lengths.size:  # without a batch entry any rows fit
        longest, shortest = call.length_offset, 1 + call.length_offset
    else:
        longest, shortest = (
            int(lengths.max()) + call.length_offset,
            int(lengths.min()) + call.length_offset,
        )
    if shortest < 1:
        return f"a batch entry has {shortest} keys"
    if total is not None and longest > total:
        return f"a batch entry has {longest} keys of {total}"
    return _rows_fault(call, sizes, total, shortest)


def _total(
    call: CachedAttention, sizes: Mapping[str, int], numbers: Mapping[str, np.ndarray]
) -> int | None:
    """The total number of keys, or None if it is unknown."""
    if isinstance(call.total, Dim):
        return call.total.evaluate(sizes)
    array = numbers.get(call.total.name or "")
    return None if array is None or array.size != 1 else int(array.reshape(()))


def _rows_fault(
    call: CachedAttention, sizes: Mapping[str, int], total: int | None, shortest: int | None
) -> str | None:
    """Why the rows do not fit the total, the past and the shortest length of a call with a total as
    input."""
    rows, batch = call.rows.evaluate(sizes), call.batch.evaluate(sizes)
    if call.length_offset == 0 or total is None or rows is None or total == rows:
        return None
    if total < rows or call.past is None:
        return f"{rows} rows come with {total} keys"
    past = call.past.evaluate(sizes)
    if past is not None and total - rows > past:
        return f"{rows} rows and a past of {past} come with {total} keys"
    if rows > 1 and batch is not None and batch > 1:
        return f"{rows} rows of {batch} batch entries come after a past"
    if shortest is not None and shortest < rows:
        return f"a batch entry of {shortest} keys has {rows} rows"
    return None


def _preallocated_fault(
    rows: int | None, past: int | None, total: int | None, before: np.ndarray | None
) -> str | None:
    if rows is None or before is None or before.size != 1:
        return None
    keys = int(before.reshape(())) + rows
    if total is not None and keys != total:
        return f"{keys} keys come with a mask or bias for {total}"
    if keys < rows or (past is not None and keys > past):
        return f"{rows} rows after {keys - rows} keys come with room for {past}"
    return None


def _computed(
    model: onnx.ModelProto, values: set[ir.Value], feeds: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The contents of the values by name, for those that can be computed without the rest of the
    model."""
    found: dict[str, np.ndarray] = {}
    wanted: list[str] = []
    for value in values:
        known = feeds.get(value.name or "") if value.is_graph_input() else constant(value)
        if known is not None:
            found[value.name or ""] = known
        elif value.name and not value.is_graph_input():
            wanted.append(value.name)
    part = _part(model, wanted) if wanted else None
    if part is None:
        return found
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        session = OwnSession(part.SerializeToString(), options, providers=["CPUExecutionProvider"])
        results = session.run(
            wanted, {value.name: feeds[value.name] for value in session.get_inputs()}
        )
    except (
        Exception
    ):  # ONNX Runtime's exceptions share no base class; the run of the model will report the error
        return found
    return found | dict(zip(wanted, map(np.asarray, results), strict=True))


def _part(model: onnx.ModelProto, outputs: Sequence[str]) -> onnx.ModelProto | None:
    """The nodes that compute the outputs, as a model; None if they are too many or hold graphs or
    external weights."""
    graph, needed, nodes = model.graph, set(outputs), []
    for node in reversed(graph.node):
        if not needed.isdisjoint(node.output):
            nodes.append(node)
            needed.update(node.input)
            if len(nodes) > MAX_NODES or any(
                attribute.HasField("g") for attribute in node.attribute
            ):
                return None
    weights = [tensor for tensor in graph.initializer if tensor.name in needed]
    if any(map(is_external, weights)):
        return None
    inputs = [value for value in graph.input if value.name in needed]
    results = [onnx.ValueInfoProto(name=name) for name in outputs]
    part = onnx.helper.make_graph(nodes[::-1], "lengths", inputs, results, weights)
    return onnx.helper.make_model(
        part, opset_imports=model.opset_import, ir_version=model.ir_version
    )
