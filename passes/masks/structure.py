"""Structural masks: the part of a mask that is a band of diagonals or packed sequences, and the rest, which is padding.

    kept := the positions at which every term leaves the score as it is: an Add holds 0, a Select keeps. The mask
            excludes all others

    accepted    a conjunction of these conditions, however the graph computes them (positions.py):
                1 comparisons that bound j - i, the distance from row to key, from above also as one of two
                  alternatives, of which the other one is that the key is among the first ones (a prefix)
                2 boolean tensors that do not run along the rows, or an addend of any spelling that is proven to be the
                  same for all rows (padding); with `cuts` also the first columns of a longer tensor, such as an
                  attention mask for more tokens than there are, of which a Slice takes as many as there are keys
                3 equal labels of packed sequences (packing.py)
    emitted     the Band (band.py), the boolean tensors and the labels. Labels are emitted only with a band in which
                every token attends to itself. j - i is the same within a sequence as in the whole, so the band holds
                for both
    refused     everything else: the mask then stays the tensor it was

A mask whose dimensions are merged, as those of heads that are folded into the batch, is read by an index for each axis.

This is sound because a formula is used only where it holds at every position in every run. The row and column sizes of
the mask must be proven to be those of the scores, or its columns must be cut from a constant that could not be added to
longer scores. A bias beside the mask may help to prove it (`_sizes_beside`), and a Reshape behind the mask may help to
prove the number of columns (reshapes.py). Padding alone may have batch, head and column sizes that are not proven,
because the operator compares them with its own. The number of its rows need not be proven either, if it never makes
several rows of a single one (`_checked_padding`).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, Axes, AxisSpace
from fa_compiler.passes.algebra.formula import (
    TRUE,
    Affine,
    All,
    AtLeastZero,
    BooleanLiteral,
    BooleanTensor,
    ElementComparison,
    Formula,
    Index,
    Some,
    negation,
)
from fa_compiler.passes.algebra.symbolic import Atom, Dim, cap_of, product, simplify_given
from fa_compiler.passes.answer.decline import label
from fa_compiler.passes.answer.options import SAME_SIZES
from fa_compiler.passes.answer.report import Missed, MissedCode
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
FIXED_MASK = "compute the mask in the model, or make it a constant, if it is the same band in every run"
"""What the user can do where a mask is an input of the model."""


@dataclass(frozen=True)
class Grid:
    """The row and column axes of the scores, and the sizes that they have before a mask is aligned with them.

    Aligning a mask may replace the size of a score axis by that of the mask. The two differ in runs in which the axis
    of the scores is 1: the mask then enlarges the scores, which a band cannot express.
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
    """Keys that are excluded where `given` holds. `dims` are the score axes of its dimensions, and `never_enlarges` is
    that of the mask's term (`AlignedTensor`)."""

    given: BooleanTensor
    dims: Arrangement
    never_enlarges: bool = True


@dataclass(frozen=True)
class Structure:
    """A mask as the sparse_mode of a band and padding, or as packed sequences if there is a `packing`. `never_empty`
    says that every row keeps a key in every run that has keys. `assumed` is what the user vouched for."""

    mode: SparseMode | None
    padding: tuple[Padding, ...]
    never_empty: bool
    packing: Packing | None = None
    assumed: tuple[str, ...] = ()

    @property
    def padding_alone(self) -> tuple[Padding, ...]:
        """The padding, if the mask is nothing else."""
        return self.padding if self.mode is None and self.packing is None else ()


@dataclass(frozen=True)
class NoStructure:
    """Why a mask has no structure, and what the user can do. `node` is the term's node, None where no single term is
    the reason. Whoever asks for a part of the structure gets none."""

    reason: str
    node: ir.Node | None = None
    hint: str | None = None
    mode: ClassVar[None] = None
    packing: ClassVar[None] = None
    padding: ClassVar[tuple[()]] = ()
    padding_alone: ClassVar[tuple[()]] = ()
    never_empty: ClassVar[bool] = False
    assumed: ClassVar[tuple[()]] = ()

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
    """The structure of the mask that these terms make together, or why the operator cannot express it.

    Without `contiguity`, packed sequences are not looked for. With `same_sizes` the user vouches for it that masks are
    as large as the scores. The operator gets the addends `beside` the mask as its bias. With `cuts`, padding may be the
    first elements of a longer tensor.
    """
    if not terms:
        return NoStructure("nothing is masked")
    always_known = _sizes_beside(beside, grid, viewer)
    known = {**sizes_of_reshapes([term.node for term in terms], viewer.info), **always_known}
    reader = _TermReader(viewer, grid, contiguity, known, always_known, cuts)
    parts: list[_Part] = []
    assumed: tuple[str, ...] = ()
    for term in terms:
        try:
            read, is_assumed = reader.read_term(term, same_sizes)
        except _Unstructured as cause:
            return NoStructure(cause.reason, term.node, cause.hint)
        parts.extend(read)
        assumed = (SAME_SIZES,) if is_assumed else assumed
    packings = {part for part in parts if isinstance(part, Packing)}
    padding = tuple(part for part in parts if isinstance(part, Padding))
    band = _intersection([part for part in parts if isinstance(part, Band)])
    if packings:
        return _packed(packings, padding, band, reader.sizes, assumed)
    return _banded(padding, band, reader.sizes, assumed)


def _packed(
    packings: Collection[Packing],
    padding: tuple[Padding, ...],
    band: Band | None,
    sizes: tuple[Dim, Dim],
    assumed: tuple[str, ...],
) -> Structure | NoStructure:
    """The structure of one packing, alone or with a band in which each token attends to itself."""
    mode = None if band is None else mode_of(band, *sizes)
    attends_itself = band is not None and band.has_diagonal
    if len(packings) > 1 or padding or not attends_itself or (mode is None and band != Band(None, None)):
        return NoStructure("packed sequences stand beside another mask")
    return Structure(mode, (), True, next(iter(packings)), assumed=assumed)


def _banded(
    padding: tuple[Padding, ...], band: Band | None, sizes: tuple[Dim, Dim], assumed: tuple[str, ...]
) -> Structure | NoStructure:
    """The structure of a band, or of none, with padding."""
    if band is None:
        return NoStructure("which of its bands is the narrowest depends on sizes of the run")
    mode = mode_of(band, *sizes)
    if mode is None and band != Band(None, None):
        return NoStructure(f"no sparse_mode is the band {band.described(*sizes)} in every run")
    if band.prefix and padding:
        return NoStructure("a prefix that all rows see stands beside padding")
    return Structure(mode, padding, not padding and band.never_empty(*sizes), assumed=assumed)


def _sizes_beside(beside: Sequence[Add[AlignedTensor]], grid: Grid, viewer: Viewer) -> Mapping[Atom, Dim]:
    """What sizes are in the runs that the operator does not refuse, by the biases that it gets.

    It takes a bias that has as many rows and keys as the scores, or one. So the scores have as many as a bias that has
    a known number of them, other than 1. Scores plus a bias of another name are as large as the scores. A bias that is
    the same for all rows tells nothing of these, because the operator gets one row of it.
    """
    found: dict[Atom, Dim] = {}
    for axes, size in zip((grid.q_seq, grid.kv_seq), grid.sizes, strict=True):
        total = size
        for own in _other_sizes_along(axes, size, beside, grid, viewer):
            if own.is_const and size.single_atom is not None:
                found[size.single_atom] = own
            elif (sum_size := (total := Dim.broadcast(total, own)).single_atom) is not None and total != size:
                found[sum_size] = size
    return {atom: size.substitute(found) for atom, size in found.items()}


def _other_sizes_along(
    axes: Axes, size: Dim, beside: Sequence[Add[AlignedTensor]], grid: Grid, viewer: Viewer
) -> Iterator[Dim]:
    """The sizes, other than 1 and that of the scores, which biases have along the rows or the keys."""
    wanted = viewer.space.resolve(axes)
    for term in beside:
        shape = viewer.info.shape(term.operand.value) or ()
        for place, (own, dim) in enumerate(zip(shape, term.operand.dims, strict=False)):
            if own.const == 1 or own == size or not dim or viewer.space.resolve(dim) != wanted:
                continue
            if axes != grid.q_seq or not is_constant_along(term.operand.value, place, viewer.info):
                yield own


@dataclass(frozen=True)
class _Placed:
    """Where the elements of a term's mask are: the element at `index` for each index of the dimensions in `shape`.
    `dims` are the score axes of these dimensions; `row` and `column` are the dimensions of rows and keys."""

    shape: Shape
    index: Index
    dims: Arrangement
    row: int | None
    column: int | None


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
    """What sizes are in all runs that the operator does not refuse. The result has rows also in a run without keys, in
    which the scores have no elements."""
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

    def read_term(self, term: MaskTerm, same_sizes: bool) -> tuple[list[_Part], bool]:
        """The parts of a term, and whether they need the user's word that masks are as large as the scores, which
        `same_sizes` is. Raises _Unstructured."""
        try:
            return list(self.read_if_as_large(term)), False
        except _Unstructured:
            if not same_sizes:
                raise
            return list(self.read_as_large(term)), True

    def read_if_as_large(self, term: MaskTerm) -> list[Band | Padding | Packing]:
        """The parts of the term's mask, if it is proven to have as many rows and columns as the scores. Raises
        _Unstructured."""
        other_sizes = self._other_sizes(term)
        if other_sizes is None:
            return self.read(term)
        if (padding := self._checked_padding(term)) is None:
            raise other_sizes
        return padding

    def read_as_large(self, term: MaskTerm) -> list[Band | Padding | Packing]:
        """The parts of the term's mask, which the user says to be as large as the scores. Raises _Unstructured."""
        place, known = self._placed(term), dict(self.always_known)
        for dimension, size in zip((place.row, place.column), (self._rows, self.sizes[1]), strict=True):
            own = size if dimension is None else place.shape[dimension]
            atoms = [part.single_atom for part in (own, *own.broadcast_parts) if part != size]
            known.update((atom, size) for atom in atoms if atom is not None)
        placed = replace(term.operand, never_enlarges=True)
        return replace(self, known={**self.known, **known}, always_known=known).read(replace(term, operand=placed))

    def read(self, term: MaskTerm) -> list[Band | Padding | Packing]:
        """The parts of the term's mask, which has as many rows and columns as the scores. Raises _Unstructured."""
        place = self._placed(term)
        reason: _Unstructured | None = None
        for each, cuts in self._attempts(place):
            try:
                return self._read(term, each, cuts)
            except _Unstructured as failure:
                reason = failure if reason is None or not cuts else reason
        assert reason is not None  # the first attempt is made always
        raise reason

    def _attempts(self, place: _Placed) -> Iterator[tuple[_Placed, bool]]:
        """The ways to read a mask, and whether a boolean tensor may then be cut. The last one without a cut says why
        there is no structure."""
        yield place, False
        if (apart := self._taken_apart(place)) is not None:
            yield apart, False
        if self.cuts:
            yield place, True

    def _read(self, term: MaskTerm, place: _Placed, cuts: bool) -> list[Band | Padding | Packing]:
        name = f"{term.operand.value.name!r}"
        positions = self._positions(place.shape, cuts)
        formula = kept(term, positions, place.index) or self._same_for_all_rows(term, positions, place)
        if formula is None:
            raise _Unstructured(f"where {name} masks is not known from positions, boolean inputs or a constant")
        parts = formula.parts if isinstance(formula, All) else (formula,)
        labels = [part for part in parts if isinstance(part, ElementComparison) and part.relation == "Equal"]
        result: list[Band | Padding | Packing] = []
        for part in parts:
            found = self._part(part, place, term)
            if isinstance(part, ElementComparison) and any(
                self._is_order(part, each, positions, place) for each in labels
            ):
                found = [Band(None, Dim(0))]
            if found is None:
                raise _unknown_part(part, name)
            result.extend(found)
        if term.operand.never_enlarges or self._carried(result, place):
            return result
        raise _Unstructured(f"{name} may have more batches or heads than the scores", ONE_NAME)

    def _same_for_all_rows(self, term: MaskTerm, positions: Positions, place: _Placed) -> BooleanTensor | None:
        """Where an addend that is the same for all rows is 0; None for other terms."""
        given = positions.whole(term.operand.value, place.index) if isinstance(term, Add) else None
        if given is None or (place.row is not None and not self._is_alike(given, place.row)):
            return None
        return replace(given, when=False)

    def _is_alike(self, given: BooleanTensor, row: int) -> bool:
        """Is a tensor that runs along the rows the same for all of them?"""
        return is_constant_along(given.value, given.axes.index(row), self.viewer.info)

    def _carried(self, parts: list[Band | Padding | Packing], place: _Placed) -> bool:
        """Do the padding or the labels run along all dimensions in which the mask may enlarge the scores?"""
        along = {axis for part in parts if isinstance(part, Padding) for axis in part.given.axes}
        labelled = {axis for part in parts if isinstance(part, Packing) for dim in part.dims for axis in dim}
        known = {place.row, place.column, *along}
        open_ = [k for k, size in enumerate(place.shape) if size.const != 1 and k not in known]
        return all(place.dims[k] and set(place.dims[k]) <= labelled for k in open_)

    def _placed(self, term: MaskTerm) -> _Placed:
        """The shape of the term's mask, and which of its dimensions are its rows and columns. Raises _Unstructured."""
        shape = self.viewer.info.shape(term.operand.value)
        if shape is None:
            raise _Unstructured(f"the shape of {term.operand.value.name!r} is unknown")
        dims, columns = term.operand.dims, self.viewer.space.resolve(self.grid.kv_seq)
        known = [self.known if self.viewer.space.resolve(dim) == columns else self.always_known for dim in dims]
        shape = tuple(size.substitute(sizes) for size, sizes in zip(shape, known, strict=True))
        return self._in(shape, self._positions(shape).identity_index, dims)

    def _positions(self, shape: Shape, cuts: bool = False) -> Positions:
        """The reader of masks of this shape."""
        facts = self.viewer.facts
        return Positions(facts.info, shape, self.known, cuts) if self.known or cuts else facts.positions(shape)

    def _in(self, shape: Shape, index: Index, dims: Arrangement) -> _Placed:
        resolve = self.viewer.space.resolve
        places = {resolve(dim): k for k, dim in enumerate(dims) if dim}
        return _Placed(shape, index, dims, places.get(resolve(self.grid.q_seq)), places.get(resolve(self.grid.kv_seq)))

    def _taken_apart(self, place: _Placed) -> _Placed | None:
        """The same place with an index for each axis of a merged dimension, such as heads that are folded into the
        batch; None where no dimension can be taken apart. The sizes of all its axes but the first have to be numbers,
        and the dimension as large as all of them."""
        space = self.viewer.space
        shape: list[Dim] = []
        dims: list[Axes] = []
        ends: list[int] = []
        for k, (size, dim) in enumerate(zip(place.shape, place.dims, strict=True)):
            axes = () if k in (place.row, place.column) else space.resolve(dim)
            sizes = [axis.size for axis in axes]
            merged = len(axes) > 1 and product(sizes) == size and all(each.is_const for each in sizes[1:])
            ends.append(len(shape) + (len(axes) if merged else 1))
            shape.extend(sizes if merged else [size])
            dims.extend([(axis,) for axis in axes] if merged else [dim])
        if len(shape) == len(place.shape):
            return None
        own = self._positions(tuple(shape)).identity_index
        index: list[Affine] = []
        for start, end in itertools.pairwise([0, *ends]):
            total = own[start]
            for k in range(start + 1, end):
                total = total.times(shape[k].const or 1) + own[k]
            index.append(total)
        return self._in(tuple(shape), tuple(index), tuple(dims))

    def _other_sizes(self, term: MaskTerm) -> _Unstructured | None:
        """Why the mask may have other numbers of rows and columns than the scores in a run that succeeds; None if it
        has not. Raises _Unstructured."""
        place, rows, columns = self._placed(term), self._rows, self.sizes[1]
        shape, row, column = place.shape, place.row, place.column
        name = f"{term.operand.value.name!r}"
        known: list[Dim] = []
        if column is not None and shape[column] != columns:
            cap = cap_of(shape[column], columns)
            if cap is None:
                reason = f"the {shape[column]} columns of {name} are not proven to be the {columns} keys of the scores"
                return _Unstructured(reason, ONE_NAME)
            known.append(Dim(cap) - columns)
        if row is not None and simplify_given(shape[row], known) != rows:
            reason = f"the {shape[row]} rows of {name} are not proven to be the {rows} rows of the scores"
            return _Unstructured(reason, ONE_NAME)
        return None

    def _checked_padding(self, term: MaskTerm) -> list[Band | Padding | Packing] | None:
        """The parts of a term that is nothing but padding, whose sizes either are those of the scores or make the
        operator fail; None for other terms.

        The operator takes a mask of one column, which it repeats as the model does, or of as many columns as keys. It
        gets no rows, so these must not add any to the scores. The padding is not cut: it might be one column that is
        repeated. Raises _Unstructured.
        """
        place = self._placed(term)
        if place.row is not None and not _adds_no_rows(place.shape[place.row], self._rows):
            return None
        try:
            parts = replace(self, cuts=False).read(term)
        except _Unstructured:
            return None
        return parts if all(isinstance(part, Padding) for part in parts) else None

    def _part(self, part: Formula, place: _Placed, term: MaskTerm) -> list[_Part] | None:
        """What a formula excludes; None where it is none of the parts."""
        if part == TRUE:
            return []
        if isinstance(part, ElementComparison) and (packing := self._packing(part, place, term)) is not None:
            return [packing]
        if isinstance(part, AtLeastZero):
            return self._one_sided(part.affine, place)
        if isinstance(part, Some) and (band := self._with_prefix(part, place, term)) is not None:
            return [band]
        if isinstance(part, BooleanLiteral):
            return None
        given = part if isinstance(part, BooleanTensor) else part.origin
        return None if given is None else self._padding(given, place, term)

    def _one_sided(self, affine: Affine, place: _Placed) -> list[_Part] | None:
        """The band of the positions at which a number that is linear in them is at least 0; none where that is so
        everywhere."""
        row, column = place.row, place.column
        if affine.least(place.shape).is_at_least(0):
            return []
        steps = _steps(affine)
        if row is None or column is None or set(steps) != {row, column}:
            return None
        if (steps[row], steps[column]) == (1, -1):
            return [Band(None, affine.offset.substitute(self.known))]
        if (steps[row], steps[column]) == (-1, 1):
            return [Band(-affine.offset.substitute(self.known), None)]
        return None

    def _padding(self, given: BooleanTensor, place: _Placed, term: MaskTerm) -> list[_Part] | None:
        """The padding that a boolean tensor is, if it is the same for all rows."""
        # It may run along the rows: the rewriter reads one row of it.
        if place.row is not None and place.row in given.axes and not self._is_alike(given, place.row):
            return None
        if given.cut is not None and given.axes[given.cut] != place.column:
            return None
        aligned = tuple(() if axis is None else place.dims[axis] for axis in given.axes)
        return [Padding(replace(given, when=not given.when), aligned, term.operand.never_enlarges)]

    def _with_prefix(self, part: Some, place: _Placed, term: MaskTerm) -> Band | None:
        """The band with a prefix that two alternatives make: an upper bound on j - i, and one on j alone."""
        limits = [inner for inner in part.parts if isinstance(inner, AtLeastZero)]
        ends = [inner.affine.offset.const for inner in limits if _steps(inner.affine) == {place.column: -1}]
        others = [self._part(inner, place, term) or [] for inner in limits]
        bands = [found for parts in others for found in parts if isinstance(found, Band)]
        if len(part.parts) != 2 or len(ends) != 1 or len(bands) != 1 or bands[0].lower is not None:
            return None
        end = ends[0]
        return replace(bands[0], prefix=end + 1) if end is not None and end >= 0 else None

    def _packing(self, part: ElementComparison, place: _Placed, term: MaskTerm) -> Packing | None:
        """The packing that a comparison of labels at the row and at the column expresses. There must be as many labels
        as rows and as columns."""
        own, row, column = self.viewer.info.shape(part.value), place.row, place.column
        along = [k for k, (one, other) in enumerate(zip(part.one, part.other, strict=True)) if one != other]
        if self.contiguity is None or own is None or part.relation != "Equal" or not part.when:
            return None
        if row is None or column is None or len(along) != 1:
            return None
        (axis,) = along
        ends = Affine.index(row, len(place.shape)), Affine.index(column, len(place.shape))
        if {part.one[axis], part.other[axis]} != set(ends):
            return None
        if not own[axis] == place.shape[row] == place.shape[column] or self.grid.sizes[0] != self.grid.sizes[1]:
            return None
        batch = [self._label_axes(part, k, own[k], place) for k in range(len(own)) if k != axis]
        if any(dim is None for dim in batch):
            return None
        placed = [dim for dim in batch if dim is not None]
        placed.insert(axis, self.grid.q_seq)
        return Packing(part.value, tuple(placed), self.contiguity.holds(part.value, axis), term.operand.never_enlarges)

    def _label_axes(self, part: ElementComparison, dimension: int, size: Dim, place: _Placed) -> Axes | None:
        """The axes along which a dimension of the labels other than that of the tokens runs; None where unknown."""
        if size.const == 1:
            return ()
        others = [m for m in range(len(place.shape)) if m not in (place.row, place.column)]
        whole = (m for m in others if part.one[dimension] == Affine.index(m, len(place.shape)))
        return next((place.dims[m] for m in whole if size == place.shape[m]), None)

    def _is_order(
        self, part: ElementComparison, labels: ElementComparison, positions: Positions, place: _Placed
    ) -> bool:
        """Does this part say that the key's number is at most the row's, for numbers that go up by one from token to
        token of a sequence?"""
        row, column = place.row, place.column
        along = [k for k, (one, other) in enumerate(zip(labels.one, labels.other, strict=True)) if one != other]
        if self.contiguity is None or row is None or column is None or part.relation != "LessOrEqual" or not part.when:
            return False
        if len(along) != 1 or not labels.when:
            return False
        numbers = self.contiguity.position_source(labels.value, along[0])
        if numbers is None:
            return False
        ends = (labels.one, labels.other)
        key, query = ends if ends[0][along[0]] == Affine.index(column, positions.rank) else ends[::-1]
        is_pair = query[along[0]] == Affine.index(row, positions.rank)
        places = [dict(positions.origins(part.value, each)).get(numbers) for each in (part.one, part.other)]
        return is_pair and places == [key, query]


def _adds_no_rows(own: Dim, rows: Dim) -> bool:
    """Do scores of so many rows have as many after a mask with its own number of rows is added, in every run that
    succeeds?

    Several rows stay as many, because the mask has as many or one. One row does if the mask has one row then, too. If
    the mask then had a negative number of rows, there is no such run.
    """
    if own == rows or rows.const not in (None, 1):
        return True
    beside_one_row = None if (atom := rows.single_atom) is None else own.evaluate({atom.name: 1})
    return beside_one_row is not None and (beside_one_row == 1 or beside_one_row < 0)


def _unknown_part(part: Formula, name: str) -> _Unstructured:
    """Why a part of a mask's formula is no band, padding or packing."""
    if isinstance(part, BooleanTensor):
        given: BooleanTensor | None = part
    else:
        given = None if isinstance(part, BooleanLiteral | AtLeastZero) else part.origin
    if given is None:
        return _Unstructured(f"{name} compares positions in a way that is no band")
    found = f"{given.value.name!r}"
    if given.value.const_value is not None:
        return _Unstructured(f"the constant {found} is no band, no prefix and no padding")
    if given.value.producer() is None:
        return _Unstructured(f"the input {found} may mask any keys of any row", FIXED_MASK)
    return _Unstructured(f"{found} masks by row and key, and not in a band")


def kept(term: MaskTerm, positions: Positions, index: Index | None = None) -> Formula | None:
    """Where the term leaves the scores as they are, at this index of its tensor or at its own; None when that is
    unknown."""
    if isinstance(term, Add):
        added = positions.nonzero(term.operand.value, index)
        return None if added is None else negation(added)
    condition = positions.truth(term.operand.value, index or positions.identity_index)
    if condition is None or term.keep:
        return condition
    return negation(condition)


def _intersection(bands: Sequence[Band]) -> Band | None:
    """The band that all bands have in common; None when it is unknown which of their bounds are the tightest. A prefix
    is known only of one band, which may occur several times."""
    if any(band.prefix for band in bands):
        return bands[0] if len(set(bands)) == 1 else None
    lower = [band.lower for band in bands if band.lower is not None]
    upper = [-band.upper for band in bands if band.upper is not None]
    tightest = _largest(lower), _largest(upper)
    if (lower and tightest[0] is None) or (upper and tightest[1] is None):
        return None
    return Band(tightest[0], None if tightest[1] is None else -tightest[1])


def _largest(bounds: Sequence[Dim]) -> Dim | None:
    """The bound that is proven to be at least every other one; None where there is none."""
    return next((one for one in bounds if all((one - other).is_at_least(0) for other in bounds)), None)
