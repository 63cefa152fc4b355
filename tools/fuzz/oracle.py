"""Is a fused model what the original is? Both run in ONNX Runtime on the same feeds.

A finding is
- a difference beyond the tolerance, or NaN or an infinity at another place, where all inputs are finite;
- where inputs hold NaN or infinities: one in the fused model's result that the original's lacks, another finite
  number, or a finite number in place of the original's NaN or infinity, unless it belongs to a masked key: values at
  masked keys are not read (recognised.md), so the original's result without the NaN must not depend on what stands
  there;
- a run that only the original ends;
- either of these where ONNX Runtime runs the bodies of the fused nodes, without the library of kernels, and where it
  optimises the fused model, at any of its levels. Where the original at this level does not load, or its own output
  differs from the one without optimisations, nothing is asked of the fused output at this level;
- an exception of the fusion, an invalid result, a report that misses a softmax or a decline that does not say why;
- another result for the same model, and a fusion that takes seconds.

`difference.py` says when two results agree. Scores of attended keys are taken to be finite, and in float32 smaller than
the numbers of masks (recognised.md): a difference does not count where the scores of a plain feed may be anything else,
nor where a rounding of the scores decides.
"""

from __future__ import annotations

import itertools
import re
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx
import onnxruntime as ort

import fa_compiler
from fa_compiler.errors import FaCompilerError, InputError
from fa_compiler.op_registry import DOMAIN, DOMAINS, FILE_DOMAIN, FILE_OPS, GRAPH_OP, get
from fa_compiler.op_registry.runtimes import DOMAINS as STANDARD
from fa_compiler.passes import Block, Report
from fa_compiler.passes.answer.options import Target
from fa_compiler.protos.subgraphs import all_nodes
from tools.fuzz.difference import BASE, LEVELS, Array, Comparison, Feed, evaluated, run_original, session
from tools.fuzz.file_parts import as_checked, single_weights
from tools.fuzz.kind import Finding, Outcome

SLOW_S = 5.0
SWALLOWED = 1e22
"""Scores up to this are lost beside -1e30 in float32, the number of masks that is smallest: it rounds by up to 3e22."""
ROUNDED = 1e7
"""A score of this size is known to 1, and so is no softmax: of larger ones only NaN and infinities are compared."""
SCORE_BITS = 2.0**-22 / BASE["float32"]
"""A score is known to some of its last bits, and a probability to as many parts of itself."""
NARROWED = 400.0
"""A Cast to 16 bits and back is left out, as every rounding between operators that become one."""
NARROWED_SCORE = 8.0
"""Scores up to this are rounded to bfloat16 by 2^-6, which NARROWED allows for."""
VANISHING = 1e4
"""Rounded scores of this size are known to 1e-3: an infinite value may meet a probability of 0, or one next to it."""
STEEP_STYLES = ("near", "large", "huge", "large scores")
ENLARGED = re.compile(r"(Mul|Div) (of|-?\d)|\w is -?\d")
"""Changes that may make scores large."""
UNCONSTRUCTED = "must contain a constructed tensor"
"""Of ONNX Runtime: without optimisations it loses a Cast to float64 and back whose result only a branch reads."""
ALLOWS_ZERO = 14
"""From this opset on a Reshape can make a size of 0 in every place."""
BODIES_OF = 4
"""One of so many fused models runs without the library, too."""
LEVELS_OF = 6
"""One of so many fused models is optimised as well, at one level, if its judge asks for none."""
TWO_WEIGHTS = "weights have the name"
"""What the checks of a model say of two weights with one name and other numbers."""
REFUSALS = (
    "has shape",
    "shall have same",
    "should be same as total_sequence_length",
    "cannot be reshaped",
    "cumulative lengths",
    "MatMul dimension mismatch",
    "by a dimension other than 1",
)
"""What kernels and operators say of sizes that do not agree."""
STEEP = 1e3
"""Where scores are larger, gradients are anything: differences of sums that rounded probabilities weight."""


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
    """Does it hold NaN or an infinity as a factor? Then NaN and infinities at other places are no fault."""
    terms: Callable[[Feed, str], float] | None = None
    """How large the terms are that an output sums up, where they may cancel: its tolerance is relative to these."""
    hides_nan: bool = False
    """Does the original hide NaN, as ONNX Runtime's own attention kernels do? Then NaN and infinities are looked at
    only where they are at masked keys."""
    rough: float = 1.0
    """How many times as far results may part; not once where the original rounds what the fused model does not."""
    most: float = SWALLOWED
    """How large scores may be that results are compared of."""
    loose: bool = False
    """Does it leave sizes open that need not agree: without names, or in a model that was changed? Then a refusal of
    shapes is right (recognised.md)."""
    target: Target = "ort"
    runtime: str | None = None
    truth: onnx.ModelProto | None = None
    """What the fused model is to be, if not the model itself, as where it leaves out what the user needs not."""
    levels: Mapping[str, ort.GraphOptimizationLevel] | None = None
    """The levels of optimisation at which the fused model runs as well as without any; None draws one at times."""
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
            result = self._optimized()
        except FaCompilerError as error:
            return self.refused(error)
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
            other = self._optimized()
            if other.model.SerializeToString(deterministic=True) != fused.SerializeToString(deterministic=True):
                return self._found(word, "another result for the same model", _described(result.report))
        if word != "fused":
            # Which nothing else runs.
            flex = any(node.op_type == "FlexAttention" for node in all_nodes(self.model.graph.node))
            inlined = flex or bool(self.model.functions)
            if fused.graph != single_weights(self.model).graph and not inlined:
                return self._found(word, "a declined model was changed", _described(result.report))
            return Outcome(word)
        finding = self._compared(fused, result.report)
        if finding is None and not self.ran:
            word = "no run"
        return Outcome(word, finding)

    def _optimized(self) -> fa_compiler.Result:
        return fa_compiler.optimize(self.model, target=self.target, runtime=self.runtime, assume=self.assume)

    def refused(self, error: FaCompilerError) -> Outcome:
        """A refusal is right where ONNX Runtime refuses the model, too, or the checker does, or where no run of it
        ends that computes anything, as with sizes that contradict each other; an internal error is not, where ONNX
        Runtime takes the model. Of two weights with one name and other numbers it takes the last."""
        if isinstance(error, InputError) and TWO_WEIGHTS in str(error):
            return Outcome("refused")
        try:
            if isinstance(error, InputError):
                onnx.checker.check_model(as_checked(self.model), full_check=True)
            original = session(self.model, custom=False)
        except Exception:  # they share no class
            return Outcome("refused")
        if not any(_runs(original, feed) for feed in self._computing()):
            return Outcome("refused")
        title = re.sub(r"node name: [^)]*|'[^']*'|model: |\[ShapeInferenceError\]", "", str(error))
        return self._found("refused", f"{type(error).__name__}: {_unnumbered(title)[:100]}", str(error))

    def _found(self, word: str, title: str, detail: str) -> Outcome:
        return Outcome(word, Finding(title, f"{self.note}\n{detail}", self.model.SerializeToString()))

    def _given(self) -> Sequence[Feed]:
        return self.feeds() if callable(self.feeds) else self.feeds

    def _computing(self) -> list[Feed]:
        """The inputs that have elements."""
        return [feed for feed in self._given() if not feed.empty]

    # -- runs ---------------------------------------------------------------------------------------

    def _compared(self, fused: onnx.ModelProto, report: Report) -> Finding | None:
        truth = self.truth or self.model
        try:
            original = session(truth, custom=False)
        except Exception:  # of ONNX Runtime: it does not take the original
            return None
        # Two masks of -1e5 over a whole row round the scores to 0.016, which who vouches for them takes for nothing.
        rough = max(self.rough, 4000.0 if "masks-dominate" in self.assume else 1.0)
        what = "; ".join(sorted({_short(block) for block in report.blocks if block.status == "fused"}))
        data = self.model.SerializeToString()
        text = f"{self.note}\n{_described(report)}\n"
        try:
            second = session(fused, custom=True)
        except Exception as error:
            if not any(_runs(original, feed) for feed in self._given()):
                return None  # nor does the original run
            title = f"the fused model does not load: {_unnumbered(str(error))} [{what}]"
            return Finding(title, text + str(error), data)
        runs: list[_Run] = [_Run("", second)]
        if _has_bodies(fused) and zlib.crc32(data) % BODIES_OF == 0:
            try:
                runs.append(_Run("without the library: ", session(fused, custom=False)))
            except Exception as error:
                return Finding(f"the fused model does not load without the library [{what}]", text + str(error), data)
        for name, level in self._levels(zlib.crc32(data)).items():
            try:
                optimised = session(truth, custom=False, level=level)
            except Exception:  # of ONNX Runtime: it does not take the original at this level
                continue
            try:
                runs.append(_Run(f"at level {name}: ", session(fused, custom=True, level=level), optimised))
            except Exception as error:
                title = f"at level {name}: the fused model does not load: {_unnumbered(str(error))} [{what}]"
                return Finding(title, text + str(error), data)
        rejected: Feed | None = None
        for feed, each in itertools.product(self._given(), runs):
            how = each.how
            try:
                wanted = run_original(original, feed.arrays)
            except Exception:  # these inputs are none for the original
                continue
            self.ran += 1
            self.shown = feed
            compared = Comparison(truth, original, feed, self.hides_nan, rough, "real_shift" in what)
            try:
                got = run_fused(each.fused, feed.arrays)
            except Exception as error:
                if UNCONSTRUCTED in str(error):
                    continue
                # Of no elements the original makes any shape. Labels of a larger batch make more sequences than rows.
                refused = any(words in str(error) for words in REFUSALS)
                loose = feed.lenient or (self.loose and (feed.empty or refused))
                if loose or feed is rejected or (feed.empty and _opset(self.model) < ALLOWS_ZERO):
                    rejected = feed  # what the kernel refuses for good reason its body may refuse, too
                    continue
                title = f"{how}the fused model does not run: {_unnumbered(str(error))} [{self.group}{what}]"
                return Finding(title, f"{text}{_feed_text(feed)}\n{error}", data)
            names = [output.name for output in self.model.graph.output]
            for name, left, right in zip(names, wanted, got, strict=True):
                if feed.lenient and feed.empty:
                    continue  # beside a size of 0 that does not agree ONNX Runtime reads memory behind the tensor
                if self.loose and (not left.size or (feed.lenient and left.shape != right.shape)):
                    continue  # sizes that do not agree, or only where one is 0
                if feed.empty and not _as_declared(self.model, feed, name, left.shape):
                    continue  # a Reshape took a size of 0 for a copy of another one
                fault = self._fault(compared, fused, names.index(name), left, right)
                if fault is not None and each.is_changed(compared, names.index(name), left):
                    continue
                if fault is not None and each.original is None and how and compared.is_short:
                    exact = evaluated(fused, feed.arrays)
                    right = right if exact is None else exact[names.index(name)]
                    fault = self._fault(compared, fused, names.index(name), left, right)
                if fault is not None and feed.empty and not any(_runs(original, each) for each in self._computing()):
                    continue  # sizes that contradict each other, but for a 0 that copies another
                if fault is not None:
                    detail = f"{text}output {name}: {fault[1]}\n{_feed_text(feed)}"
                    return Finding(f"{how}{fault[0]} [{self.group}{what}]", detail, data)
        return None

    def _levels(self, drawn: int) -> Mapping[str, ort.GraphOptimizationLevel]:
        """The levels at which the fused model runs beside none."""
        if self.levels is not None:
            return self.levels
        if drawn % LEVELS_OF:
            return {}
        name = list(LEVELS)[drawn // LEVELS_OF % len(LEVELS)]
        return {name: LEVELS[name]}

    def _fault(
        self, compared: Comparison, fused: onnx.ModelProto, index: int, left: Array, right: Array
    ) -> tuple[str, str] | None:
        """The fault in an output that neither undefined factors nor the size of the scores excuses."""
        feed = compared.feed
        least = 0.0 if self.terms is None else self.terms(feed, self.model.graph.output[index].name)
        fault = compared.fault(index, left, right, least)
        if fault is None:
            return None
        if self.undefined and ("numbers" not in fault[0] or feed.spoiled or self.hides_nan or _empties_rows(fused)):
            return None
        score = largest_score(fused, _finite(feed), feed.name in STEEP_STYLES or bool(ENLARGED.search(self.note)))
        if feed.spoiled:
            return None if score > VANISHING else fault
        if not score < (self.most if "numbers" not in fault[0] else min(self.most, ROUNDED)):
            return None
        lost = score / NARROWED_SCORE if self.rough >= NARROWED else score * SCORE_BITS
        known = replace(compared, rough=compared.rough * max(1.0, lost))
        return known.fault(index, left, right, least)


@dataclass(frozen=True)
class _Run:
    """A session of the fused model, and the words for a finding in it. `original` is the truth at the same level of
    optimisation; None where there is none."""

    how: str
    fused: ort.InferenceSession
    original: ort.InferenceSession | None = None

    def is_changed(self, compared: Comparison, index: int, wanted: Array) -> bool:
        """Do ONNX Runtime's optimisations change this output of the original, too?"""
        if self.original is None:
            return False
        try:
            found = run_original(self.original, compared.feed.arrays)[index]
        except Exception:  # of ONNX Runtime: they share no class
            return True
        return compared.fault(index, wanted, found) is not None


def _finite(feed: Feed) -> Feed:
    """The feed with 0 in place of NaN and infinities."""
    arrays = {name: np.where(np.isfinite(array), array, 0).astype(array.dtype) for name, array in feed.arrays.items()}
    return replace(feed, arrays=arrays) if feed.spoiled else feed


def _empties_rows(fused: onnx.ModelProto) -> bool:
    """Does a fused attention give probabilities of 0 to rows whose scores are NaN?"""
    fused_nodes = (node for node in all_nodes(fused.graph.node) if node.domain in DOMAINS)
    return any(attr.name == "cpu_nan_rows" and attr.s for node in fused_nodes for attr in node.attribute)


def _has_bodies(fused: onnx.ModelProto) -> bool:
    """Does ONNX Runtime run the fused model without the library of kernels? Then every fused node has a body."""
    bodies = any(function.domain == FILE_DOMAIN for function in fused.functions)
    return bodies and all(node.domain != DOMAIN for node in all_nodes(fused.graph.node))


def _as_declared(model: onnx.ModelProto, feed: Feed, name: str, shape: Sequence[int]) -> bool:
    """Does an output of the original have the sizes that the model declares, with the sizes of the inputs?"""
    sizes = {
        dim.dim_param: size
        for each in model.graph.input
        if each.name in feed.arrays
        for dim, size in zip(each.type.tensor_type.shape.dim, feed.arrays[each.name].shape, strict=False)
        if dim.dim_param
    }
    dims = next(each.type.tensor_type.shape.dim for each in model.graph.output if each.name == name)
    wanted = [dim.dim_value if dim.HasField("dim_value") else sizes.get(dim.dim_param) for dim in dims]
    return all(have in (size, None) for have, size in zip(wanted, shape, strict=False))


def _opset(model: onnx.ModelProto) -> int:
    return next((each.version for each in model.opset_import if each.domain in ("", "ai.onnx")), ALLOWS_ZERO)


def _runs(original: ort.InferenceSession, feed: Feed) -> bool:
    try:
        run_original(original, feed.arrays)
    except Exception:  # of ONNX Runtime: these inputs are none for the original
        return False
    return True


def run_fused(fused: ort.InferenceSession, arrays: Mapping[str, Array]) -> list[Array]:
    """All outputs of the fused model."""
    return list(fused.run(None, dict(arrays)))


def largest_score(fused: onnx.ModelProto, feed: Feed, steep: bool) -> float:
    """A bound of all scores of the fused attentions in the main graph, 0 without any. Infinite where one may be beyond
    the numbers of its type, or where all attentions lie in subgraphs and their scores are made large (`steep`)."""
    nodes = [node for node in fused.graph.node if _is_attention(node)]
    if not nodes and steep and any(map(_is_attention, all_nodes(fused.graph.node))):
        return np.inf
    pairs = {node.name: _products(node) for node in nodes}
    operands = sorted({name for products in pairs.values() for pair in products for name in pair})
    shown = onnx.ModelProto()
    shown.CopyFrom(fused)
    del shown.graph.output[:]
    shown.graph.output.extend(onnx.ValueInfoProto(name=name) for name in operands)
    try:
        arrays = dict(zip(operands, run_fused(session(shown, custom=True), feed.arrays), strict=True))
    except Exception:  # of ONNX Runtime: an operand that is none of its tensors
        return 0.0
    bound = 0.0
    for node in nodes:
        scale = next((attr.f for attr in node.attribute if attr.name in ("scale", "scale_value")), 1.0)
        for query, key in (map(arrays.__getitem__, pair) for pair in pairs[node.name]):
            if not query.size or not key.size:
                continue
            most = float(np.finfo(np.float16).max) if query.dtype == np.float16 else np.inf
            largest = [float(np.abs(each.astype(np.float64)).max()) for each in (query, key)]
            score = abs(scale) * largest[0] * largest[1] * query.shape[-1]
            bound = max(bound, score if score < most else np.inf)
    return bound


def _is_attention(node: onnx.NodeProto) -> bool:
    """Is it a fused node of any target?"""
    return node.domain in DOMAINS or STANDARD.get(node.op_type) == node.domain


def _products(node: onnx.NodeProto) -> list[tuple[str, str]]:
    """The operands of the products that a fused node's scores are sums of: query and key, and their parts with rope."""
    if node.op_type in STANDARD:
        return [(node.input[0], node.input[1])] if len(node.input) > 1 and node.input[1] else []
    operator = GRAPH_OP if node.domain == FILE_DOMAIN and node.op_type in FILE_OPS else node.op_type
    given = dict(zip(get(operator).input_names, node.input, strict=False))
    named = [(given.get(f"query{part}", ""), given.get(f"key{part}", "")) for part in ("", "_rope")]
    return [(query, key) for query, key in named if query and key]


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
