"""Rows without a key, which the model makes 0 behind the product with the values.

    kept = causal & padding                                          # [batch, 1, rows, keys]
    out = torch.softmax(scores + (~kept) * lowest, -1) @ value
    out = torch.where(kept.float().sum(-1, keepdim=True) < 1, 0, out)

That is how torch's exporter writes scaled_dot_product_attention. The operator gives 0 for such a
row by itself, so that the attention ends behind the Where, and the operators before and behind it
no longer keep two layouts apart.

    zeroed :=
      1     Where(empty, 0, product) | Where(some, product, 0)     product read by nothing else
    empty := Less(count, x), 0 < x <= 1 | LessOrEqual(count, x), 0 <= x < 1 | Equal(count, 0) |
             Not(some)
    some  := Greater(count, x), 0 <= x < 1 | GreaterOrEqual(count, x), 0 < x <= 1 | Not(empty)
    count :=
      2     ReduceSum(Cast(kept), last axis, keepdims=1) | ReduceMax, likewise
    kept :=
      3     a boolean tensor that holds exactly where the one mask leaves a score (guards.py)

Sound because a row of the product is made of the same row of probabilities: it is a MatMul with the
probabilities first, in the arrangement of the scores. And the numbers of the mask are so low, -1e30
or -inf, that a masked key has no weight beside a kept one. So to zero rows without a kept key is to
zero each masked probability. A sum of ones never rounds to less than 1.

Refused, and left as it was: another condition; numbers that are not as low; dropout, sinks, factors
on the result, a guard before the product, and attention whose gradient the model computes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from fa_compiler.passes.answer.decline import if_possible
from fa_compiler.passes.ir.nodes import data_readers, is_op, operand_at, producer, sole
from fa_compiler.passes.layout.views import Viewer
from fa_compiler.passes.masks.magnitudes import DOMINATING
from fa_compiler.passes.masks.mask_values import UNKNOWN
from fa_compiler.passes.masks.row_guard import RowGuard
from fa_compiler.passes.matching.attention_paths import AttentionPaths
from fa_compiler.passes.matching.guards import keeps_like, only_mask
from fa_compiler.passes.matching.masking import Masking
from fa_compiler.passes.matching.probabilities import Probabilities
from fa_compiler.passes.ops.elementwise import bare
from fa_compiler.passes.ops.reduce import keeps_last_axis
from fa_compiler.passes.values.patterns import Bind, Number, OneOf, Op, Pattern, match
from fa_compiler.passes.values.shapes import ShapeInfo

KEPT = Op("Cast", Bind("kept"))
# 2
COUNT = OneOf(
    tuple(Op(kind, KEPT, open_end=True, name="count") for kind in ("ReduceSum", "ReduceMax"))
)
NONE, ONE = Number(0.0, 0.5), Number(0.5, 1.0)
EMPTY: Pattern = OneOf(
    (Op("Less", COUNT, ONE), Op("LessOrEqual", COUNT, NONE), Op("Equal", COUNT, Number(0.0)))
)
SOME: Pattern = OneOf((Op("Greater", COUNT, NONE), Op("GreaterOrEqual", COUNT, ONE)))


@dataclass(frozen=True)
class ZeroedRows:
    """The Where behind the product, and the masking of the attention that ends there."""

    where: ir.Node
    masking: Masking


def zeroed_rows(
    paths: AttentionPaths, probabilities: Probabilities, masking: Masking
) -> ZeroedRows | None:
    """The Where that makes rows without a key 0; None where there is none. The scores have no sink
    beside them."""
    product = paths.after.product
    if (
        paths.route.gradient
        or probabilities.dropout is not None
        or masking.guard is not RowGuard.NONE
    ):
        return None
    if masking.factors or product.factor != 1.0 or paths.output is not product.output:
        return None
    where = _reader(product.output)
    if where is None or not _goes_by_rows(paths, probabilities):
        return None
    kept = _kept_where_not_zeroed(where, product.output, paths.viewer)
    if kept is None or not _is_mask(kept, paths, masking):
        return None
    plan = if_possible(lambda: masking.plan_with(RowGuard.SELECTION, paths))
    if plan is None:
        return None
    return ZeroedRows(where, replace(masking, plan=plan, guard=RowGuard.SELECTION))


def _reader(value: ir.Value) -> ir.Node | None:
    """The Where that alone reads a value; None where there is none."""
    where = sole(data_readers(value))
    if not is_op(where, "Where") or value.is_graph_output() or len(value.uses()) != 1:
        return None
    return where


def _goes_by_rows(paths: AttentionPaths, probabilities: Probabilities) -> bool:
    """Is the product a MatMul of probabilities in the arrangement of the scores?"""
    product, resolve = paths.after.product.node, paths.viewer.space.resolve_all
    if not is_op(product, "MatMul"):
        return False
    own = probabilities.seen.get(operand_at(product, 0))
    return own is not None and resolve(own) == resolve(paths.dims[paths.anchor.output])


def _kept_where_not_zeroed(where: ir.Node, product: ir.Value, viewer: Viewer) -> ir.Value | None:
    """Case 1: the boolean tensor without a True in the rows that a Where makes 0; None for another
    Where."""
    condition, yes, no = (operand_at(where, place) for place in range(3))
    zero = no
    if no is product:
        zero = yes
    if viewer.uniform_value(zero, product) != 0.0 or viewer.info.shape(
        where.outputs[0]
    ) != viewer.info.shape(product):
        return None
    test, negated = bare(condition, viewer.info)
    empty = (zero is yes) != negated
    pattern = SOME
    if empty:
        pattern = EMPTY
    found = None if test is None else match(pattern, test, viewer.info)
    if found is None or not _counts_keys(producer(found["count"]), viewer.info):
        return None
    return found["kept"]


def _counts_keys(node: ir.Node | None, info: ShapeInfo) -> bool:
    """Case 2: does a reduction of booleans as numbers keep its last axis, and no other?"""
    kept = operand_at(operand_at(node, 0).producer(), 0)
    return info.dtype(kept) == ir.DataType.BOOL and node is not None and keeps_last_axis(node, info)


def _is_mask(kept: ir.Value, paths: AttentionPaths, masking: Masking) -> bool:
    """Case 3: does a boolean tensor hold where the one mask leaves a score, and are the numbers of
    the mask so low?"""
    mask, viewer = only_mask(masking.terms), paths.viewer
    if mask is None:
        return False
    numbers = masking.planner.values.numbers_before_softmax(
        masking.terms, masking.terms.index(mask)
    )
    if numbers == UNKNOWN or any(number != 0.0 and number > DOMINATING for number in numbers):
        return False
    dims = if_possible(
        lambda: viewer.alignment(kept, paths.dims[paths.anchor.output], paths.anchor.node)
    )
    return dims is not None and keeps_like(kept, True, dims, mask, viewer)
