"""`shard`: from a model of one process to a folder with the model that all ranks run."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any, Unpack

import onnx

from fa_compiler.checks import checker
from fa_compiler.errors import InputError, InternalError
from fa_compiler.model_files.destination import path_of
from fa_compiler.model_files.folder import REPORT, check_target, new_folder
from fa_compiler.model_files.reading import LoadedModel, ModelLike, load, refuse_sharded
from fa_compiler.model_files.writing import staging, write_model
from fa_compiler.op_registry import DOMAIN
from fa_compiler.op_registry.collectives import MERGE, METHODS
from fa_compiler.op_registry.errors import suggestion
from fa_compiler.passes import Report
from fa_compiler.passes.answer.option import read_options
from fa_compiler.passes.answer.options import SEPARATE_CACHES, SHARED_CACHES, words_of
from fa_compiler.passes.answer.report import Progress, printable
from fa_compiler.passes.answer.shown import Shown
from fa_compiler.passes.in_place import METADATA
from fa_compiler.passes.parallel.methods import Choice
from fa_compiler.passes.parallel.options import ParallelOptions, ShardKeywords
from fa_compiler.passes.parallel.places import Refusal
from fa_compiler.passes.parallel.shard import ShardReport
from fa_compiler.passes.parallel.shard import shard as shard_graph
from fa_compiler.pipeline.fusing import fuse_loaded, proto_of, without_collections
from fa_compiler.pipeline.how_to_run import run_by_ranks
from fa_compiler.pipeline.keywords import names_of_python, takes
from fa_compiler.pipeline.options import make_options
from fa_compiler.protos.metadata import metadata_of

MODEL = "model.onnx"
"""The name of the model in the folder."""

MOST_RANKS = 1 << 16


MIB = 1 << 20
_IN_TURN = "each rank has its part of the caches in turn: of N ranks, rank r has the tokens r, r + N, r + 2 N and so on"


@dataclass(frozen=True, repr=False)
class Sharded(Shown):
    """The result of `shard`: the path of the model, what became of it, and how its attention was
    fused before."""

    path: Path
    report: ShardReport
    fusion: Report

    def to_json(self) -> dict[str, Any]:
        """The report as JSON has it."""
        return report_json(self.report)

    @property
    def _short(self) -> str:
        return printable(f"{self.path}: {self._order}")

    @property
    def _order(self) -> str:
        ranks = self.report.ranks
        return f"{ranks} rank{'s' if ranks > 1 else ''}, {self.report.order} order"

    @property
    def _rows(self) -> list[list[str]]:
        """Each attention with its method, and what a rank sends for it."""
        report = self.report
        sent = [(each.name, each.method, each.sent[each.method]) for each in report.choices]
        sent += [
            (each.name, "hand on", each.sent(report.order, report.ranks, report.batch))
            for each in report.handed
        ]
        rows = [[printable(name), method, f"{count / MIB:.2f}"] for name, method, count in sent]
        return [["attention", "method", f"MiB sent by a rank, at {report.length:,} tokens"], *rows]

    @property
    def _lines(self) -> list[str]:
        """Where inputs and outputs are, and the command that runs the model."""
        report, lines = self.report, []
        for what, axes in (("input", report.inputs), ("output", report.outputs)):
            for name, axis in axes.items():
                where = (
                    "whole on every rank" if axis is None else f"in parts along dimension {axis}"
                )
                lines.append(f"{what} {name}: {where}")
        if report.gathered:
            lines.append(f"all ranks get all tokens of {', '.join(report.gathered)}")
        lines.append(self._order)
        if report.caches:
            lines.append(_IN_TURN)
        lines.append(
            f"wrote {self.path}; run it with: {run_by_ranks(str(self.path), str(report.ranks))}"
        )
        return [*map(printable, lines)]


def report_json(report: ShardReport) -> dict[str, Any]:
    """What became of a model, as JSON has it."""
    return {
        "ranks": report.ranks,
        "order": report.order,
        "inputs": dict(report.inputs),
        "outputs": dict(report.outputs),
        "gathered_inputs": list(report.gathered),
        "caches": dict(report.caches),
        "tokens_of_the_cost_model": report.length,
        "machine": asdict(report.machine),
        "attentions": [_attention_json(choice) for choice in report.choices],
        "linear_layers": [
            {
                "node": each.name,
                "bytes_sent_by_a_rank": each.sent(report.order, report.ranks, report.batch),
            }
            for each in report.handed
        ],
    }


def _attention_json(choice: Choice) -> dict[str, Any]:
    told = {
        "node": choice.name,
        "method": choice.method,
        "bytes_sent_by_a_rank": dict(choice.sent),
        "seconds": dict(choice.seconds),
        "refused": dict(choice.refused),
    }
    return told if choice.held is None else {**told, "bytes_of_the_caches_of_a_rank": choice.held}


@takes(ShardKeywords, ParallelOptions)
def shard(
    model: ModelLike,
    output: str | os.PathLike[str],
    sequence_parallel: int,
    *,
    assume: Iterable[str] = (),
    progress: Progress | None = None,
    **options: Unpack[ShardKeywords],
) -> Sharded:
    """Fuse a model, and write the model that several ranks run, each on its part of the sequence.

    Args:
        model: as `optimize` takes it.
        output: a new or empty folder, or one that an earlier call wrote. It gets model.onnx, its
            weights if they are external, and report.json.
        sequence_parallel: the number of ranks.
        assume: as `optimize` takes it. Without "shared-caches", "separate-caches" is added: the
            ranks run so.
        progress: is called while the model is fused.
        **options: the fields of `ParallelOptions`.

    Raises:
        InputError: the model, an option or the folder is at fault, or the model mixes the sequence
            in a way that no rank can compute from its part; the text names the node. Nothing was
            written.
    """
    with names_of_python(ParallelOptions):
        return write_sharded(
            model, path_of(output), parallel_options(sequence_parallel, **options), assume, progress
        )


def parallel_options(sequence_parallel: int, **options: Unpack[ShardKeywords]) -> ParallelOptions:
    """The options of `shard` as a record. Raises InputError for one that there is not."""
    return _checked(ParallelOptions(sequence_parallel, **read_options(options, ParallelOptions)))


def write_sharded(
    model: ModelLike,
    target: Path,
    chosen: ParallelOptions,
    assume: Iterable[str] = (),
    progress: Progress | None = None,
) -> Sharded:
    """The same as `shard`, with errors that speak of the options of the command line."""
    fusing = replace(make_options(assume=_assumed(assume)), divided=True)
    loaded = load(model)
    refuse_sharded(loaded.proto, loaded.name)
    if metadata_of(loaded.proto, METADATA) is not None:
        raise InputError(
            f"{loaded.name} has its caches in place; give the model from which it was made"
        )
    check_target(target)
    with without_collections():
        fused, fusion, _ = fuse_loaded(loaded, fusing, progress)
        try:
            result, report = shard_graph(fused, chosen)
        except Refusal as refusal:
            raise InputError(told(loaded, refusal, fusion)) from None
        proto = proto_of(loaded, result)
    problem = checker.fault(proto, full=False)
    if problem is not None:
        raise InternalError(f"{loaded.name}: the sharded model is not valid: {problem}")
    sharded = Sharded(target / MODEL, report, fusion)
    _write(proto, loaded, target, sharded)
    return sharded


def _assumed(assume: Iterable[str]) -> tuple[str, ...]:
    """What is assumed. The ranks run with a past and a present that are separate buffers."""
    given = words_of(assume)
    return given if SHARED_CACHES in given else (*given, SEPARATE_CACHES)


def _checked(options: ParallelOptions) -> ParallelOptions:
    check_request(options.ranks, options.method, (*METHODS, MERGE))
    if options.length < 1 or options.batch < 1:
        raise InputError(
            f"{options.length} tokens in a batch of {options.batch}: give numbers from 1 upwards"
        )
    for name, number in asdict(options.machine).items():
        if not (0 < number < math.inf or (name == "latency" and number == 0)):
            raise InputError(f"{name} is {number:g}: give a number above 0")
    return options


def check_request(
    ranks: int, method: str, methods: Sequence[str] = METHODS, least: int = 1
) -> None:
    """Raise InputError for a number of ranks or a method that there is not."""
    if not isinstance(ranks, Integral) or not least <= ranks <= MOST_RANKS:
        raise InputError(f"{ranks!r} ranks: give a number from {least} to {MOST_RANKS}")
    if method not in ("auto", *methods):
        raise InputError(f"unknown method {method!r}{suggestion(method, ('auto', *methods))}")


def told(loaded: LoadedModel, refusal: Refusal, fusion: Report) -> str:
    """The sentence of a refusal; an operator of a fused file or an attention that was declined may
    be why."""
    declined = [
        block
        for block in fusion.blocks
        if block.status == "declined" and block.kind != "convolution"
    ]
    text = f"{loaded.name} cannot be divided along the sequence: {refusal.sentence}"
    if refusal.node is not None and refusal.node.domain == DOMAIN:
        text += "; give the model as it was before it was fused, because this command fuses it"
    elif declined:
        text += f"; the attention at '{declined[0].anchor}' was not fused: {declined[0].reason}"
    return text


def _write(proto: onnx.ModelProto, loaded: LoadedModel, target: Path, sharded: Sharded) -> None:
    with new_folder(target) as folder:
        with staging() as stage:
            write_model(proto, loaded, folder / MODEL, stage, sharded.fusion)
            stage.commit()
        (folder / REPORT).write_text(json.dumps(sharded.to_json()), encoding="utf-8", newline="\n")
