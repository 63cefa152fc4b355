"""The band of keys that a structural mask leaves to each query row, and the sparse_mode that expresses it.

With i the row and j the key, both counted from 0, a band keeps the keys with `lower <= j - i <= upper`. The operator's
modes count from one of two diagonals: that of the top left corner, where j - i = 0, or that of the bottom right corner,
where j - i = S2 - S1.

    upper 0, no lower                          2   leftUpCausal
    upper S2 - S1, no lower                    3   rightDownCausal
    each bound a constant away from S2 - S1,   4   band: pre_tockens and next_tockens are the distances
    or absent

Bounds and sizes are symbolic, so the mode of a band is right in every run.
"""

from __future__ import annotations

from dataclasses import dataclass

from fa_compiler.passes.values.symbolic import Dim

UNLIMITED = 2**31 - 1
"""The operator's default for pre_tockens and next_tockens: no limit."""


@dataclass(frozen=True)
class Band:
    """The keys with `lower <= j - i <= upper`. A bound that is None does not limit."""

    lower: Dim | None
    upper: Dim | None

    @property
    def has_diagonal(self) -> bool:
        """Whether every row i keeps the key i, if there is such a key, in every run."""
        above = self.upper is None or self.upper.is_at_least(0)
        return above and (self.lower is None or (-self.lower).is_at_least(0))

    def never_empty(self, rows: Dim, columns: Dim) -> bool:
        """Whether the band leaves every row a key in every run that has keys."""
        above = self.upper is None or self.upper.is_at_least(0)
        below = self.lower is None or (columns - rows - self.lower).is_at_least(0)
        crossed = self.lower is not None and self.upper is not None and not (self.upper - self.lower).is_at_least(0)
        return above and below and not crossed


@dataclass(frozen=True)
class SparseMode:
    """The attributes that express a band."""

    sparse_mode: int
    pre_tockens: int = UNLIMITED
    next_tockens: int = UNLIMITED

    @property
    def attrs(self) -> dict[str, int]:
        """The attributes that differ from the prototype's defaults."""
        attrs = {"sparse_mode": self.sparse_mode}
        if self.sparse_mode == 4:
            attrs.update(pre_tockens=self.pre_tockens, next_tockens=self.next_tockens)
        return attrs

    @property
    def mask_label(self) -> str:
        """The name of the band in the report."""
        return "band" if self.sparse_mode == 4 else "causal"


def sparse_mode(band: Band, rows: Dim, columns: Dim) -> SparseMode | None:
    """The mode of a band over scores of these sizes. None when the band does not limit, or when no mode expresses it in
    every run."""
    corner = columns - rows
    if band.lower is None and band.upper is None:
        return None
    if band.lower is None and band.upper is not None:
        if band.upper == 0:
            return SparseMode(2)
        if band.upper == corner:
            return SparseMode(3)
    before = UNLIMITED if band.lower is None else (corner - band.lower).const
    after = UNLIMITED if band.upper is None else (band.upper - corner).const
    if before is None or after is None or not (0 <= before <= UNLIMITED and 0 <= after <= UNLIMITED):
        return None
    return SparseMode(4, before, after)
