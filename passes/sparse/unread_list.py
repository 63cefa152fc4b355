"""Why keys that a list selects are read by a mask of all rows and keys: the reason for the report.

It is asked where a mask is made from a Scatter that may write at a list of keys (`list_scatter`),
and no list is read.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import AxisSpace
from fa_compiler.passes.answer.decline import Decline, label
from fa_compiler.passes.answer.options import MASKS_DOMINATE, NO_EMPTY_ROWS
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.ir.nodes import (
    constant,
    first,
    inputs_of,
    is_op,
    nodes_of_type,
    operand_at,
    producer,
    reached,
)
from fa_compiler.passes.layout.views import Viewer
from fa_compiler.passes.masks.magnitudes import ASSUMED_MASK
from fa_compiler.passes.masks.missed import vouching
from fa_compiler.passes.masks.score_ops import tensors_of
from fa_compiler.passes.matching.match import AttentionMatch
from fa_compiler.passes.sparse.builder import what_is_beyond
from fa_compiler.passes.sparse.conditions import MAX_PARTS, Condition, ConditionReader
from fa_compiler.passes.sparse.selection import SCATTERS, SelectionReader, selections
from fa_compiler.passes.values.facts import Facts

MASKS = 4 * MAX_PARTS
"""How many values are looked at for a Scatter among those that a mask is made from."""
NEAR = 32
"""How many values are looked at for a TopK among those that places are made from."""
LOWEST = "exclude keys by -inf, or in float32 by its lowest number"
JOINED = "keep a key only where the list keeps it and every other mask does"
BY_TOP_K = "scatter at the indices of the TopK themselves"


def list_scatter(mask: ir.Value) -> ir.Node | None:
    """The nearest Scatter of those a mask is made from; None where there is none, and where it
    writes at places that are no list of keys, as an assignment to a slice does."""
    return first(node for node in _scatters(mask) if _writes_list(node))


def check_bias(match: AttentionMatch, facts: Facts) -> None:
    """Decline a bias that is made from a Scatter at the list of a TopK."""
    for operand in tensors_of(match.mask.bias):
        scatter = first(node for node in _scatters(operand.view.base) if _writes_at_top(node))
        if scatter is None:
            continue
        reason = "the mask stays a bias: its numbers are not proven to be 0 and one that outweighs every score"
        hint, numbers = LOWEST, facts.sets.of(operand.view.base) or frozenset()
        if 0.0 in numbers and min(numbers) <= ASSUMED_MASK:
            hint = f"{vouching((MASKS_DOMINATE, NO_EMPTY_ROWS))}; or {LOWEST}"
        raise unlisted(reason, scatter, hint)


def _scatters(mask: ir.Value) -> Iterator[ir.Node]:
    sources = reached([mask], lambda value: inputs_of(producer(value)), MASKS)
    return nodes_of_type(map(producer, sources), *SCATTERS)


def _writes_list(node: ir.Node) -> bool:
    """Does a Scatter write at indices that are computed in each run? Those of ScatterND come from a
    TopK, then."""
    if is_op(node, "ScatterElements"):
        return constant(operand_at(node, 1)) is None
    return _writes_at_top(node)


def _writes_at_top(node: ir.Node) -> bool:
    """Do the indices of a Scatter come from a TopK?"""
    sources = reached([operand_at(node, 1)], lambda value: inputs_of(producer(value)), NEAR)
    return any(is_op(producer(value), "TopK") for value in sources)


def unlisted(reason: str, scatter: ir.Node, hint: str = "") -> Decline:
    """The answer that the keys which a Scatter selects are not read by their list."""
    return Decline(Code.ILLEGAL, reason, scatter, hint)


def check_plain(match: AttentionMatch, scatter: ir.Node) -> None:
    """Decline an attention that uses what the operator with a list does not have."""
    found, hint = what_is_beyond(match), ""
    if match.mask.masked_score is not None:
        hint = f"--assume {MASKS_DOMINATE} if no score comes near the number of the mask"
    if found is not None:
        raise unlisted(f"the operator with a list does not have {found}", scatter, hint)


def why_unread(mask: ir.Value, scatter: ir.Node, facts: Facts) -> Decline:
    """Why a boolean mask of rank 4, which is made from this Scatter, has no single selection."""
    if several := selections(mask, facts):
        names = " and ".join(repr(each.scattered.name) for each in several)
        return unlisted(
            f"the mask has {len(several)} lists of keys, {names}, and the operator takes one",
            scatter,
        )
    reader = ConditionReader(facts)
    for part in reader.conditions(Condition(mask, when=True, heads=True)):
        found = SelectionReader(reader).scattered(part)
        if found is not None and found.node is scatter:
            hint = BY_TOP_K
            if found.top is not None:
                hint = ""
            return unlisted(found.fault, scatter, hint)
        if (other := _source(part.value, facts)) is not None and other is scatter:
            return unlisted(
                "the Scatter does not have one list for each row, which all heads share", scatter
            )
        if list_scatter(part.value) is scatter:
            joint = producer(part.value)
            kind = "an operator" if joint is None else joint.op_type
            return unlisted(
                f"{kind} is not proven to exclude each key that the list excludes", scatter, JOINED
            )
    return unlisted(
        f"{label(scatter)} is too far from the mask, or one of many conditions", scatter, JOINED
    )


def _source(value: ir.Value, facts: Facts) -> ir.Node | None:
    """What makes a value, seen through layout operators, Not, and casts."""
    view = Viewer(facts, AxisSpace()).view(value, factors=False)
    node = producer(value) if view is None else producer(view.base)
    while is_op(node, "Not", "Cast"):
        node = producer(node.inputs[0])
    return node
