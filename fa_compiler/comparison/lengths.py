"""The numbers of tokens for which a model with linear attention is right, of which its fused form
keeps a record.

A file in which the number of chunks is written out is compared where it is right. Where it is meant
for every length (--assume any-length), its fused form is also run beyond these lengths, and
compared with itself without the library: the bodies of its operators compute the recurrence token
by token.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from fa_compiler.comparison.feeds import BATCH, TRIED, Sizes
from fa_compiler.passes.ir.nodes import without_none
from fa_compiler.passes.linear.lengths import METADATA, Lengths
from fa_compiler.protos.metadata import metadata_of

MOST = 512
"""No longer sequences are made."""


def lengths_of(model: onnx.ModelProto) -> list[Lengths]:
    """The lengths for which each linear attention of a fused model was right before, where these
    are not all."""
    found = without_none(metadata_of(node, METADATA) for node in model.graph.node)
    return [Lengths.read(text) for text in found]


def sizes_for(model: onnx.ModelProto) -> list[Sizes]:
    """Sizes to be tried in turn until a model runs: those that are right for it before all
    others."""
    length = right_length(lengths_of(model))
    return [*([] if length is None else [Sizes(batch, length) for batch in (BATCH, 1)]), *TRIED]


def right_length(lengths: list[Lengths]) -> int | None:
    """The largest length up to MOST for which all are right; None where there is none, or where all
    lengths are."""
    return next(_that(lengths, True), None)


def other_length(lengths: list[Lengths]) -> int | None:
    """The largest length up to MOST for which one is not right; None where there is none."""
    return next(_that(lengths, False), None)


def _that(lengths: list[Lengths], are_right: bool) -> Iterator[int]:
    if not lengths:
        return
    longest = min(MOST, 2 * max(each.longest for each in lengths) + 1)
    yield from (
        each for each in range(longest, 0, -1) if all(each in own for own in lengths) is are_right
    )
