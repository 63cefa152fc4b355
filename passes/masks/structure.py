"""Structural masks: the part of a mask that is a band of diagonals or packed sequences, and the
rest, which is padding.

    i, j = torch.arange(rows)[:, None], torch.arange(keys)
    kept = (j <= i) & (j > i - window)                                        # a band
    kept = kept & attention_mask[:, None, None, :]                            # padding
    kept = kept & (segment[:, None, :, None] == segment[:, None, None, :])    # packed sequences
    scores = torch.where(kept, scores, -inf)

    kept := the positions at which every term leaves the score as it is: an Add holds 0, a Select
            keeps. The mask excludes all others

    accepted    a conjunction of these conditions, however the graph computes them (positions.py):
                1 comparisons that bound j - i, the distance from row to key, from above also as one
                  of two alternatives, of which the other one is that the key is among the first
                  ones (a prefix)
                2 boolean tensors that do not run along the rows, or an addend of any spelling that
                  is proven to be the same for all rows (padding); with `cuts` also the first
                  columns of a longer tensor, such as an attention mask for more tokens than there
                  are, of which a Slice takes as many as there are keys
                3 equal labels of packed sequences (packing.py)
    emitted     the Band (band.py), the boolean tensors and the labels. Labels are emitted only with
                a band in which every token attends to itself. j - i is the same within a sequence
                as in the whole, so the band holds for both
    refused     everything else: the mask then stays the tensor it was

A mask whose dimensions are merged, as those of heads that are folded into the batch, is read by an
index for each axis.

This is sound because a formula is used only where it holds at every position in every run. The row
and column sizes of the mask must be proven to be those of the scores, or its columns must be cut
from a constant that could not be added to longer scores. A bias beside the mask may help to prove
it (`_sizes_beside`), and a Reshape behind the mask may help to prove the number of columns
(reshapes.py). Padding alone may have batch, head and column sizes that are not proven, because the
operator compares them with its own. The number of its rows need not be proven either, if it never
makes several rows of a single one (`_checked_padding`).
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, Axes, AxisSpace, flat_axes
from fa_compiler.passes.algebra.formula import (
    TRUE,
    Affine,
    AtLeastZero,
    BooleanTensor,
    ElementComparison,
    Formula,
    Index,
    Some,
    conjuncts,
    negation,
)
from fa_compiler.passes.algebra.known import if_known
from fa_compiler.passes.algebra.symbolic import Atom, Dim, cap_of, product, simplify_given
from fa_compiler.passes.answer.decline import label
from fa_compiler.passes.answer.options import SAME_SIZES
from fa_compiler.passes.answer.report import Missed, MissedCode
from fa_compiler.passes.ir.nodes import all_known, certain, elsewhere, instances, sole, without_none
from fa_compiler.passes.layout.views import Viewer
from fa_compiler.passes.masks.band import Band, SparseMode, mode_of
from fa_compiler.passes.masks.narrow import is_constant_along
from fa_compiler.passes.masks.packing import ContiguousLabels, Packing
from fa_compiler.passes.masks.reshapes import sizes_of_reshapes
from fa_compiler.passes.masks.score_ops import Add, AlignedTensor, MaskTerm
from fa_compiler.passes.ops.context import Shape
from fa_compiler.passes.values.positions import Positions

ONE_NAME = "export again with one name for sizes that are equal in every run, or with a fixed size"
"""What the user can do where a mask's sizes are not proven to be those of the scores."""
FIXED_MASK = (
    "compute the mask in the model, or make it a constant, if it is the same band in every run"
)
"""What the user can do where a mask is an input of the model."""


@dataclass(frozen=True)
class Grid:
    """The row and column axes of the scores, and the sizes that they have before a mask is aligned
    with them.

    Aligning a mask may replace the size of a score axis by that of the mask. The two differ in runs
    in which the axis of the scores is 1: the mask then enlarges the scores, which a band cannot
    express.
    """

    q_seq: Axes
    kv_seq: Axes
    sizes: tuple[Dim, Dim]

    @staticmethod
    def of(q_seq: Axes, kv_seq: Axes, space: AxisSpace) -> Grid:
        """The grid with the sizes that the axes have now."""
        return Grid(q_seq, kv_seq, (space.size(q_seq), space.size(kv_seq)))


@dataclass(frozen=True)
class Padding:
    """Keys that are excluded where `given` holds. `dims` are the score axes of its dimensions, and
    `never_enlarges` is that of the mask's term (`AlignedTensor`)."""

    given: BooleanTensor
    dims: Arrangement
    never_enlarges: bool = True


@dataclass(frozen=True)
class Structure:
    """A mask as the sparse_mode of a band and padding, or as packed sequences if there is a
    `packing`. `never_empty` says that every row keeps a key in every run that has keys. `assumed`
    is what the user vouched for."""

    mode: SparseMode | None
    padding: tuple[Padding, ...]
    never_empty: bool
    packing: Packing | None = None
    assumed: tuple[str, ...] = ()

    reason: ClassVar[str] = ""
    lacks_one_name: ClassVar[bool] = False

    @property
    def padding_alone(self) -> tuple[Padding, ...]:
        """The padding, if the mask is nothing else."""
        return self.padding if self.mode is None and self.packing is None else ()

    def missed(self, node: ir.Node) -> None:
        """No line of the report: there is a structure."""


@dataclass(frozen=True)
class NoStructure:
    """Why a mask has no structure, and what the user can do. `node` is the term's node, None where
    no single term is the reason. Whoever asks for a part of the structure gets none."""

    reason: str
    node: ir.Node | None = None
    hint: str | None = None
    mode: ClassVar[None] = None
    packing: ClassVar[None] = None
    padding: ClassVar[tuple[()]] = ()
    padding_alone: ClassVar[tuple[()]] = ()
    never_empty: ClassVar[bool] = False
    assumed: ClassVar[tuple[()]] = ()

    @property
    def lacks_one_name(self) -> bool:
        """Would one name for sizes that are equal help?"""
        return self.hint == ONE_NAME

    def missed(self, node: ir.Node) -> Missed:
        """The line of the report. The culprit is `node` where no single term is the reason."""
        return Missed(MissedCode.DENSE_MASK, self.reason, label(self.node or node), self.hint)


class _Unstructured(Exception):
    """Raised where a term has no structure, and caught by `structure`."""

    def __init__(self, reason: str, hint: str | None = None) -> None:
        super().__init__(reason)
        self.reason, self.hint = reason, hint


def structure(
    terms: Sequence[MaskTerm],
    grid: Grid,
    viewer: Viewer,
    contiguity: ContiguousLabels | None = None,
    same_sizes: bool = False,
    beside: Sequence[Add[AlignedTensor]] = (),
    cuts: bool = False,
) -> Structure | NoStructure:
    """The structure of the mask that these terms make together, or why the operator cannot express
    it.

    Without `contiguity`, packed sequences are not looked for. With `same_sizes` the user vouches
    for it that masks are as large as the scores. The operator gets the addends `beside` the mask as
    its bias. With `cuts`, padding may be the first elements of a longer tensor.
    """
    if not terms:
        return NoStructure("nothing is masked")
    always_known = _sizes_beside(beside, grid, viewer)
    known = {**sizes_of_reshapes([term.node for term in terms], viewer.info), **always_known}
    reader = _TermReader(viewer, grid, contiguity, known, always_known, cuts)
    parts: list[_Part] = []
    assumed: set[str] = set()
    for term in terms:
        try:
            read, words = reader.read_term(term, same_sizes)
        except _Unstructured as cause:
            return NoStructure(cause.reason, term.node, cause.hint)
        parts.extend(read)
        assumed.update(words)
    packings = {*instances(parts, Packing)}
    padding = tuple(instances(parts, Padding))
    band = _intersection(instances(parts, Band))
    if packings:
        return _packed(packings, padding, band, reader.sizes, tuple(assumed))
    return _banded(padding, band, reader.sizes, tuple(assumed))


def _packed(
    packings: Collection[Packing],
    padding: tuple[Padding, ...],
    band: Band | None,
    sizes: tuple[Dim, Dim],
    assumed: tuple[str, ...],
) -> Structure | NoStructure:
    """The structure of one packing, alone or with a band in which each token attends to itself."""
    refused = NoStructure("packed sequences stand beside another mask")
    if len(packings) > 1 or padding or band is None or not band.has_diagonal:
        return refused
    mode = mode_of(band, *sizes)
    if mode is None and not band.is_unlimited:
        return refused
    return Structure(mode, (), True, next(iter(packings)), assumed=assumed)


def _banded(
    padding: tuple[Padding, ...],
    band: Band | None,
    sizes: tuple[Dim, Dim],
    assumed: tuple[str, ...],
) -> Structure | NoStructure:
    """The structure of a band, or of none, with padding."""
    if band is None:
        return NoStructure("which of its bands is the narrowest depends on sizes of the run")
    mode = mode_of(band, *sizes)
    if mode is None and not band.is_unlimited:
        return NoStructure(f"no sparse_mode is the band {band.described(*sizes)} in every run")
    if band.prefix and padding:
        return NoStructure("a prefix that all rows see stands beside padding")
    return Structure(mode, padding, not padding and band.never_empty(*sizes), assumed=assumed)


def _sizes_beside(
    beside: Sequence[Add[AlignedTensor]], grid: Grid, viewer: Viewer
) -> Mapping[Atom, Dim]:
    """The sizes in the runs that the operator does not refuse, by the biases beside the mask.

    The operator takes a bias of 1 row or as many rows as the scores have, and so for keys. So where
    a bias has a known number of rows other than 1, the scores have the same number. Scores plus a
    bias of another name are as large as the scores. A bias that is the same for all rows tells
    nothing of their number, because the operator gets one row of it.
    """
    sizes: dict[Atom, Dim] = {}
    for axes, size in zip((grid.q_seq, grid.kv_seq), grid.sizes, strict=True):
        total = size
        for own in _other_sizes_along(axes, size, beside, grid, viewer):
            if own.is_const and size.single_atom is not None:
                sizes[size.single_atom] = own
                continue
            total = Dim.broadcast(total, own)
            if total.single_atom is not None and total != size:
                sizes[total.single_atom] = size
    return {atom: size.substitute(sizes) for atom, size in sizes.items()}


def _other_sizes_along(
    axes: Axes, size: Dim, beside: Sequence[Add[AlignedTensor]], grid: Grid, viewer: Viewer
) -> Iterator[Dim]:
    """The sizes, other than 1 and that of the scores, which biases have along the rows or the
    keys."""
    wanted = viewer.space.resolve(axes)
    for term in beside:
        shape = viewer.info.sizes(term.operand.value)
        for place, (own, dim) in enumerate(zip(shape, term.operand.dims, strict=False)):
            is_along = bool(dim) and viewer.space.resolve(dim) == wanted
            if not is_along or own in (1, size):
                continue
            if axes != grid.q_seq or not is_constant_along(term.operand.value, place, viewer.info):
                yield own


@dataclass(frozen=True)
class _Placed:
    """Where the elements of a term's mask are: the element at `index` for each index of the
    dimensions in `shape`. `dims` are the score axes of these dimensions; `row` and `column` are the
    dimensions of rows and keys."""

    shape: Shape
    index: Index
    dims: Arrangement
    row: int | None
    column: int | None

    def size(self, dimension: int | None, whole: Dim) -> Dim:
        """The size of the rows or the keys; the whole one where the mask does not run along
        them."""
        return whole if dimension is None else self.shape[dimension]

    @property
    def ends(self) -> tuple[Affine, Affine] | None:
        """The index of the row and that of the key; None where the mask does not run along both."""
        if self.row is None or self.column is None:
            return None
        rank = len(self.shape)
        return Affine.index(self.row, rank), Affine.index(self.column, rank)


_Part = Band | Padding | Packing
"""What a term may be, alone or with others."""


def _steps(affine: Affine) -> dict[int, int]:
    """The dimensions that a linear number depends on, each with its step."""
    return {k: step for k, step in enumerate(affine.steps) if step}


@dataclass(frozen=True)
class _TermReader:
    """Reads the structure of one term."""

    viewer: Viewer
    grid: Grid
    contiguity: ContiguousLabels | None
    known: Mapping[Atom, Dim]
    """What sizes are in the runs in which the masked scores have elements."""
    always_known: Mapping[Atom, Dim]
    """What sizes are in all runs that the operator does not refuse. The result has rows also in a
    run without keys, in which the scores have no elements."""
    cuts: bool

    @property
    def sizes(self) -> tuple[Dim, Dim]:
        """The numbers of rows and keys of the scores."""
        rows, columns = (size.substitute(self.known) for size in self.grid.sizes)
        return rows, columns

    @property
    def _rows(self) -> Dim:
        """The number of rows of the scores, also in a run without keys."""
        return self.grid.sizes[0].substitute(self.always_known)

    def read_term(self, term: MaskTerm, same_sizes: bool) -> tuple[list[_Part], tuple[str, ...]]:
        """The parts of a term, and what the user has to vouch for. With `same_sizes` it may be that
        masks are as large as the scores. Raises _Unstructured."""
        try:
            return self.read_if_as_large(term), ()
        except _Unstructured:
            if not same_sizes:
                raise
            return self.read_as_large(term), (SAME_SIZES,)

    def read_if_as_large(self, term: MaskTerm) -> list[_Part]:
        """The parts of the term's mask, if it is proven to have as many rows and columns as the
        scores. Raises _Unstructured."""
        other_sizes = self._other_sizes(term)
        if other_sizes is None:
            return self.read(term)
        if (padding := self._checked_padding(term)) is None:
            raise other_sizes
        return padding

    def read_as_large(self, term: MaskTerm) -> list[_Part]:
        """The parts of the term's mask, which the user says to be as large as the scores. Raises
        _Unstructured."""
        place, known = self._placed(term), dict(self.always_known)
        for dimension, size in zip(
            (place.row, place.column), (self._rows, self.sizes[1]), strict=True
        ):
            own = place.size(dimension, size)
            atoms = [part.single_atom for part in (own, *own.broadcast_parts) if part != size]
            known.update((atom, size) for atom in without_none(atoms))
        placed = replace(term.operand, never_enlarges=True)
        return replace(self, known={**self.known, **known}, always_known=known).read(
            replace(term, operand=placed)
        )

    def read(self, term: MaskTerm) -> list[_Part]:
        """The parts of the term's mask, which has as many rows and columns as the scores. Raises
        _Unstructured."""
        place = self._placed(term)
        reason = _Unstructured("")
        for placed in self._ways_to_index(place):
            try:
                return self._read(term, placed, cuts=False)
            except _Unstructured as failure:
                reason = failure
        if self.cuts:
            with contextlib.suppress(_Unstructured):
                return self._read(term, place, cuts=True)
        raise reason

    def _ways_to_index(self, place: _Placed) -> Iterator[_Placed]:
        """The ways to index the elements of a mask. The last one says why there is no structure."""
        yield place
        if (by_axis := self._indexed_by_axis(place)) is not None:
            yield by_axis

    def _read(self, term: MaskTerm, place: _Placed, cuts: bool) -> list[_Part]:
        name = f"{term.operand.value.name!r}"
        positions = self._positions(place.shape, cuts)
        formula = kept(term, positions, place.index) or self._same_for_all_rows(
            term, positions, place
        )
        if formula is None:
            raise _Unstructured(
                f"where {name} masks is not known from positions, boolean inputs or a constant"
            )
        conditions = conjuncts(formula)
        comparisons = instances(conditions, ElementComparison)
        labels = [comparison for comparison in comparisons if comparison.relation == "Equal"]
        ordered = [
            part
            for part in comparisons
            if any(self._is_order(part, same, positions, place) for same in labels)
        ]
        result: list[_Part] = []
        for condition in conditions:
            parts = (
                [Band(None, Dim(0))]
                if condition in ordered
                else self._parts_of(condition, place, term)
            )
            if parts is None:
                raise _unknown_part(condition, name)
            result.extend(parts)
        if term.operand.never_enlarges or self._run_along_all(result, place):
            return result
        raise _Unstructured(f"{name} may have more batches or heads than the scores", ONE_NAME)

    def _same_for_all_rows(
        self, term: MaskTerm, positions: Positions, place: _Placed
    ) -> BooleanTensor | None:
        """Where an addend that is the same for all rows is 0; None for other terms."""
        if not isinstance(term, Add):
            return None
        given = positions.whole(term.operand.value, place.index)
        if given is None or not self._is_alike(given, place):
            return None
        return replace(given, when=False)

    def _is_alike(self, given: BooleanTensor, place: _Placed) -> bool:
        """Is a tensor the same for all rows? It may run along them: the rewriter reads one row of
        it."""
        if place.row is None or place.row not in given.axes:
            return True
        return is_constant_along(given.value, given.axes.index(place.row), self.viewer.info)

    def _run_along_all(self, parts: list[_Part], place: _Placed) -> bool:
        """Do the padding or the labels run along all dimensions in which the mask may enlarge the
        scores?"""
        along = {axis for part in instances(parts, Padding) for axis in part.given.axes}
        labelled = {axis for part in instances(parts, Packing) for axis in flat_axes(part.dims)}
        known = {place.row, place.column, *along}
        enlarging = [k for k, size in enumerate(place.shape) if size.const != 1 and k not in known]
        return all(place.dims[k] and set(place.dims[k]) <= labelled for k in enlarging)

    def _placed(self, term: MaskTerm) -> _Placed:
        """The shape of the term's mask, and which of its dimensions are its rows and columns.
        Raises _Unstructured."""
        shape = self.viewer.info.shape(term.operand.value)
        if shape is None:
            raise _Unstructured(f"the shape of {term.operand.value.name!r} is unknown")
        dims, columns = term.operand.dims, self.viewer.space.resolve(self.grid.kv_seq)
        known = [
            self.known if self.viewer.space.resolve(dim) == columns else self.always_known
            for dim in dims
        ]
        shape = tuple(size.substitute(sizes) for size, sizes in zip(shape, known, strict=True))
        return self._in(shape, self._positions(shape).identity_index, dims)

    def _positions(self, shape: Shape, cuts: bool = False) -> Positions:
        """The reader of masks of this shape."""
        facts = self.viewer.facts
        return (
            Positions(facts.info, shape, self.known, cuts)
            if self.known or cuts
            else facts.positions(shape)
        )

    def _in(self, shape: Shape, index: Index, dims: Arrangement) -> _Placed:
        resolve = self.viewer.space.resolve
        places = {resolve(dim): k for k, dim in enumerate(dims) if dim}
        return _Placed(
            shape,
            index,
            dims,
            places.get(resolve(self.grid.q_seq)),
            places.get(resolve(self.grid.kv_seq)),
        )

    def _indexed_by_axis(self, place: _Placed) -> _Placed | None:
        """The same place with an index for each axis of a merged dimension, such as heads that are
        folded into the batch; None where no dimension is merged so that its axes can be told
        apart."""
        axes = [self._axes_in(place, k) for k in range(len(place.shape))]
        if all(len(dimension) == 1 for dimension in axes):
            return None
        sizes, dims = zip(*itertools.chain.from_iterable(axes), strict=True)
        own = iter(self._positions(sizes).identity_index)
        index = tuple(
            _merged_index([(size, next(own)) for size, _ in dimension]) for dimension in axes
        )
        return self._in(sizes, index, dims)

    def _axes_in(self, place: _Placed, k: int) -> list[tuple[Dim, Axes]]:
        """The axes that are merged in a dimension, each with its size: the sizes of all but the
        first have to be numbers, and the dimension as large as all of them. Otherwise the dimension
        itself, with its size."""
        size, dim = place.shape[k], place.dims[k]
        axes = () if k in (place.row, place.column) else self.viewer.space.resolve(dim)
        merged: list[tuple[Dim, Axes]] = [(axis.size, (axis,)) for axis in axes]
        told_apart = product(axis.size for axis in axes) == size and all(
            axis.size.is_const for axis in axes[1:]
        )
        return merged if len(merged) > 1 and told_apart else [(size, dim)]

    def _other_sizes(self, term: MaskTerm) -> _Unstructured | None:
        """Why the mask may have other numbers of rows and columns than the scores in a run that
        succeeds; None if it has not. Raises _Unstructured."""
        place, rows, columns = self._placed(term), self._rows, self.sizes[1]
        own_rows, own_columns = place.size(place.row, rows), place.size(place.column, columns)
        name = f"{term.operand.value.name!r}"
        known: list[Dim] = []
        if own_columns != columns:
            cap = cap_of(own_columns, columns)
            if cap is None:
                reason = f"the {own_columns} columns of {name} are not proven to be the {columns} keys of the scores"
                return _Unstructured(reason, ONE_NAME)
            known.append(Dim(cap) - columns)
        if place.row is not None and simplify_given(own_rows, known) != rows:
            reason = (
                f"the {own_rows} rows of {name} are not proven to be the {rows} rows of the scores"
            )
            return _Unstructured(reason, ONE_NAME)
        return None

    def _checked_padding(self, term: MaskTerm) -> list[_Part] | None:
        """The parts of a term that is nothing but padding, whose sizes either are those of the
        scores or make the operator fail; None for other terms.

        The operator takes a mask of one column, which it repeats as the model does, or of as many
        columns as keys. It gets no rows, so these must not add any to the scores. The padding is
        not cut: it might be one column that is repeated. Raises _Unstructured.
        """
        place = self._placed(term)
        if not _adds_no_rows(place.size(place.row, self._rows), self._rows):
            return None
        try:
            parts = replace(self, cuts=False).read(term)
        except _Unstructured:
            return None
        return parts if len(instances(parts, Padding)) == len(parts) else None

    def _parts_of(
        self, condition: Formula, place: _Placed, term: MaskTerm
    ) -> Sequence[_Part] | None:
        """What a condition of the mask is; None where it is none of the parts."""
        if condition == TRUE:
            return ()
        if isinstance(condition, AtLeastZero):  # 1
            return self._band(condition.affine, place)
        part: _Part | None = None
        if isinstance(condition, ElementComparison):  # 3
            part = self._packing(condition, place, term)
        elif isinstance(condition, Some):  # 1
            part = self._band_with_prefix(condition, place)
        if part is None and condition.origin is not None:  # 2
            part = self._padding(condition.origin, place, term)
        return None if part is None else (part,)

    def _band(self, affine: Affine, place: _Placed) -> tuple[Band, ...] | None:
        """The band of the positions at which a number that is linear in them is at least 0; empty
        where that is so everywhere, and None where this is no band."""
        if affine.least(place.shape).is_at_least(0):
            return ()
        steps = _steps(affine)
        if steps == {place.row: 1, place.column: -1}:
            return (Band(None, affine.offset.substitute(self.known)),)
        if steps == {place.row: -1, place.column: 1}:
            return (Band(-affine.offset.substitute(self.known), None),)
        return None

    def _padding(self, given: BooleanTensor, place: _Placed, term: MaskTerm) -> Padding | None:
        """The padding that a boolean tensor is, if it is the same for all rows."""
        is_cut_elsewhere = given.cut is not None and given.axes[given.cut] != place.column
        if is_cut_elsewhere or not self._is_alike(given, place):
            return None
        return Padding(
            replace(given, when=not given.when),
            given.arranged(place.dims),
            term.operand.never_enlarges,
        )

    def _band_with_prefix(self, part: Some, place: _Placed) -> Band | None:
        """The band with a prefix that two alternatives make: an upper bound on j - i, and one on j
        alone."""
        limits = [inner.affine for inner in instances(part.parts, AtLeastZero)]
        if len(part.parts) != 2 or len(limits) != 2:
            return None
        for limit, keys in (limits, limits[::-1]):
            prefix, bands = _first_keys(keys, place), self._band(limit, place)
            if prefix and bands and bands[0].lower is None:
                return replace(bands[0], prefix=prefix)
        return None

    def _token_axis(self, part: ElementComparison, place: _Placed) -> int | None:
        """The dimension of a tensor of labels in which a comparison takes the element of the row
        and that of the key; None for other comparisons."""
        ends, differing = place.ends, part.differing
        if self.contiguity is None or ends is None or len(differing) != 1:
            return None
        (axis,) = differing
        if {part.one[axis], part.other[axis]} != set(ends):
            return None
        return axis

    def _packing(self, part: ElementComparison, place: _Placed, term: MaskTerm) -> Packing | None:
        """The packing that a comparison of labels at the row and at the key expresses. There must
        be as many labels as rows and as columns."""
        own, axis = self.viewer.info.shape(part.value), self._token_axis(part, place)
        if own is None or axis is None or not part.says("Equal"):
            return None
        tokens = {
            own[axis],
            *(size for k, size in enumerate(place.shape) if k in (place.row, place.column)),
        }
        if len(tokens) > 1 or self.grid.sizes[0] != self.grid.sizes[1]:
            return None
        along = (
            self.grid.q_seq if k == axis else self._label_axes(part, k, own[k], place)
            for k in range(len(own))
        )
        dims, contiguity = all_known(along), certain(self.contiguity)
        if dims is None:
            return None
        return Packing(
            part.value, tuple(dims), contiguity.holds(part.value, axis), term.operand.never_enlarges
        )

    def _label_axes(
        self, part: ElementComparison, dimension: int, size: Dim, place: _Placed
    ) -> Axes | None:
        """The axes along which a dimension of the labels other than that of the tokens runs; None
        where unknown."""
        if size.const == 1:
            return ()
        others = elsewhere(range(len(place.shape)), (place.row, place.column))
        whole = (m for m in others if part.one[dimension] == Affine.index(m, len(place.shape)))
        return next((place.dims[m] for m in whole if size == place.shape[m]), None)

    def _is_order(
        self,
        part: ElementComparison,
        labels: ElementComparison,
        positions: Positions,
        place: _Placed,
    ) -> bool:
        """Does this part say that the key's number is at most the row's, for numbers that go up by
        one from token to token of a sequence?"""
        axis = self._token_axis(labels, place)
        if axis is None or not part.says("LessOrEqual") or not labels.when:
            return False
        numbers = certain(self.contiguity).position_source(labels.value, axis)
        if numbers is None:
            return False
        elements = {labels.one[axis]: labels.one, labels.other[axis]: labels.other}
        query, key = (elements[end] for end in certain(place.ends))
        compared = [
            dict(positions.origins(part.value, index)).get(numbers)
            for index in (part.one, part.other)
        ]
        return compared == [key, query]


def _merged_index(axes: Sequence[tuple[Dim, Affine]]) -> Affine:
    """The index in a dimension that merges axes, by the size of each axis and the index along
    it."""
    (_, total), *inner = axes
    for size, index in inner:
        total = total.times(size.const or 1) + index
    return total


def _first_keys(affine: Affine, place: _Placed) -> int:
    """The number of first keys at which a number that is linear in the positions is at least 0, in
    all rows; 0 where it is no such limit, or not known."""
    last = affine.offset.const if _steps(affine) == {place.column: -1} else None
    return 0 if last is None else max(last + 1, 0)


def _adds_no_rows(own: Dim, rows: Dim) -> bool:
    """Do scores of so many rows have as many after a mask with its own number of rows is added, in
    every run that succeeds?

    Several rows stay as many, because the mask has as many or one. One row does if the mask has one
    row then, too. If the mask then had a negative number of rows, there is no such run.
    """
    if own == rows or rows.const not in (None, 1):
        return True
    beside_one_row = if_known(lambda atom: own.evaluate({atom.name: 1}), rows.single_atom)
    return beside_one_row is not None and (beside_one_row == 1 or beside_one_row < 0)


def _unknown_part(part: Formula, name: str) -> _Unstructured:
    """Why a part of a mask's formula is no band, padding or packing."""
    if part.origin is None:
        return _Unstructured(f"{name} compares positions in a way that is no band")
    tensor = part.origin.value
    if tensor.const_value is not None:
        return _Unstructured(f"the constant {tensor.name!r} is no band, no prefix and no padding")
    if tensor.producer() is None:
        return _Unstructured(f"the input {tensor.name!r} may mask any keys of any row", FIXED_MASK)
    return _Unstructured(f"{tensor.name!r} masks by row and key, and not in a band")


def kept(term: MaskTerm, positions: Positions, index: Index | None = None) -> Formula | None:
    """Where the term leaves the scores as they are, at this index of its tensor or at its own; None
    when that is unknown."""
    if isinstance(term, Add):
        return if_known(negation, positions.nonzero(term.operand.value, index))
    condition = positions.truth(term.operand.value, index or positions.identity_index)
    if condition is None or term.keep:
        return condition
    return negation(condition)


def _intersection(bands: Sequence[Band]) -> Band | None:
    """The band that all bands have in common; None when it is unknown which of their bounds are the
    tightest. A prefix is known only of one band, which may occur several times."""
    if any(band.prefix for band in bands):
        return sole(set(bands))
    lower = without_none(band.lower for band in bands)
    upper = without_none(if_known(operator.neg, band.upper) for band in bands)
    above, below = _largest(lower), _largest(upper)
    if (lower and above is None) or (upper and below is None):
        return None
    return Band(above, if_known(operator.neg, below))


def _largest(bounds: Sequence[Dim]) -> Dim | None:
    """The bound that is proven to be at least every other one; None where there is none."""
    return next(
        (one for one in bounds if all((one - other).is_at_least(0) for other in bounds)), None
    )
