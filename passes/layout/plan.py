"""Plans that turn one arrangement of axes into another with the fewest Reshapes, Transposes and
Expands.

A plan first puts the axes that the value has into the target's order. Then it broadcasts the value
along the axes that it lacks. Axes that stay neighbours are moved together: "b (n d)" to "b n d" is
one Reshape, and "b s n d" to "b n s d" is one Transpose.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fa_compiler.passes.algebra.axes import Arrangement, Axes, Axis, flat_axes

COPY_COST = 10
"""The cost of a Transpose or Expand, which moves every element. A Reshape only changes the shape
and costs 1."""

LAYOUTS: dict[str, Callable[[Axes, Axes, Axes, Axes], Arrangement]] = {
    "BNSD": lambda b, n, s, d: (b, n, s, d),
    "BSND": lambda b, n, s, d: (b, s, n, d),
    "BSH": lambda b, n, s, d: (b, s, n + d),
    "SBH": lambda b, n, s, d: (s, b, n + d),
}
"""The operator's layouts: the dimensions made of the batch, head, sequence and head size axes."""
PACKED = "TND"
"""The layout of packed sequences: the tokens of all batches in one dimension."""


def arrangement(layout: str, batch: Axes, heads: Axes, seq: Axes, head_dim: Axes) -> Arrangement:
    """The dimensions of a tensor in a layout."""
    return (
        (batch + seq, heads, head_dim)
        if layout == PACKED
        else LAYOUTS[layout](batch, heads, seq, head_dim)
    )


@dataclass(frozen=True)
class Reshape:
    """Give the value these dimensions. The order of its elements stays."""

    dims: Arrangement


@dataclass(frozen=True)
class SqueezeUnsqueeze:
    """Remove and insert dimensions of size 1. Unlike a Reshape, this needs no sizes of the other
    dimensions."""

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


Move = Reshape | SqueezeUnsqueeze | Transpose | Expand


def plan_moves(source: Arrangement, target: Arrangement) -> tuple[Move, ...] | None:
    """The plan from one arrangement of finest axes to another. None when an axis would have to be
    dropped, or when the target has an axis twice, as in an outer product of a batch with itself."""
    own = {*flat_axes(source)}
    wanted = flat_axes(target)
    if not own <= set(wanted) or len(set(wanted)) < len(wanted):
        return None
    present = tuple(tuple(axis for axis in dim if axis in own) for dim in target)
    plan = list(_permute(source, present))
    if present != target:
        plan.extend(_broadcast(present, target, own))
    return tuple(plan)


def cost(plan: Sequence[Move]) -> int:
    """The work of a plan in arbitrary units."""
    return sum(1 if isinstance(move, Reshape | SqueezeUnsqueeze) else COPY_COST for move in plan)


def _permute(source: Arrangement, target: Arrangement) -> list[Move]:
    flat = flat_axes(target)
    if flat_axes(source) == flat:
        return _reshape(source, target)
    pieces = _pieces(source, target)
    place = {piece[0]: index for index, piece in enumerate(pieces)}
    perm = tuple(place[axis] for axis in flat if axis in place)
    ordered = tuple(pieces[index] for index in perm)
    return [*_reshape(source, pieces), Transpose(perm, ordered), *_reshape(ordered, target)]


def _reshape(source: Arrangement, target: Arrangement) -> list[Move]:
    """The move between two arrangements of the same axes in the same order; none where they are
    equal."""
    if source == target:
        return []
    return [_units(source, target) or Reshape(target)]


def _units(source: Arrangement, target: Arrangement) -> SqueezeUnsqueeze | None:
    """The move between two arrangements that differ only in dimensions of size 1; None for other
    arrangements."""
    if [dim for dim in source if dim] != [dim for dim in target if dim]:
        return None
    if (inserted := _extra_units(target, source)) is not None:
        return SqueezeUnsqueeze((), inserted, target)
    if (removed := _extra_units(source, target)) is not None:
        return SqueezeUnsqueeze(removed, (), target)
    removed = tuple(index for index, dim in enumerate(source) if not dim)
    return SqueezeUnsqueeze(
        removed, tuple(index for index, dim in enumerate(target) if not dim), target
    )


def _extra_units(longer: Arrangement, shorter: Arrangement) -> tuple[int, ...] | None:
    """The places of the dimensions of size 1 that the longer arrangement has and the shorter one
    lacks. None when the arrangements differ in more than that."""
    rest = list(shorter)
    extra: list[int] = []
    for index, dim in enumerate(longer):
        if rest and rest[0] == dim:
            rest.pop(0)
        else:
            extra.append(index)
    if rest or any(longer[index] for index in extra):
        return None
    return tuple(extra)


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
    """The moves that add the missing axes. A single Expand is enough where each dimension has all
    of its axes or none. Otherwise a Reshape gives each axis a dimension of its own, an Expand
    repeats the value along the missing axes, and a second Reshape merges the axes into the target's
    dimensions."""
    whole = all(not have or have == want for have, want in zip(present, target, strict=True))
    if whole:
        return [Expand(target)]
    separate = tuple((axis,) for dim in target for axis in dim)
    ones = tuple(dim if dim[0] in own else () for dim in separate)
    return [Reshape(ones), Expand(separate), Reshape(target)]
