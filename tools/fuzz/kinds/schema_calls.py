"""Calls of operators that are attention already, whose author is the operator's schema (tools/fuzz/schema_calls.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx

import fa_compiler
from fa_compiler.comparison.buffers import buffer_feeds, buffers_of, grown_outputs
from fa_compiler.passes.answer.options import DECODE, SEPARATE_CACHES
from tools.fuzz.difference import Array, Comparison, Feed, run_original, session
from tools.fuzz.kind import Finding, Outcome
from tools.fuzz.kinds.ready_made import LAST_BITS
from tools.fuzz.oracle import Judge, report_fault
from tools.fuzz.reduction import GraphKind
from tools.fuzz.schema_calls import Call

WAYS = ("ort", "ort", "ort", "onnx", "contrib", "ascend", "in place")
DRAWS = 6
"""How many calls are drawn to find one that ONNX Runtime takes."""
ROUNDED = ("Attention", "QAttention")
"""Operators of com.microsoft that add one product after the other to a mask of -1e4."""


class SchemaCalls(GraphKind):
    """One call, fused for one target."""

    def judge(self, seed: int) -> Judge | None:
        drawn = _drawn(seed)
        return None if drawn is None else self._judge(seed, drawn)

    def _judge(self, seed: int, drawn: Drawn) -> Judge:
        call, model, feeds = drawn.call, drawn.model, drawn.feeds
        way = WAYS[seed % len(WAYS)]
        assume = [SEPARATE_CACHES] if call.rng.random() < 0.9 else []
        assume += [DECODE] if call.sizes["S"] == 1 and call.rng.random() < 0.5 else []
        note = f"{call.schema.domain}::{call.schema.name} {call.schema.version} {call.attributes} {call.sizes}"
        group = f"{way}, {call.schema.name} {call.types[call.schema.inputs[0].parameter]}, "
        made = Judge(model, feeds, assume, seed % 64 == 0, note, group, hides_nan=True)
        if call.schema.domain and call.schema.name in ROUNDED:
            made.rough = LAST_BITS
        if way in ("onnx", "contrib"):
            made.target, made.runtime = way, "ort-cpu"
            made.feeds = [feed for feed in feeds if not feed.spoiled and not feed.empty]
        elif way == "ascend":
            made.target = "ascend"
        return made

    def check(self, seed: int) -> Outcome:
        drawn = _drawn(seed)
        if drawn is None:
            return Outcome("skipped")
        judge = self._judge(seed, drawn)
        match WAYS[seed % len(WAYS)]:
            case "ascend":
                return _for_ascend(judge)
            case "in place":
                return _in_place(judge, drawn.feeds[0], drawn.wanted)
        return judge.outcome()


@dataclass(frozen=True)
class Drawn:
    """A call that ONNX Runtime takes, and what it makes of the first inputs."""

    call: Call
    model: onnx.ModelProto
    feeds: Sequence[Feed]
    wanted: Sequence[Array]


def _drawn(seed: int) -> Drawn | None:
    """The first draw that ONNX Runtime takes; None where it takes none."""
    for draw in range(DRAWS):
        call = Call.drawn(seed, draw)
        model, feeds = call.model(), call.feeds(seed)
        try:
            wanted = run_original(session(model, custom=False), feeds[0].arrays)
        except Exception:  # of ONNX Runtime: they share no class
            continue
        return Drawn(call, model, feeds, wanted)
    return None


def _finding(judge: Judge, title: str, detail: str) -> Finding:
    return Finding(title, f"{judge.note}\n{detail}", judge.model.SerializeToString())


def _for_ascend(judge: Judge) -> Outcome:
    """The model is fused or declined, without an error."""
    try:
        result = fa_compiler.optimize(judge.model, target="ascend", assume=judge.assume)
    except fa_compiler.FaCompilerError as error:
        return judge.refused(error)
    # There caches are separate without anybody's word.
    problem = report_fault(judge.model, result.report, [*judge.assume, SEPARATE_CACHES])
    word = "fused" if result.report.count("fused") else "declined"
    return Outcome(word, None if problem is None else _finding(judge, problem, str(result.report)))


def _in_place(judge: Judge, feed: Feed, wanted: Sequence[Array]) -> Outcome:
    """The caches are buffers with room, and results are those of the original."""
    try:
        result = fa_compiler.optimize(judge.model, assume=judge.assume, in_place_caches=True)
    except fa_compiler.FaCompilerError as error:
        return judge.refused(error)
    changed = result.model
    assert isinstance(changed, onnx.ModelProto)
    if not result.report.count("fused"):
        return Outcome("declined")
    names = [value.name for value in judge.model.graph.output]
    outputs, buffers = dict(zip(names, wanted, strict=True)), buffers_of(changed)
    try:
        running = session(changed, custom=True)
        found = running.run(None, buffer_feeds(buffers, feed.arrays, outputs))
    except Exception as error:  # of ONNX Runtime: they share no class
        title = f"in place: the fused model does not run [{judge.group}]"
        return Outcome("fused", _finding(judge, title, f"{result.report}\n{error}"))
    results = grown_outputs(buffers, dict(zip(names, found, strict=True)), outputs)
    biased = any("real_shift" in (block.mask or "") for block in result.report.blocks)
    original = session(judge.model, custom=False)
    compared = Comparison(judge.model, original, feed, judge.hides_nan, judge.rough, biased)
    for index, name in enumerate(names):
        fault = compared.fault(index, wanted[index], results[name])
        if fault is not None:
            return Outcome(
                "fused", _finding(judge, f"in place: {fault[0]} [{judge.group}]", f"{fault[1]}\n{result.report}")
            )
    return Outcome("fused")
