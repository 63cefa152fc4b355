"""Who reads what the nodes of an attention make: nobody else may, except for a shape or a type.

Refused: scores or probabilities that something else reads, or that are a model output; nodes of another graph; an
attention whose values are its own scores or probabilities, for then the product reads them as such.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from fa_compiler.passes.answer.decline import Decline, label
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.ir.nodes import distinct_consumers, each_consumer, is_op, reads_shape
from fa_compiler.passes.matching.probability_path import PRODUCTS, ProbabilityPath
from fa_compiler.passes.matching.scores import ScorePath
from fa_compiler.passes.matching.softmax import SoftmaxAnchor
from fa_compiler.passes.ops.movers import LAYOUT_OPS, REPEATS

BACKWARD_OPS = ("SoftmaxGrad", "SoftmaxGrad_13")


def check_private(
    anchor: SoftmaxAnchor,
    before: ScorePath,
    after: ProbabilityPath,
    accounted_for: Callable[[ir.Value, ir.Node], bool],
) -> list[tuple[ir.Node, ir.Value]]:
    """Decline if anything but the match reads what its nodes make.

    Returns the readers of a mere shape or type, each with what it reads, except those that only serve the softmax and
    are removed with it. They may read it behind operators that only move elements. `accounted_for` says whether another
    fusion replaces a reader.
    """
    softmax = {id(node) for node in anchor.nodes}
    scoring = (*before.nodes, *anchor.nodes)
    nodes = (*scoring, *after.nodes, after.product.node, *after.tail)
    matched = {id(node) for node in (*nodes, *after.tests, *(after.guard.tests if after.guard is not None else ()))}
    harmless: list[tuple[ir.Node, ir.Value]] = []
    for node in nodes:
        if node.graph is not anchor.node.graph:
            raise Decline(Code.SCOPE, "part of the attention lies in another graph than its softmax", node)
    if after.value.producer() in nodes:
        reason = f"the values {after.value.name!r} are scores or probabilities of the same attention"
        raise Decline(Code.SCORES_ARE_OUTPUT, reason, after.product.node, "")
    for node in nodes[:-1]:
        for output in node.outputs:
            readers = (
                reader
                for reader in each_consumer(output)
                if id(reader) not in matched and not accounted_for(output, reader)
            )
            shape_readers: list[tuple[ir.Node, ir.Value]] = []
            stranger: ir.Node | None = None
            for reader in readers:
                if (found := _shape_readers(reader, output, anchor.node.graph)) is None:
                    stranger = reader
                    break
                shape_readers.extend(found)
            if stranger is None and not output.is_graph_output():
                harmless.extend(each for each in shape_readers if not _serves_only(each[0], softmax, matched))
                continue
            after_softmax = output is anchor.output or any(node is other for other in after.nodes)
            code = Code.PROBABILITIES_ARE_OUTPUT if after_softmax else Code.SCORES_ARE_OUTPUT
            what = "probabilities" if after_softmax else "scores"
            who = "they are a model output" if stranger is None else f"{label(stranger)} reads them"
            raise Decline(code, f"the {what} {output.name!r} are needed elsewhere: {who}", node)
    return harmless


def _shape_readers(
    reader: ir.Node, value: ir.Value, graph: object, depth: int = 8
) -> list[tuple[ir.Node, ir.Value]] | None:
    """The readers of a mere shape that a reader of a value is or leads to through at most `depth` operators that only
    move elements, each with what it reads; None where the reader is or leads to something else."""
    if reader.graph is not graph:
        return None
    if reads_shape(reader):
        return [(reader, value)]
    if depth == 0 or not is_op(reader, *LAYOUT_OPS) or reader.outputs[0].is_graph_output():
        return None
    moved = reader.outputs[0]
    found = [_shape_readers(each, moved, graph, depth - 1) for each in distinct_consumers(moved)]
    return None if not found or None in found else [pair for pairs in found if pairs is not None for pair in pairs]


def feeds_backward(anchor: SoftmaxAnchor) -> bool:
    """Are the probabilities read by what looks like their own gradient? It reads them in a product, and it multiplies
    them or what the softmax makes on the way to them."""
    readers = distinct_consumers(anchor.output)
    if any(reader.op_type in BACKWARD_OPS for reader in readers):
        return True
    on_the_way = [output for node in anchor.nodes for output in node.outputs if output is not anchor.output]
    inner = [each for value in on_the_way for each in distinct_consumers(value) if each not in anchor.nodes]
    multiplied = any(is_op(reader, "Mul", "Neg") for reader in (*readers, *inner))
    return multiplied and any(is_op(reader, *LAYOUT_OPS, *REPEATS) or reader.op_type in PRODUCTS for reader in readers)


def _serves_only(reader: ir.Node, softmax: set[int], matched: set[int], limit: int = 16) -> bool:
    """Does all that is made from a node's results end in the softmax, as the target shape of an Expand in it does? What
    ends in other nodes of the match, a mask or bias, outlives them."""
    pending, known = [reader], {id(reader)}
    while pending:
        node = pending.pop()
        if len(known) > limit or any(output.is_graph_output() for output in node.outputs):
            return False
        for output in node.outputs:
            following = [
                each for each in distinct_consumers(output) if id(each) not in softmax and id(each) not in known
            ]
            if any(id(each) in matched for each in following):
                return False
            known.update(map(id, following))
            pending.extend(following)
    return True
