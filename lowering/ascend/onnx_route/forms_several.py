"""Forms of operators with several inputs and outputs.

| operator | becomes | where |
| --- | --- | --- |
| GRU with layout 1 | Transposes around layout 0 | always |
| NonMaxSuppression with absent inputs | the defaults are written out | always |
| SoftmaxCrossEntropyLoss | LogSoftmax, GatherElements and sums: GE's loss ignores class 0 by default | always |
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from fa_compiler.lowering.ascend.onnx_route.rewrite import Rewrite
from fa_compiler.passes.ir.nodes import attribute_values, int_attr


def batch_first(rewrite: Rewrite) -> None:
    """GRU of opset 14."""
    node, builder = rewrite.node, rewrite.builder
    layout = int_attr(node, "layout", 0)
    rewrite.drop("layout")
    if not layout:
        return
    data, inputs = rewrite.needed(0), list(node.inputs)
    for index in (0, 5):
        value = rewrite.given(index)
        if value is not None:
            inputs[index] = rewrite.op("Transpose", [value], value, {"perm": (1, 0, 2)})
    moved = ir.node(
        node.op_type,
        inputs,
        attribute_values(node),
        num_outputs=len(node.outputs),
        name=builder.names.new(f"{node.name or node.op_type}_layout_0"),
    )
    results = []
    for index, old in enumerate(node.outputs):
        moved.outputs[index].name = builder.names.new(f"{moved.name}_output")
        moved.outputs[index].dtype = rewrite.dtype(data)
        perm = (2, 0, 1, 3) if index == 0 else (1, 0, 2)
        unread = not rewrite.is_read(index)
        results.append(
            old if unread else rewrite.op("Transpose", [moved.outputs[index]], data, {"perm": perm})
        )
    assert node.graph is not None
    node.graph.insert_before(node, moved)
    _replace_read(rewrite, results)


def _replace_read(rewrite: Rewrite, values: Sequence[ir.Value]) -> None:
    """Replace the outputs that are read. For an unread output, `values` holds the node's own
    output."""
    graph = rewrite.node.graph
    assert graph is not None
    for output, value in zip(list(rewrite.node.outputs), values, strict=True):
        if value is not output:
            rewrite.replace_output(output, value)
    graph.remove(rewrite.node, safe=True)


def suppression_defaults(rewrite: Rewrite) -> None:
    """NonMaxSuppression: the plugin connects all inputs up to the last one, so none of them may be
    absent."""
    node = rewrite.node
    for index, number in ((2, np.array(0, np.int64)), (3, np.array(0, np.float32))):
        if len(node.inputs) > index and rewrite.given(index) is None:
            node.replace_input_with(index, rewrite.builder.constant(number, "number"))


def cross_entropy(rewrite: Rewrite) -> None:
    """SoftmaxCrossEntropyLoss by its definition."""
    node, builder = rewrite.node, rewrite.builder
    scores, labels, weights = rewrite.needed(0), rewrite.needed(1), rewrite.given(2)
    log = _log_softmax(rewrite, scores, len(rewrite.shape(scores)))
    attr, kind = node.attributes.get("ignore_index"), rewrite.dtype(labels)
    ignored = None
    if attr is not None:
        number = builder.constant(np.array(attr.as_int(), kind.numpy()), "number")
        ignored = builder.equal(labels, number)
        labels = rewrite.op("Where", [ignored, rewrite.scalar(0, labels), labels], labels)
    places = builder.unsqueeze(labels, [1])
    found = builder.squeeze(rewrite.op("GatherElements", [log, places], scores, {"axis": 1}), [1])
    loss = rewrite.op("Neg", [found], scores)
    weight = (
        None if weights is None else rewrite.op("Gather", [weights, labels], scores, {"axis": 0})
    )
    if weight is not None:
        loss = rewrite.op("Mul", [loss, weight], scores)
    if ignored is not None:
        zero, one = (rewrite.scalar(number, scores) for number in (0, 1))
        loss = rewrite.op("Where", [ignored, zero, loss], scores)
        weight = rewrite.op("Where", [ignored, zero, weight or one], scores)
    reduction = rewrite.text("reduction", "mean")
    if reduction == "mean" and weight is None:
        loss = rewrite.op("ReduceMean", [loss], scores, {"keepdims": 0})
    elif reduction != "none":
        loss = rewrite.op("ReduceSum", [loss], scores, {"keepdims": 0})
        if reduction == "mean" and weight is not None:
            loss = rewrite.op(
                "Div", [loss, rewrite.op("ReduceSum", [weight], scores, {"keepdims": 0})], scores
            )
    rewrite.replace(loss, *([log] if rewrite.is_read(1) else []))


def _log_softmax(rewrite: Rewrite, scores: ir.Value, rank: int) -> ir.Value:
    """LogSoftmax over axis 1 only, in a form with the same meaning in every opset."""
    if rewrite.builder.opset >= 13 or rank == 2:
        return rewrite.op("LogSoftmax", [scores], scores, {"axis": 1})
    there = [0, *range(2, rank), 1]
    last = rewrite.op("Transpose", [scores], scores, {"perm": there})
    log = rewrite.op("LogSoftmax", [last], scores, {"axis": rank - 1})
    return rewrite.op(
        "Transpose", [log], scores, {"perm": [there.index(axis) for axis in range(rank)]}
    )
