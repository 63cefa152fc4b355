"""Do two results agree, the original's and the fused model's? And where they do not: what excuses it?

The tolerance. Both models round, in another order. How much rounding may change a result depends on the numbers: scores
of 1e6 are known to 0.06, and so is no softmax of them. So an output agrees within `BASE` of its largest number, and
beyond that within `FACTOR` times what a change of the inputs by half of their last bit does to the original. Numbers
of masks are left as they are: what is lost beside them is lost on purpose. In float16 ONNX Runtime computes most nodes
in float32, and so do the kernels: there the half of the last bit is float16's, which bounds what either rounds. An
infinity is as near to a number as the largest number of its type.

What excuses a difference, 2 and 6 to 8 everywhere and the others where inputs or results hold NaN or infinities:
1. Values at masked keys are not read (recognised.md). A key that was given NaN or an infinity is masked for an element
   where other numbers in their place do not change the original's result: there the fused result may be the one without
   them. So it is with NaN that a bias has there because the model subtracts -inf from -inf: what any finite numbers in
   place of -inf give counts, too.
2. ONNX Runtime's kernels do not always compute what ONNX says: its Softmax turns NaN into numbers in some lanes of a
   vector, its Sigmoid loses small results. What onnx's reference evaluation of the original gives is as good, also
   where 1 puts other numbers at masked keys.
3. An infinity in place of NaN, and the reverse: infinity times 0, or times next to nothing; 0 in place of either,
   where the result is next to nothing with any number in place of the infinity.
4. Scores of attended keys are taken to be finite (recognised.md): infinite keys, and factors that make scores infinite,
   are looked at in rows where NaN in their place has no effect. A key that a bias lowers is attended, so NaN or an
   infinity there may be seen. A bias of +inf may give what NaN in its place gives.
5. ONNX Runtime's own attention kernels hide NaN: with `hides_nan` it counts only where a masked key has it.
6. An attention over no keys is 0, also where the original divides 0 by 0 (recognised.md).
7. In 16 bits ONNX Runtime rounds between two nodes or not, as its optimisations leave the graph: what it gives with the
   basic ones is as good as without any, and so is an infinity where onnx's reference evaluation overflows. Of the
   bodies of fused nodes what onnx's reference evaluation gives counts there.
8. Numbers that overflow 16 bits in the original need not do so in the fused model (recognised.md). Where the original
   gives NaN or an infinity, the result may be that of the original with float32 in place of float16.
9. NaN has no integer. Where onnx's reference evaluation rounds NaN by a QuantizeLinear, every integer is as good (2).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from fa_compiler.lowering.ort import register_custom_ops
from tests.contrib_ops import DequantizeLinear, FusedMatMul
from tests.widening import widened

Array = npt.NDArray[Any]

BASE = {"float32": 4e-5, "float64": 4e-5, "float16": 1.6e-2}
"""A term of 300 that all scores of a row have rounds them by 2e-5, four masks of -65504 in float16 by 2^-6."""
FACTOR = 32.0
TINY = 1e-30
"""Beside this, numbers without a normal representation may become 0."""
SMALLEST = {name: float(np.finfo(np.float32).tiny) for name in ("float32", "float64")} | {"float16": 2.0**-23}
"""Probabilities below this may be 0, whatever values they weight. The smallest number of float16 is 2^-24, and a large
sink leaves several keys with less."""
SHAKES = (3, 24)
"""How often the inputs are moved; more often before a difference is called one: few moves round to another multiple."""
VALUES = ("q", "k", "v")
FACTOR_ROLE = "factor"
"""How the names of inputs begin that scores are multiplied with, or divided by."""
LATER_DEQUANTIZE = 19
"""From this opset on onnx's reference evaluation knows DequantizeLinear."""
LAST_BIT = {"float32": 2.0**-24, "float64": 2.0**-24, "float16": 2.0**-11}

LEVELS: Mapping[str, ort.GraphOptimizationLevel] = {
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
"""ONNX Runtime's optimisations. The original runs without any."""

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

    @property
    def empty(self) -> bool:
        """Has an input no elements?"""
        return not all(array.size for array in self.arrays.values())


@dataclass
class Comparison:
    """The original on one feed. Where an input has 16 bits, so has what is computed of it. `rough` widens the
    tolerance; `biased` where the fused model has a bias."""

    model: onnx.ModelProto
    original: ort.InferenceSession
    feed: Feed
    hides_nan: bool = False
    rough: float = 1.0
    biased: bool = False

    def fault(self, index: int, wanted: Array, got: Array, least: float = 0.0) -> tuple[str, str] | None:
        """A title and a description of how the results of an output differ; None where they agree. `least` is how large
        the terms are that cancel in it."""
        if not isinstance(wanted, np.ndarray):
            return None
        if wanted.dtype != got.dtype or wanted.shape != got.shape:
            return "another type or shape", f"{got.dtype}{got.shape} instead of {wanted.dtype}{wanted.shape}"
        if wanted.dtype.kind != "f":
            if self.feed.spoiled or self.feed.empty:
                return None  # no integer is NaN
            same = (wanted == got).all()
            if wanted.dtype.itemsize == 1 and wanted.dtype.kind in "iu":  # quantised, from between two integers
                same = same or self.rough > 1.0 or self._is_a_step_away(index, wanted, got)
                same = same or bool(((wanted == got) | self._is_rounded_nan(index, wanted)).all())  # 9
            return None if same else ("other numbers in an output that is no float", "")
        kind = "float16" if self.is_short else str(wanted.dtype)
        base = BASE[kind] * self.rough
        left, right = wanted.astype(np.float64), got.astype(np.float64)
        largest = max((_size(each) for each in self.feed.arrays.values() if each.dtype.kind == "f"), default=0.0)
        near_by = base * max(_size(left), least) + max(TINY, largest * SMALLEST[kind])
        if _near(left, right, near_by, wanted.dtype).all():
            return None
        wrong = ~_near(left, right, near_by, wanted.dtype) & ~self._excused(index, left, right, base)
        if self.feed.empty:
            wrong &= ~(np.isnan(left) & (right == 0.0))  # 6
        if wrong.any() and self.is_short and (other := self._optimised) is not None:
            wrong &= ~_near(other[index].astype(np.float64), right, near_by, wanted.dtype)  # 7
        if not wrong.any():
            return None
        for times in SHAKES:
            with np.errstate(all="ignore"):
                bound = near_by + FACTOR * self._noise(self.original, index, left, times)
                wrong &= ~(np.abs(left - right) <= bound) & ~np.isinf(bound)
            if not wrong.any():
                return None
        overflown = wrong & ~np.isfinite(left) & np.isfinite(right)
        if self.is_short and overflown.any():
            wrong &= ~(overflown & self._is_of_wider_numbers(index, right, base, least))  # 8
            if not wrong.any():
                return None
        if (reference := self._evaluated) is not None and reference[index].shape == right.shape:
            other = reference[index].astype(np.float64)
            wrong &= ~_near(other, right, near_by + base * _size(other), wanted.dtype)  # 2
            if self.is_short:
                wrong &= np.isfinite(other) | ~np.isinf(right)  # 7
            if not wrong.any():
                return None
        place = tuple(map(int, np.argwhere(wrong)[0]))
        text = f"{right[place]!r} instead of {left[place]!r} at {place}, {int(wrong.sum())} of {wrong.size} elements; "
        text += f"tolerated are {bound[place]:.3g}"
        return _title(left[place], right[place], not self.feed.spoiled), text

    # -- what excuses a difference, by the numbers of the module's comment ----------------------------

    def _excused(self, index: int, left: Array, right: Array, base: float) -> npt.NDArray[np.bool_]:
        spoiled = bool(self.feed.spoiled)
        excused: npt.NDArray[np.bool_] = np.zeros(left.shape, np.bool_)
        excused |= (np.isinf(left) & np.isnan(right)) | (np.isnan(left) & np.isinf(right))  # 3
        if (np.isnan(left) & ~np.isnan(right)).any() and (lowest := self._with_minus_infinity()):
            runs = [self._with_finite_masks(lowest)[index].astype(np.float64) for _ in range(3)]
            with np.errstate(all="ignore"):
                near = [np.abs(each - right) <= base * _size(each) * 10 for each in runs]
            excused |= np.isnan(left) & np.logical_and.reduce(near)  # 1
        with np.errstate(all="ignore"):
            if spoiled:
                normal = np.random.default_rng(0).standard_normal
                clean = [self._without(normal)[index].astype(np.float64) for _ in range(3)]
                near = [np.abs(each - right) <= base * _size(each) * 10 for each in clean]
                excused |= np.logical_and.reduce(near)  # 1
                excused |= (np.abs([*clean, right]) <= TINY).all(axis=0)  # 3
                if any(self._is_endless(name) for name in self.feed.spoiled):  # 4
                    undefined = self._without(lambda shape: np.full(shape, np.nan))[index].astype(np.float64)
                    moved = ~(np.abs(undefined - clean[0]) <= base * _size(clean[0]))
                    excused |= self.biased | (moved.any(axis=-1, keepdims=True) if moved.ndim else moved)
                if self.biased and any(name not in VALUES for name in self.feed.spoiled):  # 4
                    excused |= np.isnan(right) & np.isnan(self._without(lambda shape: np.full(shape, np.nan))[index])
                if self.biased and (any(map(_on_scores, self.feed.spoiled)) or self.hides_nan):  # 4
                    excused |= np.isnan(right) | (right == 0.0)  # a guard's 0
                if self.hides_nan:  # 5
                    excused |= np.isinf(self.feed.arrays.get("k", np.zeros(1))).any()
                    moved = np.abs(clean[0] - clean[1]) + np.abs(clean[0] - clean[2]) > base * _size(clean[0])
                    moved |= ~(np.abs(left - clean[0]) <= base * _size(clean[0]))
                    excused |= moved.any(axis=-1, keepdims=True) if moved.ndim else moved
            odd = np.full(left.shape, spoiled) | ~np.isfinite(left) | ~np.isfinite(right)
            if (odd & ~excused).any():  # 2
                other = self._evaluated
                if other is not None and other[index].shape == right.shape:
                    reference = other[index].astype(np.float64)
                    excused |= odd & _near(reference, right, base * _size(reference) * 10 + TINY, other[index].dtype)
            if spoiled and (odd & ~excused).any():  # 1 and 2
                runs = [evaluated(self.model, self._cleaned(normal)) for _ in range(3)]
                clean = [each[index].astype(np.float64) for each in runs if each is not None]
                if len(clean) == len(runs) and all(each.shape == right.shape for each in clean):
                    near = [np.abs(each - right) <= base * _size(each) * 10 for each in clean]
                    excused |= np.logical_and.reduce(near)
        return excused

    def _is_endless(self, name: str) -> bool:
        """Can an input make scores infinite?"""
        array = self.feed.arrays[name]
        return name.startswith(FACTOR_ROLE) or (name == "k" and bool(np.isinf(array).any()))

    @property
    def is_short(self) -> bool:
        """Are there inputs of 16 bits?"""
        return any(array.dtype == np.float16 for array in self.feed.arrays.values())

    @functools.cached_property
    def _optimised(self) -> list[Array] | None:
        """The results of the original behind basic optimisations; None where they end in an error."""
        try:
            other = session(self.model, custom=False, level=ort.GraphOptimizationLevel.ORT_ENABLE_BASIC)
            return run_original(other, self.feed.arrays)
        except Exception:  # of ONNX Runtime: they share no class
            return None

    def _is_of_wider_numbers(self, index: int, right: Array, base: float, least: float) -> npt.NDArray[np.bool_]:
        """Where are results those of the original with float32 in place of float16?"""
        try:
            wider = session(widened(self.model), custom=False)
            plain = run_original(wider, self.feed.arrays)[index].astype(np.float64)
            noise = self._noise(wider, index, plain, SHAKES[-1])
        except Exception:  # of ONNX Runtime: they share no class
            return np.zeros(right.shape, np.bool_)
        with np.errstate(all="ignore"):
            return np.asarray(np.abs(plain - right) <= base * max(_size(plain), least) + TINY + FACTOR * noise)

    def _without(self, numbers: Callable[[tuple[int, ...]], Array]) -> list[Array]:
        """The original's results where other numbers stand in place of NaN and infinities of the inputs."""
        return run_original(self.original, self._cleaned(numbers))

    def _with_minus_infinity(self) -> list[str]:
        """The inputs, other than query, key and value, that hold -inf."""
        arrays = self.feed.arrays.items()
        return [
            name
            for name, array in arrays
            if name not in VALUES and array.dtype.kind == "f" and np.isneginf(array).any()
        ]

    def _with_finite_masks(self, names: list[str]) -> list[Array]:
        """The original's results where each -inf of these inputs is another number that masks."""
        arrays = dict(self.feed.arrays)
        for name in names:
            lowered = self._random.uniform(-3e4, -1e4, arrays[name].shape).astype(arrays[name].dtype)
            arrays[name] = np.where(np.isneginf(arrays[name]), lowered, arrays[name])
        return run_original(self.original, arrays)

    @functools.cached_property
    def _random(self) -> np.random.Generator:
        return np.random.default_rng(0)

    def _cleaned(self, numbers: Callable[[tuple[int, ...]], Array]) -> dict[str, Array]:
        """The inputs with other numbers in place of NaN and infinities."""
        arrays = dict(self.feed.arrays)
        for name in self.feed.spoiled:
            array = arrays[name]
            # -inf in a mask is a number of masks.
            wrong = ~np.isfinite(array) if name in VALUES else np.isnan(array) | np.isposinf(array)
            if name.startswith(FACTOR_ROLE):
                wrong = ~np.isfinite(array) | (array == 0.0) | (np.abs(array) > 1e30)  # it may be a divisor
            arrays[name] = np.where(wrong, numbers(array.shape).astype(array.dtype), array)
        return arrays

    @functools.cached_property
    def _evaluated(self) -> list[Array] | None:
        """The results of onnx's reference evaluation; None where it does not know an operator."""
        return evaluated(self.model, self.feed.arrays)

    def _is_a_step_away(self, index: int, wanted: Array, got: Array) -> bool:
        """Are integers that numbers were rounded to equal but for a step, and for what the last bits of inputs of 16
        bits move them?"""
        whole = wanted.astype(np.float64)
        gap = np.abs(whole - got)
        if gap.max() <= 1:
            return True
        return self.is_short and any(
            (gap <= 1 + FACTOR * self._noise(self.original, index, whole, times)).all() for times in SHAKES
        )

    def _is_rounded_nan(self, index: int, wanted: Array) -> npt.NDArray[np.bool_]:
        """Where does onnx's reference evaluation round NaN, if a QuantizeLinear makes the output?"""
        shown = onnx.ModelProto()
        shown.CopyFrom(self.model)
        name = shown.graph.output[index].name
        source = next((n.input[0] for n in shown.graph.node if n.op_type == "QuantizeLinear" and name in n.output), "")
        del shown.graph.output[:]
        shown.graph.output.append(onnx.ValueInfoProto(name=source))
        found = evaluated(shown, self.feed.arrays) if source else None
        if found is None or found[0].shape != wanted.shape:
            return np.zeros(wanted.shape, np.bool_)
        return np.isnan(found[0])

    def _noise(self, model: ort.InferenceSession, index: int, plain: Array, times: int) -> Array:
        """How far a model's result moves when its inputs move by half of their last bit, the largest of each row and of
        so many times; infinite where it is a number now and then only."""
        rng = np.random.default_rng(0)
        worst = np.zeros(plain.shape)
        for _ in range(times):
            arrays = {name: shaken(array, rng) for name, array in self.feed.arrays.items()}
            moved = run_original(model, arrays)[index].astype(np.float64)
            with np.errstate(all="ignore"):
                change = np.asarray(np.abs(moved - plain))
                change[(moved == plain) | (np.isnan(moved) & np.isnan(plain))] = 0.0
                change[np.isnan(change)] = np.inf
            worst = np.maximum(worst, change)
        if plain.ndim and plain.size:
            worst = np.broadcast_to(worst.max(axis=-1, keepdims=True), plain.shape)
        return worst


_OPTIONS: dict[tuple[bool, ort.GraphOptimizationLevel], ort.SessionOptions] = {}


def session(
    model: onnx.ModelProto,
    custom: bool,
    level: ort.GraphOptimizationLevel = ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
) -> ort.InferenceSession:
    """A session in one thread, which computes every node as it is written unless optimisations are asked for."""
    if (custom, level) not in _OPTIONS:
        options = ort.SessionOptions()
        options.graph_optimization_level = level
        options.log_severity_level = 4
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        if custom:
            register_custom_ops(options)
        ort.set_default_logger_severity(4)
        _OPTIONS[custom, level] = options
    return ort.InferenceSession(model.SerializeToString(), _OPTIONS[custom, level], providers=["CPUExecutionProvider"])


def run_original(original: ort.InferenceSession, arrays: Mapping[str, Array]) -> list[Array]:
    """All outputs of the model as it was given. A process that ends here shows a fault of ONNX Runtime, not of ours.

    Arrays of float16 are also given to inputs of `widened` models."""
    wide = {each.name for each in original.get_inputs() if each.type == "tensor(float)"}
    taken = {name: array.astype(np.float32) if name in wide else array for name, array in arrays.items()}
    return list(original.run(None, taken))


def evaluated(
    model: onnx.ModelProto, arrays: Mapping[str, Array], more: Sequence[type[OpRun]] = ()
) -> list[Array] | None:
    """What onnx's reference evaluation makes of inputs, with more operators; None where it does not know one."""
    try:
        with np.errstate(all="ignore"):
            versions = {each.domain: each.version for each in model.opset_import}
            older = [DequantizeLinear] if versions.get("", 0) < LATER_DEQUANTIZE else []
            evaluator = ReferenceEvaluator(model, new_ops=[FusedMatMul, *older, *more])
            return [np.asarray(each) for each in evaluator.run(None, dict(arrays))]
    except Exception:  # of the evaluation: its classes share none
        return None


def _near(left: Array, right: Array, tolerance: float, dtype: np.dtype[Any]) -> npt.NDArray[np.bool_]:
    """Which elements agree: within the tolerance, or both NaN. An infinity is as near as the type's largest number."""
    most = float(np.finfo(dtype).max)
    with np.errstate(all="ignore"):
        near: npt.NDArray[np.bool_] = np.abs(np.clip(left, -most, most) - np.clip(right, -most, most)) <= tolerance
    return near | (np.isnan(left) & np.isnan(right))


def _title(left: float, right: float, finite: bool) -> str:
    inputs = "" if finite else " where inputs hold NaN or infinities"
    if np.isnan(left) != np.isnan(right):
        return ("NaN is lost" if np.isnan(left) else "NaN is gained") + inputs
    if np.isinf(left) != np.isinf(right):
        return ("infinity is lost" if np.isinf(left) else "infinity is gained") + inputs
    return f"other numbers{inputs}"


def _on_scores(name: str) -> bool:
    """Does an input multiply scores?"""
    return name == "k" or name.startswith(FACTOR_ROLE)


def _size(array: Array) -> float:
    return float(np.max(np.abs(array), where=np.isfinite(array), initial=0.0))


def shaken(array: Array, rng: np.random.Generator) -> Array:
    """The array with random changes by half of the last bit, numbers of masks left alone."""
    if array.dtype.kind != "f":
        return array
    steps = rng.uniform(-2.0, 2.0, array.shape) * LAST_BIT[str(array.dtype)]
    with np.errstate(all="ignore"):
        moved = (array.astype(np.float64) * (1.0 + steps)).astype(array.dtype)
    return np.where(np.isin(array, EXACT_NUMBERS[str(array.dtype)]) | ~np.isfinite(moved), array, moved)
