"""One distribution over several values (LiLT, DiffLlama): the values are joined, and the attention
is computed once.

    p = scores.softmax(-1)
    output, layout_output = p @ v, p @ layout_v

Grammar; the code cites the numbers of the cases. For ONNX Runtime:

    probabilities := Softmax(scores)
      1     one node for all of equal scores: elementwise operators of the same values, where Add
            and Mul may have their operands in either order
    outputs :=
      2     MatMul(read, values), ...                      two or more; nothing else reads the
                                                         probabilities
    read :=
      4     probabilities | Cast(read)                     the same types for all softmaxes of 1
    emitted
      3     Split(MatMul(read, Concat(values)))            along the last dimension

Each column of a product depends on its own column of the values, so the results are the same. Equal
scores (1) have equal probabilities, and addition and multiplication are commutative in every number
format. LiLT writes text + layout in one order for the text, and in the other one for the layout.

Fused one by one, both attentions compute both products again. Times for 12 heads of 64 and 16, on
one core, in ms:

    tokens                              128     256     512
    the original                       0.96     6.5      50
    two attentions                      1.3     6.6      42
    one attention, joined values        0.8     3.2      28

Refused: values whose sizes differ in another dimension than the last, or that are too large
together. Such attentions are computed one by one (shared.py).

The change is a trial: it is kept if the ordinary matcher then takes the attention
(substitutions.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import onnx_ir as ir

from fa_compiler.passes.answer.decline import label
from fa_compiler.passes.emit.build import Builder
from fa_compiler.passes.emit.trial import Trial
from fa_compiler.passes.ir.nodes import (
    all_known,
    all_ops,
    holds_output,
    inputs_of,
    is_op,
    operand_at,
    readers_of,
)
from fa_compiler.passes.matching.attention import Matcher
from fa_compiler.passes.matching.roles import MAX_HEAD_SIZE
from fa_compiler.passes.matching.softmax import SoftmaxAnchor
from fa_compiler.passes.ops.elementwise import COMMUTATIVE, FOUR_OPERATIONS
from fa_compiler.passes.prepare.substitutions import Substitution, Substitutions, is_match
from fa_compiler.passes.values.shapes import ShapeInfo

COMPARED = (*FOUR_OPERATIONS, "Where")
"""1: the operators of equal scores."""
MAX_DEPTH = 8
"""How many operators of equal scores are compared, one above the other."""


def join_values(
    graph: ir.Graph,
    softmaxes: Sequence[SoftmaxAnchor],
    matcher: Matcher,
    new_builder: Callable[[], Builder],
) -> Substitutions:
    """Join the values of each distribution that has several, where the attention then matches. The
    graph stays as it is where there are none."""
    result, info = Substitutions(), matcher.facts.info
    if matcher.facts.options.target != "ort":
        return result
    for group in _groups(softmaxes, info):
        products = _products(group, info)
        if not products:
            continue
        first, twins = group[0], tuple(label(anchor.node) for anchor in group[1:])
        with Trial(new_builder()) as trial:
            outputs = [node.outputs[0] for node in products]
            trial.replace(*zip(outputs, _emitted(products, trial.builder), strict=True))
            matches = is_match(first, replace(matcher, joins_added_product=True)) or is_match(
                first, matcher
            )
            if matches and (change := trial.keep()) is not None:
                result.add(Substitution(change, twins=twins), first.node)
    return result


def _groups(softmaxes: Sequence[SoftmaxAnchor], info: ShapeInfo) -> list[list[SoftmaxAnchor]]:
    """Case 1: softmaxes of equal scores, in the order of the graph."""
    groups: dict[object, list[SoftmaxAnchor]] = {}
    for anchor in softmaxes:
        if anchor.nodes == (anchor.output.producer(),) and is_op(anchor.node, "Softmax"):
            groups.setdefault((anchor.axes, _score_key(anchor.scores, info, MAX_DEPTH)), []).append(
                anchor
            )
    return list(groups.values())


def _products(group: Sequence[SoftmaxAnchor], info: ShapeInfo) -> list[ir.Node]:
    """Cases 2 and 4: the products that are joined; empty where they cannot be."""
    paths = [_reads(anchor, info) for anchor in group]
    reads = [value for values, _ in paths for value in values]
    products, types = list(readers_of(reads)), {types for _, types in paths}
    alone = len(types) == 1 and _read_alone(products, reads)
    return (
        products
        if alone and _are_joinable([operand_at(node, 1) for node in products], info)
        else []
    )


def _reads(
    anchor: SoftmaxAnchor, info: ShapeInfo
) -> tuple[list[ir.Value], tuple[ir.DataType | None, ...]]:
    """Case 4: the values that products read of the probabilities, and the types that these are cast
    to on the way."""
    values, types = [anchor.output], list[ir.DataType | None]()
    while True:
        readers = list(readers_of(values))
        targets = {info.dtype(reader.outputs[0]) for reader in readers}
        if len(targets) != 1 or not all_ops(readers, "Cast") or holds_output(values):
            return values, tuple(types)
        values = [reader.outputs[0] for reader in readers]
        types.extend(targets)


def _score_key(value: ir.Value, info: ShapeInfo, depth: int) -> tuple[object, ...]:
    """Something that is the same for equal scores alone."""
    node, number = value.producer(), info.scalar(value)
    if number is not None and info.shape(value) is not None:
        return "number", str(number), info.dtype(value), info.shape(value)
    if depth == 0 or not is_op(node, *COMPARED):
        return "value", id(value)
    keys = [_score_key(operand, info, depth - 1) for operand in inputs_of(node)]
    if is_op(node, *COMMUTATIVE):
        keys.sort(key=repr)
    return node.op_type, *keys


def _read_alone(products: Sequence[ir.Node], reads: Sequence[ir.Value]) -> bool:
    """Case 2: do several products with values, and nothing else, read these probabilities?"""
    if len(products) < 2 or len(set(products)) < len(products) or holds_output(reads):
        return False
    return all(is_op(node, "MatMul") and node.inputs[0] in reads for node in products)


def _are_joinable(values: Sequence[ir.Value], info: ShapeInfo) -> bool:
    """Case 3: do values differ in their last dimension alone, and are they not too large
    together?"""
    shapes = [info.sizes(value) for value in values]
    others = {shape[:-1] for shape in shapes}
    if len(others) > 1 or () in others:
        return False
    widths = all_known(shape[-1].const for shape in shapes)
    return widths is not None and sum(widths) <= MAX_HEAD_SIZE


def _emitted(products: Sequence[ir.Node], builder: Builder) -> Sequence[ir.Value]:
    """Case 3."""
    info = builder.info
    read, values = operand_at(products[0], 0), [operand_at(node, 1) for node in products]
    shapes = [info.sizes(value) for value in values]
    last = len(shapes[0]) - 1
    joined = builder.concat(values, last)
    product = builder.matmul(read, joined)
    axis = len(info.shape(product) or shapes[0]) - 1
    sizes = [shape[-1].const or 0 for shape in shapes]
    return builder.split(product, axis, sizes)
