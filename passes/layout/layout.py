"""From one arrangement of axes to another: the fewest Reshapes, Transposes and Expands, and what they cost.

A plan first puts the axes the value has in the target's order, then broadcasts those it lacks. Axes that stay
neighbours are moved together, so "b (n d)" to "b n d" is one Reshape and "b s n d" to "b n s d" one Transpose.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fa_compiler.passes.layout.axes import Arrangement, Axes, Axis

COPY_COST = 10
"""A Transpose or Expand moves every element; a Reshape only changes a shape."""

LAYOUTS: dict[str, Callable[[Axes, Axes, Axes, Axes], Arrangement]] = {
    "BNSD": lambda b, n, s, d: (b, n, s, d),
    "BSND": lambda b, n, s, d: (b, s, n, d),
    "BSH": lambda b, n, s, d: (b, s, n + d),
    "SBH": lambda b, n, s, d: (s, b, n + d),
}
"""The operator's layouts by batch, head, sequence and depth axes."""
PACKED = "TND"
"""The layout of packed sequences: the tokens of all batches in one dimension."""


def arrangement(layout: str, batch: Axes, heads: Axes, tokens: Axes, depth: Axes) -> Arrangement:
    """The dimensions of a tensor in a layout."""
    return (batch + tokens, heads, depth) if layout == PACKED else LAYOUTS[layout](batch, heads, tokens, depth)


@dataclass(frozen=True)
class Reshape:
    """Give the value these dimensions, in the order its elements have."""

    dims: Arrangement


@dataclass(frozen=True)
class Units:
    """Take away and put in dimensions of size 1, whatever the sizes of the others turn out to be."""

    removed: tuple[int, ...]
    inserted: tuple[int, ...]
    dims: Arrangement


@dataclass(frozen=True)
class Transpose:
    """Permute the dimensions; `dims` are the resulting ones."""

    perm: tuple[int, ...]
    dims: Arrangement


@dataclass(frozen=True)
class Expand:
    """Repeat along dimensions of size 1; `dims` are the resulting ones."""

    dims: Arrangement


Move = Reshape | Units | Transpose | Expand


def moves(source: Arrangement, target: Arrangement) -> tuple[Move, ...] | None:
    """How to get from one arrangement (of finest axes) to another; None when axes would have to be dropped, or one has
    two places, as in an outer product of a batch with itself."""
    own = {axis for dim in source for axis in dim}
    wanted = [axis for dim in target for axis in dim]
    if not own <= set(wanted) or len(set(wanted)) < len(wanted):
        return None
    present = tuple(tuple(axis for axis in dim if axis in own) for dim in target)
    plan = list(_permute(source, present))
    if present != target:
        plan.extend(_broadcast(present, target, own))
    return tuple(plan)


def cost(plan: Sequence[Move]) -> int:
    """The work of a plan in arbitrary units."""
    return sum(1 if isinstance(move, Reshape | Units) else COPY_COST for move in plan)


def _permute(source: Arrangement, target: Arrangement) -> list[Move]:
    if source == target:
        return []
    flat = [axis for dim in target for axis in dim]
    if [axis for dim in source for axis in dim] == flat:
        return [_units(source, target) or Reshape(target)]
    pieces = _pieces(source, target)
    plan: list[Move] = [] if pieces == source else [_units(source, pieces) or Reshape(pieces)]
    place = {piece[0]: index for index, piece in enumerate(pieces)}
    perm = tuple(place[axis] for axis in flat if axis in place)
    ordered = tuple(pieces[index] for index in perm)
    plan.append(Transpose(perm, ordered))
    if ordered != target:
        plan.append(_units(ordered, target) or Reshape(target))
    return plan


def _units(source: Arrangement, target: Arrangement) -> Units | None:
    """The move between arrangements that differ in dimensions of size 1 only."""
    if [dim for dim in source if dim] != [dim for dim in target if dim]:
        return None
    if (inserted := _extra_units(target, source)) is not None:
        return Units((), inserted, target)
    if (removed := _extra_units(source, target)) is not None:
        return Units(removed, (), target)
    removed = tuple(index for index, dim in enumerate(source) if not dim)
    return Units(removed, tuple(index for index, dim in enumerate(target) if not dim), target)


def _extra_units(longer: Arrangement, shorter: Arrangement) -> tuple[int, ...] | None:
    """The dimensions of size 1 that make the longer arrangement from the shorter one; None when it takes more."""
    rest = list(shorter)
    extra: list[int] = []
    for index, dim in enumerate(longer):
        if rest and rest[0] == dim:
            rest.pop(0)
        else:
            extra.append(index)
    return None if rest or any(longer[index] for index in extra) else tuple(extra)


def _pieces(source: Arrangement, target: Arrangement) -> Arrangement:
    """The source's dimensions cut wherever the target does not keep two axes together."""
    follows: dict[Axis, Axis] = {}
    for dim in target:
        follows.update(itertools.pairwise(dim))
    pieces: list[Axes] = []
    for dim in source:
        run: list[Axis] = []
        for axis in dim:
            if run and follows.get(run[-1]) is not axis:
                pieces.append(tuple(run))
                run = []
            run.append(axis)
        if run:
            pieces.append(tuple(run))
    return tuple(pieces)


def _broadcast(present: Arrangement, target: Arrangement, own: set[Axis]) -> list[Move]:
    """Insert the missing axes: apart, repeated, and merged into the target's dimensions."""
    whole = all(not have or have == want for have, want in zip(present, target, strict=True))
    if whole:
        return [Expand(target)]
    apart = tuple((axis,) for dim in target for axis in dim)
    ones = tuple(dim if dim[0] in own else () for dim in apart)
    return [Reshape(ones), Expand(apart), Reshape(target)]
