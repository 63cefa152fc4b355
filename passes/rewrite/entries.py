"""Where the elements of a small tensor stand in a larger one that reads them, such as a length for
each batch entry in a mask, or a block table in the slots that are computed from it."""

from __future__ import annotations

from collections.abc import Sequence

from fa_compiler.passes.algebra.axes import Arrangement, Axes
from fa_compiler.passes.algebra.formula import Affine, Index
from fa_compiler.passes.algebra.symbolic import Dim


def entry_dims(
    sizes: Sequence[Dim] | None, index: Index, form: Sequence[Dim], dims: Arrangement
) -> Arrangement | None:
    """The arrangement of a small tensor of these sizes, whose element at `index` is read at each
    position of a larger tensor.

    The larger tensor has the sizes `form` and is arranged as `dims`. With fewer `dims` than sizes
    the small tensor must not run along the last dimensions. None where some elements of the small
    tensor are not read, because it is cut, or because a single one of its elements is taken.
    """
    if sizes is None or len(sizes) != len(index):
        return None
    rank = len(form)
    along: dict[Affine, tuple[Dim, Axes]] = {
        Affine.index(k, rank): (form[k], axes) for k, axes in enumerate(dims)
    }
    along[Affine.number(0, rank)] = (Dim(1), ())
    read = [along.get(place, (None, ())) for place in index]
    if [size for size, _ in read] != list(sizes):
        return None
    return tuple(axes for _, axes in read)
