"""What the operands of a fused attention miss: copies, repeated heads, and types that are made
wider.

missed :=
    1 an operand or the result in the layout, if the model held all of them in one. Nobody can do
      much about new rows beside keys of another number, such as those of a cache: the layout of the
      keys is taken, because they are more. A single row is the same in every layout. An output of
      the model, such as a present, has its order in any case. What is copied once for each token
      costs nothing beside the product with weights that it comes out of or goes into
      (docs/recognised.md has the measurement). Without such a product copies are small beside the
      attention where each copied element meets many others in it: a row of the query meets each
      key, and a row of the keys each query
    2 one key head for several query heads, if key and value had equal numbers of heads, and these
      were neighbours
    3 16-bit products, if all operands, the result and the factors were of 16 bits
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain

import onnx_ir as ir

from fa_compiler.op_registry.runtimes import has_operator
from fa_compiler.passes.algebra.axes import Axes
from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.answer.options import Options
from fa_compiler.passes.answer.report import Missed, MissedCode
from fa_compiler.passes.ir.nodes import (
    SIXTEEN_BITS,
    distinct_consumers,
    is_op,
    is_weight,
    operands,
    outputs_of,
    reached,
    readers_of,
    source_through,
)
from fa_compiler.passes.layout.plan import PACKED, Transpose
from fa_compiler.passes.layout.views import View
from fa_compiler.passes.masks.expressible import is_single_row
from fa_compiler.passes.matching.match import AttentionMatch
from fa_compiler.passes.rewrite.layout_plan import LayoutPlan, OperandSource
from fa_compiler.passes.values.shapes import ShapeInfo

ADDED_QUERY, ADDED_KEY = "query of the added product", "key of the added product"
NAMES = ("query", "key", "value", ADDED_QUERY, ADDED_KEY)
_Operand = tuple[str, View, OperandSource]
"""An operand of the match by its name, and where it is read from."""
MANY = 64
"""So many rows that a copy of each is small beside the products with all of them."""
OF_ROWS = frozenset({"query", ADDED_QUERY, "result"})
"""What has the rows of the query; the others have those of the keys."""
PRODUCTS = frozenset(
    {"MatMul", "Gemm", "FusedMatMul", "MatMulInteger", "QLinearMatMul", "DynamicQuantizeMatMul"}
)
"""Operators that multiply two tensors, in each domain that has them."""
OF_WEIGHTS = "MatMulNBits"
"""One whose second tensor always holds weights."""
LIMIT = 32
"""So many values in front of an operand, or behind the result, are looked at for such a product."""


def missed_by_operands(
    match: AttentionMatch, plan: LayoutPlan, info: ShapeInfo, options: Options, behind: bool
) -> Iterator[Missed]:
    """What operands and result miss in this plan. Only the query counts where keys and values are
    read from pages, and where the operator itself puts new ones `behind` a past."""
    given = list(zip(NAMES, match.views, plan.operands, strict=False))
    if plan.paged or behind:
        given = given[:1]
    yield from _copies(match, plan, given, options)
    yield from _repeated_heads(match, given)
    yield from _widened(match, given, info)


def _repeated_heads(match: AttentionMatch, given: Sequence[_Operand]) -> Iterator[Missed]:
    """The key or value that lacks heads which the operator reads."""
    repeated = {name: view.base for name, view, _ in given[1:3] if _repeats_heads(view, match)}  # 2
    if len(repeated) > 1:
        reason = (
            f"the query heads that share a head of {_in_words(tuple(repeated))} are no neighbours"
        )
        advice = "order the query heads so that those with one key head are neighbours"
        yield Missed(MissedCode.REPEATED_HEADS, reason, repeated["key"].name, advice)
        return
    for few, value in repeated.items():
        (other,) = {"key", "value"} - {few}
        reason = f"{few} has fewer heads than {other}, and both need as many"
        yield Missed(MissedCode.REPEATED_HEADS, reason, value.name)


def _widened(match: AttentionMatch, given: Sequence[_Operand], info: ShapeInfo) -> Iterator[Missed]:
    """The operands of 16 bits, where others are wider and the attention is computed in 32."""
    short = {
        name: source.value for name, _, source in given if info.dtype(source.value) in SIXTEEN_BITS
    }
    if match.dtype != ir.DataType.FLOAT or not short:
        return
    wide = [name for name, *_ in given if name not in short]  # 3
    if not wide and (match.query_factors or match.output_factors):
        wide = ["the factors"]
    verb = "are" if len(short) > 1 else "is"
    reason = (
        f"{_in_words(tuple(short))} {verb} of 16 bits, {_in_words(wide or ['the result'])} of 32"
    )
    hint = "give operands, factors and result one 16-bit type, if it is exact enough"
    yield Missed(MissedCode.WIDE, reason, next(iter(short.values())).name, hint)


def _copies(
    match: AttentionMatch, plan: LayoutPlan, given: Sequence[_Operand], options: Options
) -> Iterator[Missed]:
    """What is transposed for the layout, and how much that is."""
    roles, space = match.roles, match.space
    # 1
    moved = {name: source.value for name, view, source in given if _is_transposed(view, source)}
    if any(isinstance(move, Transpose) for move in plan.destination.plan):
        moved["result"] = plan.destination.value
    if is_single_row(space.size(roles.q_seq), options):
        moved = {name: value for name, value in moved.items() if name not in OF_ROWS}
    if not moved or _are_free(match, moved):
        return
    elements = _elements(match)
    count = sum((space.size(elements[name]) for name in moved), Dim(0))
    reason = (
        f"the model holds {_in_words(tuple(moved))} in another order than the layout {plan.name}"
    )
    reason += f": {count} elements are copied"
    hint: str | None = _without_copies(plan, options)
    if OF_ROWS.issuperset(moved) and space.size(roles.q_seq) != space.size(roles.kv_seq):
        reason += "; keys and values, which may be more, are read where they are"
        hint = None
    minor = _are_small(match, moved)
    if minor:
        reason += ", few beside the products of the attention"
    yield Missed(MissedCode.COPIES, reason, next(iter(moved.values())).name, hint, minor=minor)


def _without_copies(plan: LayoutPlan, options: Options) -> str:
    """What the user can do. In contrib queries have rows before heads, in GroupQueryAttention keys
    and values, too."""
    rows_first, heads_first = "[batch, rows, heads, size]", "[batch, heads, rows, size]"
    if options.target == "contrib":
        if has_operator(options.runtime, "Attention"):
            return f"--target onnx, whose Attention also takes the order {heads_first}"
        return f"hold query, key, value and result as {rows_first}"
    orders = rows_first if plan.name == PACKED else f"{rows_first} or {heads_first}"
    return f"hold query, key, value and result alike, as {orders}"


def _are_small(match: AttentionMatch, moved: Collection[str]) -> bool:
    """Does each copied row meet many rows in the attention, in every run with many tokens?"""
    rows, keys = (match.space.size(axes) for axes in (match.roles.q_seq, match.roles.kv_seq))
    many_keys = not keys.is_const or keys.is_at_least(MANY)
    # behind a cache, one row may be new
    many_rows = rows == keys if not rows.is_const else rows.is_at_least(MANY)
    return many_keys and (many_rows or OF_ROWS.issuperset(moved))


def _are_free(match: AttentionMatch, moved: Mapping[str, ir.Value]) -> bool:
    """Is each token's part copied once, and all of it multiplied with weights?"""
    rows, keys = (match.space.size(axes) for axes in (match.roles.q_seq, match.roles.kv_seq))
    if rows != keys and not OF_ROWS.issuperset(moved):
        return False
    return all(_meets_weights(value, is_result=name == "result") for name, value in moved.items())


def _meets_weights(value: ir.Value, is_result: bool) -> bool:
    """Is the result multiplied with a matrix of weights, or does another value come out of such a
    product?"""

    def further(current: ir.Value) -> Sequence[ir.Value]:
        return (
            outputs_of(distinct_consumers(current)) if is_result else operands(current.producer())
        )

    values = reached([value], further, LIMIT)
    nodes = readers_of(values) if is_result else (each.producer() for each in values)
    return any(map(_multiplies_with_weights, nodes))


def _multiplies_with_weights(node: ir.Node | None) -> bool:
    """Is a node a product of a tensor and a matrix of weights?"""
    if node is None or node.op_type not in (*PRODUCTS, OF_WEIGHTS):
        return False
    return node.op_type == OF_WEIGHTS or any(map(_is_matrix, operands(node)))


def _is_matrix(value: ir.Value) -> bool:
    """Is a value a matrix of weights, quantised or not?"""
    weight = source_through(value, "DequantizeLinear", "Cast", "Transpose", "Reshape")
    return is_weight(weight) and weight.shape is not None and len(weight.shape) == 2


def _elements(match: AttentionMatch) -> dict[str, Axes]:
    """The axes that operands and result run along."""
    roles = match.roles
    rows = roles.batch + roles.q_seq + roles.heads
    keys = roles.batch + roles.kv_seq + roles.kv_heads
    elements = {
        "query": rows + roles.head_dim,
        "key": keys + roles.head_dim,
        "value": keys + roles.value_head_dim,
        "result": rows + roles.value_head_dim,
    }
    if match.rope is not None:
        elements |= {ADDED_QUERY: rows + match.rope.head_dim, ADDED_KEY: keys + match.rope.head_dim}
    return elements


def _is_transposed(view: View, source: OperandSource) -> bool:
    """Is an operand transposed for the attention, by a node of the model or by a new one?"""
    if any(isinstance(move, Transpose) for move in source.plan):
        return True
    values = [value for value, _ in view.equivalent_values]
    for value in reversed(values[1 : values.index(source.value) + 1]):
        if value.is_graph_output():  # the model gives it away in this order, such as a present
            return False
        if is_op(value.producer(), "Transpose"):
            return True
    return False


def _repeats_heads(view: View, match: AttentionMatch) -> bool:
    """Does an operand lack heads that the operator reads?"""
    own = set(chain(*view.base_dims))
    return any(axis not in own for axis in match.roles.kv_heads if match.space.size((axis,)) != 1)


def _in_words(names: Sequence[str]) -> str:
    """Names in a sentence: "a", "a and b", "a, b and c"."""
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])} and {names[-1]}"
