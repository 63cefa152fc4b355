"""The band of keys that a structural mask leaves to each query row, and the sparse_mode that
expresses it.

With i the row and j the key, both counted from 0, a band keeps the keys with
`lower <= j - i <= upper`. The operator's modes count from one of two diagonals: that of the top
left corner, where j - i = 0, or that of the bottom right corner, where j - i = S2 - S1.

    upper 0, no lower                          2   leftUpCausal
    upper S2 - S1, no lower                    3   rightDownCausal
    each bound a constant away from S2 - S1,   4   band: pre_tockens and next_tockens are the
                                                   distances, which are
    or absent                                      negative for a band that lies to one side of that
                                                   diagonal
    upper S2 - S1, no lower, and a prefix      6   prefix: all rows keep the first keys, too

Bounds and sizes are symbolic, so the mode of a band is right in every run. A prefix is a number.
The sizes beside it have to be numbers, too, because the operator takes no prefix that is longer
than the keys or shorter than S2 - S1.

The CPU kernel takes any band, also one that leaves rows or all of them without a key. Ascend's
operators fail in a run whose band misses the scores (expressible.py).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

from fa_compiler.op_registry.geometry import UNLIMITED
from fa_compiler.passes.algebra.known import if_known
from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.ir.nodes import all_known

FIRST_CAUSAL, LAST_CAUSAL, WINDOW = 2, 3, 4
"""The sparse_modes of the first three of these bands."""


@dataclass(frozen=True)
class Band:
    """The keys with `lower <= j - i <= upper`, and the first `prefix` keys.

    A bound that is None does not limit. Beside a prefix there is no `lower`.
    """

    lower: Dim | None
    upper: Dim | None
    prefix: int = field(default=0, kw_only=True)

    @property
    def is_unlimited(self) -> bool:
        """Does the band keep every key?"""
        return self.lower is None and self.upper is None and not self.prefix

    @property
    def has_diagonal(self) -> bool:
        """Whether every row i keeps the key i, if there is such a key, in every run. With a prefix
        the answer is no."""
        return (
            not self.prefix
            and _leaves_room(self.upper)
            and _leaves_room(if_known(operator.neg, self.lower))
        )

    def described(self, rows: Dim, columns: Dim) -> str:
        """The band in words, for scores of these sizes: the keys j that the row i keeps."""
        text = "j - i"
        if self.lower is not None:
            text = f"{self.lower} <= {text}"
        if self.upper is not None:
            text = f"{text} <= {self.upper}"
        if self.prefix:
            text = f"{text} with the first {self.prefix} keys"
        return f"{text} of {rows} rows and {columns} keys"

    def never_empty(self, rows: Dim, columns: Dim) -> bool:
        """Whether the band leaves every row a key in every run that has keys."""
        above = self.prefix > 0 or _leaves_room(self.upper)
        below = if_known(operator.sub, columns - rows, self.lower)
        between = if_known(operator.sub, self.upper, self.lower)
        return above and _leaves_room(below) and _leaves_room(between)


def _leaves_room(distance: Dim | None) -> bool:
    """Is the distance of a bound from what it has to leave never negative? A bound that does not
    limit has none."""
    return distance is None or distance.is_at_least(0)


@dataclass(frozen=True)
class SparseMode:
    """The attributes and the input that express a band."""

    sparse_mode: int
    pre_tockens: int = UNLIMITED
    next_tockens: int = UNLIMITED
    prefix: int = 0
    """The number in the input `prefix`, for every batch entry; 0 where there is no such input."""

    @property
    def is_first_causal(self) -> bool:
        """Is the band causal from the first row and key?"""
        return self.sparse_mode == FIRST_CAUSAL

    @property
    def is_last_causal(self) -> bool:
        """Is the band causal to the last row and key?"""
        return self.sparse_mode == LAST_CAUSAL

    @property
    def is_window(self) -> bool:
        """Is the band one of two diagonals that are counted from the last row and key?"""
        return self.sparse_mode == WINDOW

    def includes(self, window: SparseMode, square: bool) -> bool:
        """Is this mode causal, or a wider window that ends at the diagonal, and the other one a
        window that ends there? `square` says that the scores have as many rows as keys, so that
        both causal modes are one."""
        causal = self.is_last_causal or (self.is_first_causal and square)
        wider = self.is_window and self.next_tockens == 0 and self.pre_tockens >= window.pre_tockens
        return (causal or wider) and window.is_window and window.next_tockens == 0

    @property
    def is_beside_diagonal(self) -> bool:
        """Does the band lie to one side of the diagonal of the last row and key?"""
        return self.is_window and min(self.pre_tockens, self.next_tockens) < 0

    @property
    def attrs(self) -> dict[str, int]:
        """The attributes that differ from the prototype's defaults."""
        attrs = {"sparse_mode": self.sparse_mode}
        if self.is_window:
            attrs.update(pre_tockens=self.pre_tockens, next_tockens=self.next_tockens)
        return attrs

    @property
    def mask_label(self) -> str:
        """The name of the band in the report."""
        return {4: "band", 6: "prefix"}.get(self.sparse_mode, "causal")


def mode_of(band: Band, rows: Dim, columns: Dim) -> SparseMode | None:
    """The mode of a band over scores of these sizes. None when the band does not limit, or when no
    mode expresses it in every run."""
    corner = columns - rows
    if band.is_unlimited:
        return None
    if band.prefix:
        return _with_prefix(band, corner, columns)
    if band == Band(None, Dim(0)):
        return SparseMode(FIRST_CAUSAL)
    if band == Band(None, corner):
        return SparseMode(LAST_CAUSAL)
    before, after = (
        if_known(operator.sub, corner, band.lower),
        if_known(operator.sub, band.upper, corner),
    )
    tokens = all_known(
        UNLIMITED if distance is None else distance.const for distance in (before, after)
    )
    if tokens is None or max(map(abs, tokens)) > UNLIMITED:
        return None
    return SparseMode(WINDOW, *tokens)


def _with_prefix(band: Band, corner: Dim, columns: Dim) -> SparseMode | None:
    """The mode of a causal band, counted from the last row, with a prefix that all rows see:
    neither inside of the band nor beyond the keys."""
    offset, keys = corner.const, columns.const
    fits = offset is not None and keys is not None and max(offset, 0) <= band.prefix <= keys
    if fits and band.upper == corner:
        return SparseMode(6, prefix=band.prefix)
    return None
