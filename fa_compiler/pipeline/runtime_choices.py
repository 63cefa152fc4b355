"""`inspect --runtime all`: which runtimes could take each attention of a model, and by which
operator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fa_compiler.model_files.reading import LoadedModel
from fa_compiler.op_registry.runtimes import DOMAINS, OPERATORS, RUNTIMES
from fa_compiler.passes import Block
from fa_compiler.passes.answer.report import Code, ranges
from fa_compiler.pipeline.fusing import run
from fa_compiler.pipeline.options import make_options


@dataclass(frozen=True)
class Choice:
    """What one block becomes for one runtime: by the target that fuses it, else why the targets
    decline it."""

    runtime: str
    target: str
    block: Block

    @property
    def is_taken(self) -> bool:
        """Does the runtime take it?"""
        return self.block.status == "fused"

    @property
    def operator(self) -> str | None:
        """The operator that the runtime takes; None where it takes none."""
        return self.block.op if self.is_taken else None

    @property
    def taken_target(self) -> str | None:
        """The target of this operator; None where the runtime takes none."""
        return self.target if self.is_taken else None


@dataclass(frozen=True)
class Choices:
    """The choices of a model: for each block of the report for ONNX Runtime one for each
    runtime."""

    model: str
    rows: tuple[tuple[Block, tuple[Choice, ...]], ...]

    def to_json(self) -> dict[str, Any]:
        """The choices as JSON."""
        return {
            "model": self.model,
            "blocks": [
                {
                    "id": block.id,
                    "anchor": block.anchor,
                    "runtimes": {
                        choice.runtime: {
                            "op": choice.operator,
                            "target": choice.taken_target,
                            "code": choice.block.code and choice.block.code.value,
                            "reason": choice.block.reason,
                        }
                        for choice in choices
                    },
                }
                for block, choices in self.rows
            ],
        }

    def table(self) -> list[tuple[str, str, str, str]]:
        """The rows of the table: runtime, blocks, target and operator, or why the targets decline
        the blocks."""
        blocks: dict[tuple[str, str, str], list[int]] = {}
        for block, choices in self.rows:
            for choice in choices:
                what = choice.operator if choice.is_taken else choice.block.reason
                row = choice.runtime, choice.taken_target or "-", what or ""
                blocks.setdefault(row, []).append(block.id)
        order = list(RUNTIMES)
        rows = [
            (runtime, ranges(ids), target, what) for (runtime, target, what), ids in blocks.items()
        ]
        return sorted(rows, key=lambda row: order.index(row[0]))


def runtime_choices(loaded: LoadedModel, assume: Iterable[str] = ()) -> Choices:
    """What each attention of a model becomes for each runtime, by the first target that takes it.

    Raises:
        InputError: the model or an assumption is at fault.
    """
    words = tuple(assume)

    def blocks_for(target: str, runtime: str | None = None) -> list[Block]:
        _, report = run(loaded, make_options(target, assume=words, runtime=runtime))
        return [
            block
            for block in report.blocks
            if block.kind == "forward" and block.status != "not_attention"
        ]

    shown = blocks_for("ort")
    columns = {
        name: {
            target: {block.anchor: block for block in blocks_for(target, name)}
            for target in OPERATORS
            if not RUNTIMES[name].keys().isdisjoint(OPERATORS[target])
        }
        for name in RUNTIMES
    }
    rows = (
        (block, tuple(_choice(*column, block) for column in columns.items())) for block in shown
    )
    return Choices(loaded.name, tuple(rows))


def _choice(runtime: str, column: Mapping[str, Mapping[str, Block]], block: Block) -> Choice:
    """The choice for a block, from the blocks of the targets that the runtime has operators of."""
    if not column:
        reason = f"{runtime} has no kernel of {', '.join(DOMAINS)}"
        return Choice(
            runtime, "-", replace(block, status="declined", code=Code.RUNTIME, reason=reason)
        )
    found = [
        Choice(runtime, target, blocks.get(block.anchor, block))
        for target, blocks in column.items()
    ]
    if (taken := next((each for each in found if each.is_taken), None)) is not None:
        return taken
    reasons = dict.fromkeys(each.block.reason for each in found if each.block.reason)
    return replace(found[0], block=replace(found[0].block, reason="; ".join(reasons)))
