"""Who reads what the nodes of an attention make: nobody else may, except for a shape or a type.

Refused: scores or probabilities that something else reads, or that are a model output; nodes of
another graph; an attention whose values are its own scores or probabilities, for then the product
reads them as such.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import onnx_ir as ir

from fa_compiler.passes.answer.decline import Decline, label
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.ir.nodes import (
    any_op,
    distinct_consumers,
    each_consumer,
    holds_output,
    is_op,
    nodes_after,
    outputs_of,
    readers_of,
    reads_shape,
)
from fa_compiler.passes.matching.probability_path import MULTIPLYING, ProbabilityPath
from fa_compiler.passes.matching.scores import ScorePath
from fa_compiler.passes.matching.softmax import SoftmaxAnchor
from fa_compiler.passes.ops.movers import LAYOUT_OPS, REPEATS

BACKWARD_OPS = ("SoftmaxGrad", "SoftmaxGrad_13")


ShapeReader = tuple[ir.Node, ir.Value]


def check_private(
    anchor: SoftmaxAnchor,
    before: ScorePath,
    after: ProbabilityPath,
    accounted_for: Callable[[ir.Value, ir.Node], bool],
) -> list[ShapeReader]:
    """Decline if anything but the match reads what its nodes make.

    Returns the readers of a mere shape or type, with the values that they read, also behind
    operators that only move elements. A reader that only serves the softmax is removed with the
    softmax, and left out. `accounted_for` says whether another fusion replaces a reader.
    """
    softmax = {id(node) for node in anchor.nodes}
    nodes = (*before.nodes, *anchor.nodes, *after.nodes, after.product.node, *after.tail)
    matched = {id(node) for node in (*nodes, *after.all_tests)}
    _check_nodes(nodes, after, anchor.node.graph)
    probabilities = {anchor.output, *outputs_of(after.nodes)}
    harmless: list[ShapeReader] = []
    for output in outputs_of(nodes[:-1]):
        readers = (
            reader
            for reader in each_consumer(output)
            if id(reader) not in matched and not accounted_for(output, reader)
        )
        shape_readers, stranger = _sorted_readers(readers, output, anchor.node.graph)
        if stranger is not None or output.is_graph_output():
            raise _read_elsewhere(output, stranger, output in probabilities)
        harmless += [pair for pair in shape_readers if not _serves_only(pair[0], softmax, matched)]
    return harmless


def _check_nodes(nodes: Collection[ir.Node], after: ProbabilityPath, graph: object) -> None:
    """Decline nodes of another graph, and values that the attention itself makes."""
    for node in nodes:
        if node.graph is not graph:
            raise Decline(
                Code.SCOPE, "part of the attention lies in another graph than its softmax", node
            )
    if after.value.producer() in nodes:
        reason = (
            f"the values {after.value.name!r} are scores or probabilities of the same attention"
        )
        raise Decline(Code.SCORES_ARE_OUTPUT, reason, after.product.node, "")


def _sorted_readers(
    readers: Iterable[ir.Node], value: ir.Value, graph: object
) -> tuple[list[ShapeReader], ir.Node | None]:
    """The readers of a mere shape that readers of a value are or lead to, and the first reader that
    is or leads to something else."""
    shape_readers: list[ShapeReader] = []
    for reader in readers:
        if (pairs := _shape_readers(reader, value, graph)) is None:
            return [], reader
        shape_readers += pairs
    return shape_readers, None


def _read_elsewhere(value: ir.Value, stranger: ir.Node | None, after_softmax: bool) -> Decline:
    """Why scores or probabilities cannot go: a stranger reads them, or they are a model output."""
    who = f"{label(stranger)} reads them" if stranger is not None else "they are a model output"
    if after_softmax:
        reason = f"the probabilities {value.name!r} are needed elsewhere: {who}"
        return Decline(Code.PROBABILITIES_ARE_OUTPUT, reason, value.producer())
    reason = f"the scores {value.name!r} are needed elsewhere: {who}"
    return Decline(Code.SCORES_ARE_OUTPUT, reason, value.producer())


def _shape_readers(
    reader: ir.Node, value: ir.Value, graph: object, depth: int = 8
) -> list[ShapeReader] | None:
    """The readers of a mere shape behind a reader of a value, or the reader itself, with the values
    that they read. At most `depth` operators that only move elements may lead there. None where one
    leads to something else."""
    if reader.graph is not graph:
        return None
    if reads_shape(reader):
        return [(reader, value)]
    if depth == 0 or not is_op(reader, *LAYOUT_OPS) or reader.outputs[0].is_graph_output():
        return None
    moved, pairs = reader.outputs[0], list[ShapeReader]()
    for following in distinct_consumers(moved):
        further = _shape_readers(following, moved, graph, depth - 1)
        if further is None:
            return None
        pairs += further
    return pairs or None


def feeds_backward(anchor: SoftmaxAnchor) -> bool:
    """Are the probabilities read by what looks like their own gradient? It reads them in a product,
    and it multiplies them or what the softmax makes on the way to them."""
    readers = distinct_consumers(anchor.output)
    if any(reader.op_type in BACKWARD_OPS for reader in readers):
        return True
    on_the_way = (output for output in outputs_of(anchor.nodes) if output is not anchor.output)
    inner = [reader for reader in readers_of(on_the_way) if reader not in anchor.nodes]
    multiplied = any_op((*readers, *inner), "Mul", "Neg")
    return multiplied and any(
        is_op(reader, *LAYOUT_OPS, *REPEATS) or reader.op_type in MULTIPLYING for reader in readers
    )


def _serves_only(reader: ir.Node, softmax: set[int], matched: set[int], limit: int = 16) -> bool:
    """Does all that is made from a node's results end in the softmax, as the target shape of an
    Expand in it does? What ends in other nodes of the match, a mask or bias, outlives them."""
    pending, known = [reader], {id(reader)}
    while pending:
        node = pending.pop()
        if len(known) > limit or holds_output(node.outputs):
            return False
        readers = {id(reader): reader for reader in nodes_after(node)}
        following = {
            key: reader
            for key, reader in readers.items()
            if key not in softmax and key not in known
        }
        if not matched.isdisjoint(following):
            return False
        known.update(following)
        pending.extend(following.values())
    return True
