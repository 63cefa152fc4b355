"""`inspect --runtime all`: which runtimes could take each attention of a model, and by which operator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fa_compiler.model_files.reading import LoadedModel
from fa_compiler.op_registry.runtimes import DOMAINS, OPERATORS, RUNTIMES, Runtime
from fa_compiler.passes import Block, Options, Report
from fa_compiler.passes.report import Code, ranges
from fa_compiler.pipeline import make_options, run

ALL = "all"
"""The word for --runtime that asks about each of them."""


@dataclass(frozen=True)
class Choice:
    """What one block becomes for one runtime: by the target that fuses it, else why the targets decline it."""

    runtime: str
    target: str
    block: Block

    @property
    def is_taken(self) -> bool:
        """Does the runtime take it?"""
        return self.block.status == "fused"


@dataclass(frozen=True)
class Choices:
    """The choices of a model: for each block of the report for ONNX Runtime one for each runtime."""

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
                        each.runtime: {
                            "op": each.block.op if each.is_taken else None,
                            "target": each.target if each.is_taken else None,
                            "code": None if each.block.code is None else each.block.code.value,
                            "reason": each.block.reason,
                        }
                        for each in choices
                    },
                }
                for block, choices in self.rows
            ],
        }

    def table(self) -> list[tuple[str, str, str, str]]:
        """The rows of the table: runtime, blocks, target and operator, or why the targets decline the blocks."""
        found: dict[tuple[str, str, str], list[int]] = {}
        for block, choices in self.rows:
            for each in choices:
                what = each.block.op or "" if each.is_taken else each.block.reason or ""
                found.setdefault((each.runtime, each.target if each.is_taken else "-", what), []).append(block.id)
        order = list(RUNTIMES)
        rows = [(runtime, ranges(ids), target, what) for (runtime, target, what), ids in found.items()]
        return sorted(rows, key=lambda row: order.index(row[0]))


def runtime_choices(loaded: LoadedModel, assume: Iterable[str] = ()) -> Choices:
    """What each attention of a model becomes for each runtime, by the target that takes most of them."""
    words = tuple(assume)
    shown = [block for block in _report(loaded, Options(assume=frozenset(words))).blocks if _counts(block)]
    columns = []
    for name in RUNTIMES:
        reports = {
            target: _report(loaded, make_options(target, None, None, words, runtime=Runtime(name)))
            for target in OPERATORS
        }
        columns.append({target: _by_anchor(report) for target, report in reports.items()})
    rows = []
    for block in shown:
        choices = [_choice(name, column, block) for name, column in zip(RUNTIMES, columns, strict=True)]
        rows.append((block, tuple(choices)))
    return Choices(loaded.name, tuple(rows))


def _report(loaded: LoadedModel, options: Options) -> Report:
    return run(loaded, options)[1]


def _counts(block: Block) -> bool:
    return block.kind == "forward" and block.status != "not_attention"


def _by_anchor(report: Report) -> dict[str, Block]:
    return {block.anchor: block for block in report.blocks if _counts(block)}


def _choice(runtime: str, column: dict[str, dict[str, Block]], block: Block) -> Choice:
    found: Sequence[Choice] = [
        Choice(runtime, target, blocks.get(block.anchor, block)) for target, blocks in column.items()
    ]
    if not RUNTIMES[runtime]:
        reason = f"{runtime} has no kernel of {', '.join(DOMAINS)}"
        return Choice(runtime, "-", replace(block, status="declined", code=Code.RUNTIME, reason=reason))
    if (taken := next((each for each in found if each.is_taken), None)) is not None:
        return taken
    able = [each for each in found if not RUNTIMES[runtime].keys().isdisjoint(OPERATORS[each.target])]
    reasons = dict.fromkeys(each.block.reason for each in able if each.block.reason)
    return replace(able[0], block=replace(able[0].block, reason="; ".join(reasons)))
