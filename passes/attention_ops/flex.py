"""ai.onnx.preview FlexAttention: its definition is written out in plain operators and matched like
any other attention.

    scores = scale * query key'       [B, N, S, D]; key heads repeated for their groups
    scores = score_mod(scores)        in softmax_precision, float32 unless given
    probabilities = prob_mod(softmax(scores)), then the product with the values

The nodes of the definition are added beside the operator, and removed again when the match is
refused. What the graphs score_mod and prob_mod may hold follows from scores.py, mask.py and
probability_path.py. Refused before the match: graphs that make random numbers or hold further
graphs or nodes of several outputs.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.answer.decline import reworded
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.attention_ops.call import ConvertedOp, OpConverter
from fa_compiler.passes.emit.operators import AttrValue
from fa_compiler.passes.ir.nodes import RANDOM, STANDARD, certain, int_attr
from fa_compiler.passes.masks.mask import MaskPlan
from fa_compiler.passes.matching.attention import Matcher
from fa_compiler.passes.matching.softmax import SoftmaxAnchor

TERMS = {
    Code.NO_SCORES_MATMUL: Code.SCORE_TERM,
    Code.NO_VALUE_MATMUL: Code.PROBABILITY_TERM,
    Code.NOT_ATTENTION: Code.PROBABILITY_TERM,
}
"""The code to report instead of one that says a product is missing.

The definition has both products, so the search stopped at a node in the graph of score_mod or
prob_mod.
"""
PLAIN = (
    ir.AttributeType.INT,
    ir.AttributeType.FLOAT,
    ir.AttributeType.STRING,
    ir.AttributeType.INTS,
)


def convert(call: OpConverter) -> ConvertedOp:
    """The record of a FlexAttention node."""
    node = call.node
    call.check_precision()
    if {"score_mod", "prob_mod"}.intersection(node.attributes):
        return _written_out(call)
    query, key, value = (call.operand(call.required_input(index), "BNSD") for index in range(3))
    scores = call.scores(query, key, value)
    return ConvertedOp(
        call.record(query, key, value, scores, MaskPlan(), call.given_number("scale"), "BNSD")
    )


def _written_out(call: OpConverter) -> ConvertedOp:
    """The match of the definition, with the operator's output as its result."""
    anchor = _definition(call)
    match = reworded(
        lambda: Matcher(call.facts).match(anchor),
        lambda decline: call.decline(
            TERMS.get(decline.code, decline.code), decline.reason, decline.hint
        ),
    )
    named = replace(anchor, nodes=(call.node,))
    return ConvertedOp(replace(match, anchor=named, output=call.node.outputs[0]))


def _definition(call: OpConverter) -> SoftmaxAnchor:
    node, builder, info = call.node, call.builder, call.info
    query, key, value = (call.required_input(index) for index in range(3))
    dtype, size, heads = info.dtype(query), call.size(query, 3), call.size(query, 1)
    key, value = _repeated(call, key, heads), _repeated(call, value, heads)
    scale = call.given_number("scale")
    if scale is None and size is None:
        raise call.decline(Code.SHAPE, "the head size is not known before the model runs")
    precision = ir.DataType(int_attr(node, "softmax_precision", int(ir.DataType.FLOAT)))
    transposed = builder.transpose(key, (0, 1, 3, 2))
    scores = builder.cast(builder.matmul(query, transposed), precision)
    if scale is None:
        scale = 1.0 / math.sqrt(size or 1)
    number = builder.constant(np.array(scale, dtype=precision.numpy()), "number")
    scores = builder.mul(scores, number)
    scores = _inlined(call, "score_mod", scores)
    softmax = builder.op("Softmax", [scores], {"axis": -1})
    weights = builder.cast(_inlined(call, "prob_mod", softmax), dtype or precision)
    builder.matmul(weights, value)
    maker = certain(softmax.producer())
    return SoftmaxAnchor(scores, softmax, (3,), (maker,))


def _repeated(call: OpConverter, value: ir.Value, heads: int | None) -> ir.Value:
    """Keys or values [B, K, S, D], each head repeated for its group, so that there are `heads` of
    them. Raises Decline where the number of heads is open."""
    own, size, builder = call.size(value, 1), call.size(value, 3), call.builder
    if heads is None or own is None:
        raise call.decline(Code.SHAPE, "the number of heads is not known before the model runs")
    if own == 0 or heads % own or size is None:
        raise call.decline(
            Code.SHAPE, f"{heads} query heads are no multiple of {own} key heads of a known size"
        )
    if own == heads:
        return value
    grouped = builder.unsqueeze(value, (2,))
    wide = builder.expand(grouped, [1, 1, heads // own, 1, 1])
    return builder.reshape(wide, [0, heads, -1, size])


def _inlined(call: OpConverter, name: str, value: ir.Value) -> ir.Value:
    """The result of the graph `name` (score_mod or prob_mod) on a value; the value itself without
    such a graph."""
    attr = call.node.attributes.get(name)
    if attr is None:
        return value
    graph, builder = attr.as_graph(), call.builder
    if len(graph.inputs) != 1 or len(graph.outputs) != 1:
        raise call.decline(Code.SCORE_TERM, f"{name} is no graph of one input and one output")
    known: dict[ir.Value | None, ir.Value | None] = {graph.inputs[0]: value}
    for initializer in graph.initializers.values():
        if initializer.const_value is not None:
            known[initializer] = builder.constant(initializer.const_value.numpy(), "const")
    for node in graph:
        if not _is_plain(node):
            raise call.decline(
                Code.SCORE_TERM, f"{node.op_type} in {name} is not taken out of its graph"
            )
        if node.op_type == "Constant":
            known[node.outputs[0]] = builder.constant(_content(call, node), "const")
            continue
        attrs: dict[str, AttrValue] = {attr.name: attr.value for attr in node.attributes.values()}
        inputs = [known.get(operand, operand) for operand in node.inputs]
        known[node.outputs[0]] = builder.op(
            node.op_type, inputs, attrs, dtype=node.outputs[0].dtype
        )
    return known.get(graph.outputs[0]) or graph.outputs[0]


def _is_plain(node: ir.Node) -> bool:
    """Is this a node of one output that computes the same wherever it stands: a Constant, or a
    standard operator that makes no random numbers and holds no graphs?"""
    if node.domain not in STANDARD or node.op_type in RANDOM or len(node.outputs) != 1:
        return False
    return node.op_type == "Constant" or all(
        attr.type in PLAIN for attr in node.attributes.values()
    )


def _content(call: OpConverter, node: ir.Node) -> np.ndarray:
    attr = node.attributes.get("value")
    if attr is None:
        raise call.decline(Code.SCORE_TERM, "a Constant that is no tensor")
    return attr.as_tensor().numpy()
