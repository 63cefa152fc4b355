"""Is a fused model what the original is? Both run in ONNX Runtime on the same feeds.

A finding is
- a difference beyond the tolerance, or NaN or an infinity at another place, where all inputs are finite;
- where inputs hold NaN or infinities: one in the fused model's result that the original's lacks, another finite
  number, or a finite number in place of the original's NaN or infinity, unless it belongs to a masked key: values at
  masked keys are not read (README), so the original's result without the NaN must not depend on what stands there;
- a run that only the original ends;
- an exception of the fusion, an invalid result, a report that misses a softmax or a decline that does not say why;
- another result for the same model, and a fusion that takes seconds.

The tolerance. Both models round, in another order. How much rounding may change a result depends on the numbers: scores
of 1e6 are known to 0.06, and so is no softmax of them. So an output agrees within `BASE` of its largest number, and
beyond that within `FACTOR` times what a change of the inputs by half of their last bit does to the original. Numbers
of masks are left as they are: what is lost beside them is lost on purpose. In float16 ONNX Runtime computes most nodes
in float32, and so do the kernels: there the half of the last bit is float16's, which bounds what either rounds.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort

import fa_compiler
from fa_compiler.errors import FaCompilerError, InputError
from fa_compiler.lowering.ort import register_custom_ops
from fa_compiler.passes import Block, Report
from fa_compiler.subgraphs import all_nodes
from tests.fuzz.kind import Finding, Outcome

Array = npt.NDArray[Any]

BASE = {"float32": 1e-5, "float64": 1e-5, "float16": 4e-3}
FACTOR = 32.0
TINY = 1e-30
"""Beside this, numbers without a normal representation may become 0."""
SHAKES = 3
SLOW_S = 5.0
VALUES = ("q", "k", "v")
LAST_BIT = {"float32": 2.0**-24, "float64": 2.0**-24, "float16": 2.0**-11}

LARGEST = float(np.finfo(np.float32).max)
EXACT = (0.0, 1.0, 2.0, 3.0, 1e3, 1e4, 3e4, 32752.0, 65504.0, 1e5, 1e9, 1e10, 1e30, 3e38, LARGEST / 2, LARGEST)
EXACT_NUMBERS = {
    name: np.array(sorted({sign * float(np.dtype(name).type(x)) for x in EXACT for sign in (1, -1) if x < limit}), name)
    for name, limit in (("float16", 1e5), ("float32", np.inf), ("float64", np.inf))
}
"""What masks are made of: never shaken."""


@dataclass(frozen=True)
class Feed:
    """Inputs for one run. `lenient` where sizes the graph leaves open do not agree, so that a refusal is right;
    `spoiled` are the inputs that were given NaN or infinities."""

    name: str
    arrays: Mapping[str, Array]
    lenient: bool = False
    spoiled: tuple[str, ...] = ()


@dataclass
class Judge:
    """What is asked of one model. `again` fuses it twice."""

    model: onnx.ModelProto
    feeds: Sequence[Feed] | Callable[[], Sequence[Feed]]
    assume: Sequence[str] = ()
    again: bool = False
    note: str = ""
    """Of what the case is made, for the finding's detail."""
    group: str = ""
    """What to tell findings apart by, besides what was fused."""
    undefined: bool = False
    """Does it hold NaN or an infinity as a factor? Then what a masked key's NaN did to the original is no fault."""
    terms: Callable[[Feed, str], float] | None = None
    """How large the terms are that an output sums up, where they may cancel: its tolerance is relative to these."""
    hides_nan: bool = False
    """Does the original hide NaN, as ONNX Runtime's own attention kernels do? Then NaN and infinities are looked at
    only where they are at masked keys."""
    ran: int = field(default=0, init=False)
    shown: Feed | None = field(default=None, init=False)
    """The feed that shows the fault."""

    def on(self, model: onnx.ModelProto, feed: Feed) -> Judge:
        """The same judge on another model, with one feed."""
        return replace(self, model=model, feeds=[feed], again=False)

    def outcome(self) -> Outcome:
        """What became of the model."""
        start = time.process_time()
        try:
            result = fa_compiler.optimize(self.model, assume=self.assume)
        except FaCompilerError as error:
            return self._refused(error)
        seconds = time.process_time() - start
        fused = result.model
        assert isinstance(fused, onnx.ModelProto)
        word = "fused" if result.report.count("fused") else "declined" if result.report.blocks else "skipped"
        if seconds > SLOW_S:
            return self._found(word, "the fusion takes seconds", f"{seconds:.1f} s")
        problem = report_fault(self.model, result.report, self.assume)
        if problem is not None:
            return self._found(word, problem, _described(result.report))
        if self.again:
            other = fa_compiler.optimize(self.model, assume=self.assume)
            if other.model.SerializeToString(deterministic=True) != fused.SerializeToString(deterministic=True):
                return self._found(word, "another result for the same model", _described(result.report))
        if word != "fused":
            inlined = any(node.op_type == "FlexAttention" for node in self.model.graph.node)  # which nothing else runs
            if fused.graph != self.model.graph and not inlined:
                return self._found(word, "a declined model was changed", _described(result.report))
            return Outcome(word)
        finding = self._compared(fused, result.report)
        if finding is None and not self.ran:
            word = "no run"
        return Outcome(word, finding)

    def _refused(self, error: FaCompilerError) -> Outcome:
        """A refusal is right where ONNX Runtime refuses the model, too, or the checker does; an internal error is not,
        where ONNX Runtime takes the model."""
        try:
            if isinstance(error, InputError):
                onnx.checker.check_model(self.model, full_check=True)
            session(self.model, custom=False)
        except Exception:  # they share no class
            return Outcome("refused")
        title = re.sub(r"node name: [^)]*|'[^']*'|model: |\[ShapeInferenceError\]", "", str(error))
        return self._found("refused", f"{type(error).__name__}: {_unnumbered(title)[:100]}", str(error))

    def _found(self, word: str, title: str, detail: str) -> Outcome:
        return Outcome(word, Finding(title, f"{self.note}\n{detail}", self.model.SerializeToString()))

    # -- runs ---------------------------------------------------------------------------------------

    def _compared(self, fused: onnx.ModelProto, report: Report) -> Finding | None:
        try:
            original = session(self.model, custom=False)
        except Exception:  # of ONNX Runtime: it does not take the original
            return None
        # A mask of -65504 over a whole row rounds the scores to 0.004, which who vouches for it takes for nothing.
        rough = 1000.0 if "masks-dominate" in self.assume else 1.0
        what = "; ".join(sorted({_short(block) for block in report.blocks if block.status == "fused"}))
        data = self.model.SerializeToString()
        text = f"{self.note}\n{_described(report)}\n"
        try:
            second = session(fused, custom=True)
        except Exception as error:
            title = f"the fused model does not load: {_unnumbered(str(error))} [{what}]"
            return Finding(title, text + str(error), data)
        for feed in self.feeds() if callable(self.feeds) else self.feeds:
            try:
                wanted = run_original(original, feed.arrays)
            except Exception:  # these inputs are none for the original
                continue
            self.ran += 1
            self.shown = feed
            try:
                got = run_fused(second, feed.arrays)
            except Exception as error:
                if feed.lenient:
                    continue
                title = f"the fused model does not run: {_unnumbered(str(error))} [{self.group}{what}]"
                return Finding(title, f"{text}{_feed_text(feed)}\n{error}", data)
            names = [output.name for output in self.model.graph.output]
            for name, left, right in zip(names, wanted, got, strict=True):
                least = 0.0 if self.terms is None else self.terms(feed, name)
                fault = difference(original, feed, names.index(name), left, right, self.hides_nan, rough, least)
                if self.undefined and fault is not None and "is lost" in fault[0]:
                    fault = None
                if fault is not None:
                    detail = f"{text}output {name}: {fault[1]}\n{_feed_text(feed)}"
                    return Finding(f"{fault[0]} [{self.group}{what}]", detail, data)
        return None


_OPTIONS: dict[bool, ort.SessionOptions] = {}


def session(model: onnx.ModelProto, custom: bool) -> ort.InferenceSession:
    """A session that computes every node as it is written, in one thread."""
    if custom not in _OPTIONS:
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        if custom:
            register_custom_ops(options)
        ort.set_default_logger_severity(4)
        _OPTIONS[custom] = options
    return ort.InferenceSession(model.SerializeToString(), _OPTIONS[custom], providers=["CPUExecutionProvider"])


def run_original(original: ort.InferenceSession, arrays: Mapping[str, Array]) -> list[Array]:
    """All outputs of the model as it was given. A process that ends here shows a fault of ONNX Runtime, not of ours."""
    return list(original.run(None, dict(arrays)))


def run_fused(fused: ort.InferenceSession, arrays: Mapping[str, Array]) -> list[Array]:
    """All outputs of the fused model."""
    return list(fused.run(None, dict(arrays)))


def difference(
    original: ort.InferenceSession,
    feed: Feed,
    index: int,
    wanted: Array,
    got: Array,
    hides_nan: bool = False,
    rough: float = 1.0,
    least: float = 0.0,
) -> tuple[str, str] | None:
    """A title and a description of how two results differ; None where they agree."""
    if not isinstance(wanted, np.ndarray):
        return None
    if wanted.dtype != got.dtype or wanted.shape != got.shape:
        return "another type or shape", f"{got.dtype}{got.shape} instead of {wanted.dtype}{wanted.shape}"
    if wanted.dtype.kind != "f":
        if feed.spoiled:
            return None  # what NaN becomes as a whole number says nothing
        return None if (wanted == got).all() else ("other numbers in an output that is no float", "")
    base = BASE[str(wanted.dtype)] * rough
    left, right = wanted.astype(np.float64), got.astype(np.float64)
    near_by = base * max(_size(left), least) + TINY
    if _same(left, right, near_by):
        return None
    finite = not feed.spoiled
    excused = np.zeros(left.shape, np.bool_)
    lost = ~np.isfinite(left) & np.isfinite(right)
    clean = [_without(original, feed, index, number) for number in (0.0, 1.0, -3.0)] if not finite else []
    with np.errstate(all="ignore"):
        if clean and hides_nan:
            # Where the result depends on what stands there, or the NaN had an effect, the key is not masked.
            excused = np.abs(clean[0] - clean[1]) + np.abs(clean[0] - clean[2]) > base * _size(clean[0])
            excused |= ~(np.abs(left - clean[0]) <= base * _size(clean[0]))
        if clean and lost.any():
            # A masked key has no weight whatever stands there: the fused result is the one without it.
            masked = [np.abs(each - right) <= base * _size(each) * 10 for each in clean]
            excused |= lost & np.logical_and.reduce(masked)
    if not finite:
        # No finite number was lost: infinity times 0, or times next to nothing.
        excused |= (np.isinf(left) & np.isnan(right)) | (np.isnan(left) & np.isinf(right))
    # A sum at the end of the type's range may be beyond it in another order.
    end = 0.999 * float(np.finfo(wanted.dtype).max)
    with np.errstate(all="ignore"):
        excused |= (np.isinf(left) & (np.abs(right) >= end)) | (np.isinf(right) & (np.abs(left) >= end))
        same = excused | (left == right) | (np.isnan(left) & np.isnan(right))
        near = np.abs(left - right) <= near_by
    wrong = ~(same | (near & np.isfinite(left) & np.isfinite(right)))
    if not wrong.any():
        return None
    bound = near_by + FACTOR * _noise(original, feed, index, left)
    with np.errstate(all="ignore"):
        wrong &= ~(np.abs(left - right) <= bound)
        wrong &= ~np.isinf(bound)
    if not wrong.any():
        return None
    place = tuple(int(axis[0]) for axis in np.nonzero(wrong))
    text = f"{right[place]!r} instead of {left[place]!r} at {place}, {int(wrong.sum())} of {wrong.size} elements; "
    text += f"tolerated are {bound[place]:.3g}"
    return _title(left[place], right[place], finite), text


def _title(left: float, right: float, finite: bool) -> str:
    inputs = "" if finite else " where inputs hold NaN or infinities"
    if np.isnan(left) != np.isnan(right):
        return ("NaN is lost" if np.isnan(left) else "NaN is gained") + inputs
    if np.isinf(left) != np.isinf(right):
        return ("infinity is lost" if np.isinf(left) else "infinity is gained") + inputs
    return f"other numbers{inputs}"


def _same(left: Array, right: Array, tolerance: float) -> bool:
    with np.errstate(all="ignore"):
        agree = (np.abs(left - right) <= tolerance) | (left == right) | (np.isnan(left) & np.isnan(right))
    return bool(agree.all())


def _size(array: Array) -> float:
    return float(np.max(np.abs(array), where=np.isfinite(array), initial=0.0))


def _without(original: ort.InferenceSession, feed: Feed, index: int, number: float) -> Array:
    """The original's result where a number stands in place of NaN and infinities of the inputs."""
    arrays = dict(feed.arrays)
    for name in feed.spoiled:
        array = arrays[name]
        # -inf in a mask is a number of masks.
        wrong = ~np.isfinite(array) if name in VALUES else np.isnan(array) | np.isposinf(array)
        arrays[name] = np.where(wrong, np.array(number, array.dtype), array)
    result: Array = run_original(original, arrays)[index].astype(np.float64)
    return result


def _noise(original: ort.InferenceSession, feed: Feed, index: int, plain: Array) -> Array:
    """How far the original's result moves when its inputs move by half of their last bit, the largest of each row;
    infinite where it is a number now and then only."""
    rng = np.random.default_rng(0)
    worst = np.zeros(plain.shape)
    for _ in range(SHAKES):
        arrays = {name: shaken(array, rng) for name, array in feed.arrays.items()}
        moved = run_original(original, arrays)[index].astype(np.float64)
        with np.errstate(all="ignore"):
            change = np.abs(moved - plain)
            change[(moved == plain) | (np.isnan(moved) & np.isnan(plain))] = 0.0
            change[np.isnan(change)] = np.inf
        worst = np.maximum(worst, change)
    if plain.ndim and plain.size:
        worst = np.broadcast_to(worst.max(axis=-1, keepdims=True), plain.shape)
    return worst


def shaken(array: Array, rng: np.random.Generator) -> Array:
    """The array with random changes by half of the last bit, numbers of masks left alone."""
    if array.dtype.kind != "f":
        return array
    steps = rng.uniform(-2.0, 2.0, array.shape) * LAST_BIT[str(array.dtype)]
    with np.errstate(all="ignore"):
        moved = (array.astype(np.float64) * (1.0 + steps)).astype(array.dtype)
    return np.where(np.isin(array, EXACT_NUMBERS[str(array.dtype)]) | ~np.isfinite(moved), array, moved)


def report_fault(model: onnx.ModelProto, report: Report, assume: Sequence[str] = ()) -> str | None:
    """What is wrong with a report, as a title; None if nothing."""
    anchors = {block.anchor for block in report.blocks}
    for node in model.graph.node:
        if node.op_type == "Softmax" and not node.domain and not {node.name, *node.output} & anchors:
            return "the report misses a softmax"
    names = {name for node in all_nodes(model.graph.node) for name in (node.name, *node.output)}
    for block in report.blocks:
        if block.status == "fused":
            if not set(block.assumed) <= {*assume, "finite-scores"}:
                return f"the fusion assumes what nobody vouched for: {', '.join(block.assumed)}"
            continue
        if not block.code or not block.reason or not block.culprit:
            return f"a decline without code, reason or culprit: {block.code}"
        if not model.functions and block.culprit not in names:
            return f"the culprit of a decline is no node of the model: {block.code}"
    return None


def _short(block: Block) -> str:
    return f"{block.mask}" if block.op == "FlashAttentionScore" else f"{block.op} {block.mask}"


def _described(report: Report) -> str:
    return "\n".join(
        f"{block.anchor}: {block.status} {block.op or block.code} {block.mask or ''} {block.layout or ''} "
        f"{' '.join(block.extensions)} {block.reason or ''} ({block.culprit or ''})"
        for block in report.blocks
    )


def _feed_text(feed: Feed) -> str:
    with np.printoptions(threshold=200, precision=9):
        return "\n".join([feed.name, *(f"{name} {a.dtype}{list(a.shape)} {a!r}" for name, a in feed.arrays.items())])


def _unnumbered(text: str) -> str:
    """An error's text without what differs from case to case."""
    words = " ".join(text.split())[:160]
    return "".join("#" if char.isdigit() else char for char in words)
