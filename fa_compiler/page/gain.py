"""What the fusion of a model's attention saves: nodes, and the scores and probabilities that are
not in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import onnx

from fa_compiler.passes import Block, Report
from fa_compiler.passes.answer.options import DECODE
from fa_compiler.passes.answer.report import WITHOUT_SOFTMAX
from fa_compiler.protos.subgraphs import all_nodes

TILED = ("ort", "ascend")
"""The targets whose kernels hold a tile of the scores at a time."""
TOKENS = 4096
"""The length that is told of where the model's sizes are open."""
SCORE_BYTES = 4
"""Scores and probabilities are float32 in most models, and in all that compute the softmax in
float32."""


def nodes_of(model: onnx.ModelProto) -> int:
    """How many nodes a model has, those of its subgraphs included."""
    return sum(1 for _ in all_nodes(model.graph.node))


@dataclass(frozen=True)
class Scores:
    """The scores of one attention and one sequence: its query heads, rows and keys. A size of 0 is
    open."""

    heads: int
    rows: int
    keys: int

    @property
    def is_open(self) -> bool:
        """Whether the scores grow with the sequence."""
        return not (self.rows and self.keys)

    def count_bytes(self, tokens: int) -> int:
        """The bytes of the scores and the probabilities, where each open size is this number of
        tokens."""
        return _bytes_of(self.heads, self.rows or tokens, self.keys or tokens)


def largest_scores(report: Report) -> Scores | None:
    """The largest scores that a fused attention does not hold any more; None where nothing is known
    of them.

    Kernels of other runtimes may hold the scores, so nothing is said of them.
    """
    if report.target not in TILED:
        return None
    fused = [
        block
        for block in report.blocks
        if block.status == "fused" and block.kind not in WITHOUT_SOFTMAX
    ]
    found = [_scores_of(block) for block in fused if block.heads and block.heads[0]]
    return max(found, key=lambda scores: scores.count_bytes(TOKENS), default=None)


def added_by_mask(report: Report, tokens: int) -> int:
    """The bytes that the largest mask takes more than in the model, because an operator takes it in
    full only: for one sequence, where each open size is this number of tokens."""
    missed = (missed for block in report.blocks for missed in block.missed)
    return max((each.added_bytes(tokens) for each in missed), default=0)


def still_held(report: Report) -> str:
    """Which attentions hold their scores as before, because they were declined; empty where there
    are none."""
    declined = (block for block in report.blocks if block.status == "declined")
    count = sum(block.kind not in ("backward", *WITHOUT_SOFTMAX) for block in declined)
    if count == 1:
        return "the declined attention holds its own as before"
    return f"the {count} declined attentions hold theirs as before" if count else ""


def in_all(saved: int, added: int) -> str:
    """What the saved and the added bytes are together."""
    return f"{in_units(saved - added)} less" if saved > added else "no less"


def _scores_of(block: Block) -> Scores:
    assert block.heads is not None
    rows, keys = block.scores or (0, 0)
    return Scores(block.heads[0], 1 if DECODE in block.assumed else rows, keys)


def _bytes_of(*sizes: int) -> int:
    return 2 * SCORE_BYTES * math.prod(sizes)


def in_units(count: int) -> str:
    """A number of bytes for people, such as 96 MiB or 1.2 GiB."""
    size, units = float(count), ["bytes", "KiB", "MiB", "GiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        del units[0]
    return (
        f"{size:,.0f} {units[0]}" if size >= 10 or size == int(size) else f"{size:.1f} {units[0]}"
    )


def gain_line(report: Report, before: onnx.ModelProto, after: onnx.ModelProto) -> str | None:
    """One line of before and after; None where nothing was fused.

    The memory is that of the largest fused attention: at the model's own sizes where they are
    fixed, else of one sequence, whose open sizes are TOKENS tokens.
    """
    fused = [
        block for block in report.blocks if block.status == "fused" and block.kind != "backward"
    ]
    if not fused:
        return None
    parts = [f"{nodes_of(before):,} nodes before, {nodes_of(after):,} after"]
    if scores := largest_scores(report):
        parts += [_saved(report, fused, scores, before), still_held(report)]
    return "; ".join(filter(None, parts))


def _saved(report: Report, fused: Sequence[Block], scores: Scores, before: onnx.ModelProto) -> str:
    shapes = _fixed_shapes(before)
    scored = [block for block in fused if block.kind not in WITHOUT_SOFTMAX]
    sizes = [shapes[block.anchor] for block in scored if block.anchor in shapes]
    if sizes and len(sizes) == len(scored):
        largest = max(_bytes_of(*shape) for shape in sizes)
        return f"up to {in_units(largest)} of scores and probabilities are not held any more"
    where = f"at {TOKENS:,} tokens" if scores.is_open else "for each sequence"
    saved, added = scores.count_bytes(TOKENS), added_by_mask(report, TOKENS)
    line = f"{where} {in_units(saved)} of scores and probabilities are not held any more"
    return (
        f"{line}, and a mask takes {in_units(added)} more: {in_all(saved, added)} in all"
        if added
        else line
    )


def _fixed_shapes(model: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    """The shape of the first output of each node whose declared sizes are all fixed, by the node's
    name."""
    declared = {}
    for value in (*model.graph.value_info, *model.graph.output):
        dims = value.type.tensor_type.shape.dim
        if value.type.tensor_type.HasField("shape") and all(
            dim.HasField("dim_value") for dim in dims
        ):
            declared[value.name] = tuple(dim.dim_value for dim in dims)
    named = ((node.name, node.output[0]) for node in model.graph.node if node.name and node.output)
    return {name: declared[output] for name, output in named if output in declared}
