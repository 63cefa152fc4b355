"""Tensors as arrangements of axes, which tell where each element is.

Transpose, Reshape, Squeeze, Unsqueeze and Expand move elements without computing. To see through
any mixture of them, a value is described as a *view* of a base value. Each dimension of the value
is then a sequence of axes in row-major order, as in the notation "b s (n d)". A Reshape splits or
merges axes, a Transpose permutes dimensions, and an Expand puts an axis where there was none. Two
spellings of one layout give the same arrangement, so the matchers compare arrangements and never
operator sequences.

Sizes are symbolic polynomials. An axis is split only where the division is exact for all sizes. Two
axes are declared the same only where a contraction or an element-wise operator walks along both of
them at once. Where something cannot be proven, the view ends at that node; this is always sound.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import chain
from typing import Any, TypeVar

from fa_compiler.passes.algebra.symbolic import Dim, product


@dataclass(frozen=True, eq=False)
class Axis:
    """One index variable. Axes are compared by identity."""

    size: Dim


Axes = tuple[Axis, ...]
Arrangement = tuple[Axes, ...]
Record = TypeVar("Record")


def flat_axes(dims: Iterable[Axes]) -> Axes:
    """The axes of several dimensions, in order."""
    return tuple(chain.from_iterable(dims))


@dataclass
class KnownAxes:
    """What is known of the axes of one match: into which finer axes an axis was split, and which
    axes are the same.

    `_parts` maps an axis to the finer axes that replaced it, or to an equal axis. An axis in
    `_open` stands for several dimensions whose sizes are not proven to be equal: a size among them
    may be 1 in some run.
    """

    _parts: dict[Axis, Axes] = field(default_factory=dict)
    _open: tuple[Axis, ...] = ()

    def branch(self) -> AxisSpace:
        """A space that starts with this knowledge. This space does not learn what the branch
        learns."""
        return AxisSpace(dict(self._parts), self._open)

    def knows_no_more(self, other: KnownAxes) -> bool:
        """Does a branch know no more than the space from which it started?"""
        return len(self._parts) == len(other._parts)

    def resolve(self, axes: Iterable[Axis]) -> Axes:
        """The same axes in their finest known parts."""
        result: list[Axis] = []
        for axis in axes:
            parts = self._parts.get(axis)
            if parts is None:
                result.append(axis)
            else:
                result.extend(self.resolve(parts))
        return tuple(result)

    def resolve_all(self, dims: Iterable[Iterable[Axis]]) -> Arrangement:
        """`resolve` for every dimension."""
        return tuple(self.resolve(dim) for dim in dims)

    def settle(self, record: Record) -> Record:
        """A record whose axes are in the finest parts known here: those of its tuples, mappings and
        dataclasses. A space in it becomes this one."""
        return self._settled(record)  # type: ignore[no-any-return]

    def _settled(self, record: Any) -> Any:
        if isinstance(record, KnownAxes):
            return self
        if isinstance(record, tuple):
            return self._settled_tuple(record)
        if isinstance(record, Mapping):
            entries = {key: self._settled(value) for key, value in record.items()}
            return (
                entries
                if any(entries[key] is not value for key, value in record.items())
                else record
            )
        if not is_dataclass(record) or isinstance(record, type):
            return record
        own = {field.name: getattr(record, field.name) for field in fields(record) if field.init}
        moved = {
            name: new for name, value in own.items() if (new := self._settled(value)) is not value
        }
        return replace(record, **moved) if moved else record

    def _settled_tuple(self, record: tuple[Any, ...]) -> tuple[Any, ...]:
        """A tuple of axes in their finest parts, or another tuple part by part; the same one where
        nothing changes."""
        if isinstance(next(iter(record), None), Axis):
            parts: tuple[Any, ...] = self.resolve(record)
        else:
            parts = tuple(map(self._settled, record))
        changed = len(parts) != len(record) or any(
            a is not b for a, b in zip(parts, record, strict=True)
        )
        return parts if changed else record

    def size(self, axes: Iterable[Axis]) -> Dim:
        """The number of elements these axes run over."""
        return product(axis.size for axis in self.resolve(axes))

    def short_dims(self, dims: Arrangement, shape: Sequence[Dim] | None) -> list[Axes]:
        """The dimensions of a tensor of this shape that may have fewer elements than their axes in
        some run.

        Such a dimension folds several axes into one. In some run one of these axes may have the
        size 1 in this tensor and a larger size in another tensor. An axis that is a dimension of
        its own broadcasts in such a run. A folded axis does not, and the size of its dimension does
        not show it. For an unknown shape the result is empty.
        """
        return [
            dim
            for dim, size in zip(dims, shape or (), strict=False)
            if self._may_be_short(dim, size)
        ]

    def _may_be_short(self, dim: Axes, size: Dim) -> bool:
        if self.size(dim) == size:
            return False
        own = set(self.resolve(dim))
        parts = [set(self.resolve((axis,))) for axis in self._open]
        return any(own & part and own != part for part in parts)

    def may_broadcast(self, axes: Axes) -> bool:
        """Does an axis stand for several dimensions that may have different sizes in some run: 1
        and a larger one?"""
        own = set(self.resolve(axes))
        return any(not own.isdisjoint(self.resolve((axis,))) for axis in self._open)


@dataclass
class AxisSpace(KnownAxes):
    """The axes of a match that is being made: axes may still be split, and found to be the same."""

    def new(self, size: Dim) -> Axes:
        """The axes of a new dimension: one axis of this size, or no axis when the size is 1."""
        return () if size.const == 1 else (Axis(size),)

    def reshape(self, dims: Arrangement, target: Sequence[Dim]) -> Arrangement | None:
        """Rearrange into dimensions of the target sizes, in row-major order; None when unproven."""
        pending = [axis for dim in dims for axis in self.resolve(dim)]
        pending.reverse()
        result: list[Axes] = []
        for size in target:
            taken: list[Axis] = []
            rest = size
            while rest.const != 1:
                if not pending:
                    return None
                axis = pending.pop()
                if rest == axis.size:
                    taken.append(axis)
                    rest = Dim(1)
                elif (quotient := rest.exact_div(axis.size)) is not None:
                    taken.append(axis)
                    rest = quotient
                elif (quotient := axis.size.exact_div(rest)) is not None:
                    head, tail = self._split(axis, rest, quotient)
                    taken.append(head)
                    pending.append(tail)
                    rest = Dim(1)
                else:
                    return None
            result.append(tuple(taken))
        if pending:
            return None
        return tuple(result)

    def unify(self, one: Axes, other: Axes) -> bool:
        """Declare that two dimensions are walked together: one index runs along both. Returns
        False, and changes nothing, when their sizes cannot be matched.

        Two single axes are taken to be equal even if their sizes are different symbols. The
        operator that walks them together fails at run time unless the sizes are equal, or one of
        them is 1 and its tensor is broadcast to the other. The fused operator checks the same, as
        long as the axis is a dimension of its own (`short_dims`). `join` is for operators whose
        result may be larger than either operand.
        """
        known, open_ = dict(self._parts), self._open
        if self._walk_together(one, other):
            return True
        self._parts, self._open = known, open_
        return False

    def unify_broadcast(self, one: Axes, other: Axes) -> bool:
        """`unify` for dimensions that broadcast. Of two single axes of unknown sizes, either may be
        1 in some run. One new axis then stands for both, and its size is the broadcast of their
        sizes."""
        left, right = self.resolve(one), self.resolve(other)
        if len(left) == len(right) == 1 and left[0].size != right[0].size:
            sizes = left[0].size, right[0].size
            if not any(size.is_const for size in sizes):
                both = self.new(Dim.broadcast(*sizes))
                self._parts |= {left[0]: both, right[0]: both}
                self._open = (*self._open, *both)
                return True
        return self.unify(one, other)

    def assume_one(self, axes: Axes) -> None:
        """Declare that a dimension has the size 1, because the operator that reads it fails in
        every other run."""
        for axis in self.resolve(axes):
            self._parts[axis] = ()

    def _walk_together(self, one: Axes, other: Axes) -> bool:
        left, right = list(self.resolve(one)), list(self.resolve(other))
        if len(left) == len(right) == 1 and not (left[0].size.is_const and right[0].size.is_const):
            sizes = left[0].size, right[0].size
            if sizes[0] != sizes[1] and not all(size.never_one for size in sizes):
                self._open = (*self._open, left[0])
            self._merge(left[0], right[0])
            return True
        left.reverse()
        right.reverse()
        while left and right:
            a, b = left.pop(), right.pop()
            rest = self._match(a, b, front=True)
            if rest is None:
                return self._walk_back([*left, a], [*right, b])
            left, right = left + rest[0], right + rest[1]
        return not left and not right

    def _walk_back(self, left: list[Axis], right: list[Axis]) -> bool:
        """Match two dimensions from the back, because their first axes do not match. The last axes
        come first in these lists. The two single axes that remain in the end are taken to be equal,
        as in `unify`. Neither dimension may be 1 in any run, because a dimension of 1 could be
        broadcast to the other one."""
        if not (self.size(left).never_one and self.size(right).never_one):
            return False
        while len(left) > 1 or len(right) > 1:
            rest = self._match(left.pop(0), right.pop(0), front=False)
            if rest is None:
                return False
            left, right = rest[0] + left, rest[1] + right
            if not left or not right:
                return False
        if left[0].size.is_const and right[0].size.is_const:
            return False
        self._merge(left[0], right[0])
        return True

    def _match(self, a: Axis, b: Axis, *, front: bool) -> tuple[list[Axis], list[Axis]] | None:
        """Match two axes, from the front or from the back, as far as the smaller one goes. Returns
        what is left of each axis, or None where neither size divides the other."""
        if a.size == b.size:
            self._merge(a, b)
            return [], []
        if (quotient := a.size.exact_div(b.size)) is not None:
            rest, part = self._cut(a, quotient, b.size, front)
            self._merge(part, b)
            return [rest], []
        if (quotient := b.size.exact_div(a.size)) is not None:
            rest, part = self._cut(b, quotient, a.size, front)
            self._merge(a, part)
            return [], [rest]
        return None

    def _cut(self, axis: Axis, rest: Dim, part: Dim, front: bool) -> tuple[Axis, Axis]:
        """Split an axis. Returns its rest, and the part at its front or back."""
        if front:
            head, tail = self._split(axis, part, rest)
            return tail, head
        return self._split(axis, rest, part)

    def _split(self, axis: Axis, head: Dim, tail: Dim) -> tuple[Axis, Axis]:
        parts = (Axis(head), Axis(tail))
        self._parts[axis] = parts
        return parts

    def _merge(self, one: Axis, other: Axis) -> None:
        """Make one axis stand for both; the one with the constant size survives."""
        if one is other:
            return
        if one.size.is_const:
            self._parts[other] = (one,)
        else:
            self._parts[one] = (other,)
