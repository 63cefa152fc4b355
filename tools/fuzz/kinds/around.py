"""Blocks around attention (tests/around_blocks.py), right or with near misses: whatever becomes an operator of Ascend
computes what the original computes, by the bodies of the operators in ONNX Runtime.

The tolerance. Of each row of an output the numbers agree within `BASE` of its largest one, by the narrowest type that
the output is computed with. Beyond that they may differ by `FACTOR` times what half of a last bit does to the original,
in its inputs and in the model's numbers. NaN and infinities stand at the same places. What excuses a
difference:
1. Roundings. Where both models in float64 give the same, finite numbers may differ: a mean is large, or numbers cancel.
2. In 16 bits the result may be what the original gives in float32, because the operator rounds less. There what the
   original makes NaN or infinite may be finite, unless the user says that numbers are not (--assume non-finite-scores).
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
import onnx.inliner
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

import fa_compiler
from fa_compiler.errors import FaCompilerError
from fa_compiler.op_registry import DOMAIN
from fa_compiler.op_registry import names as registered
from fa_compiler.passes import Report
from fa_compiler.passes.answer.report import Around as AroundLine
from tests.around_blocks import POSITIONS, compose
from tests.contrib_ops import (
    FastGelu,
    Gelu,
    SimplifiedLayerNormalization,
    SkipLayerNormalization,
    SkipSimplifiedLayerNormalization,
)
from tests.widening import widened
from tools.fuzz.difference import Array, evaluated, run_original, session, shaken
from tools.fuzz.kind import Finding, Kind, Outcome

BASE = {TensorProto.FLOAT: 2e-5, TensorProto.FLOAT16: 8e-3, TensorProto.BFLOAT16: 4e-2}
"""A few roundings of each type."""
TINY = {TensorProto.FLOAT: 1e-30, TensorProto.FLOAT16: 2.0**-22, TensorProto.BFLOAT16: 1e-30}
"""A few steps between the smallest numbers of each type, or less than anything that matters."""
FACTOR, SHAKES = 32.0, 4
LAST_BIT = {TensorProto.FLOAT: 2.0**-24, TensorProto.FLOAT16: 2.0**-11}
NUMPY = {
    TensorProto.DOUBLE: np.float64,
    TensorProto.FLOAT: np.float32,
    TensorProto.FLOAT16: np.float16,
    TensorProto.INT64: np.int64,
}
PRODUCTS = (None, None, None, "A2", "950", "310P")
SIZES = ({"B": 2, "S": 3}, {"B": 1, "S": 1}, {"B": 3, "S": 4}, {"B": 2, "S": 1}, {"B": 4, "S": 4})
CURVES = ("Erf", "Tanh")
CONTRIB = (Gelu, FastGelu, SimplifiedLayerNormalization, SkipSimplifiedLayerNormalization, SkipLayerNormalization)
NON_FINITE = "non-finite-scores"


class Around(Kind):
    """One model of a few blocks, run at two sizes."""

    def check(self, seed: int) -> Outcome:
        model, words = compose(seed)
        rng = random.Random(seed)
        assume = [NON_FINITE] if rng.random() < 0.5 else []
        soc = rng.choice(PRODUCTS)
        try:
            original = _Original(model, bool(assume))
        except Exception:  # of ONNX Runtime: a near miss that is no model
            return Outcome("skipped")
        try:
            result = fa_compiler.optimize(model, target="ascend", assume=assume, soc_version=soc)
        except FaCompilerError as error:
            return Outcome("refused", Finding(f"refused: {type(error).__name__}", str(error), _bytes(model)))
        fused = result.model
        assert isinstance(fused, onnx.ModelProto)
        note = f"{' '.join(words)}\n{assume} {soc}\n" + "\n".join(map(str, result.report.around))
        fault = _fault_of_report(model, fused, result.report)
        if fault is not None:
            return Outcome("fused", Finding(fault, note, _bytes(model)))
        operators = {line.op for line in result.report.around if line.status == "fused"}
        if not operators:
            return Outcome("declined" if result.report.around else "plain")
        second = session(fused, custom=False)
        for sizes in rng.sample(SIZES, 2):
            found = original.fault(fused, second, _feeds(model, sizes, rng, original.special))
            if found is not None:
                name = ", ".join(sorted({line.op or "" for line in _lines_of(found.output, fused, result.report)}))
                text = f"{note}\n{found.output} {sizes}: {found.text}"
                return Outcome("fused", Finding(f"{found.title} [{name}]", text, _bytes(model)))
        return Outcome("fused")


@dataclass(frozen=True)
class _Fault:
    title: str
    output: str = ""
    text: str = ""


class _Original:
    """The original model, and how near a result has to be to its own."""

    def __init__(self, model: onnx.ModelProto, non_finite: bool) -> None:
        self.model = model
        self.session = session(model, custom=False)
        self.types = narrowest(model)
        self.is_finite = not non_finite
        self.is_short = any(kind != TensorProto.FLOAT for kind in self.types.values())

    @property
    def special(self) -> list[float]:
        """The numbers that inputs have here and there: what overflows squared, if no 16 bits do, and what is no number,
        unless all numbers are finite."""
        return [0.0, *(() if self.is_short else (1e25, -1e-25)), *(() if self.is_finite else (np.nan, np.inf, -np.inf))]

    def fault(self, fused: onnx.ModelProto, running: ort.InferenceSession, given: Mapping[str, Array]) -> _Fault | None:
        """What is wrong with one run of the fused model."""
        try:
            wanted = run_original(self.session, given)
        except Exception:  # of ONNX Runtime: sizes that do not fit
            return None
        try:
            got = running.run(None, dict(given))
        except Exception as error:  # of ONNX Runtime
            return _Fault(f"only the original runs: {re.sub(r'[0-9]+', '#', str(error))[:80]}", text=str(error))
        names = [output.name for output in self.model.graph.output]
        for index, (name, one, other) in enumerate(zip(names, wanted, got, strict=True)):
            if one.shape != other.shape or one.dtype != other.dtype:
                return _Fault("another type or shape", name, f"{other.dtype}{other.shape}, not {one.dtype}{one.shape}")
            wrong = self._wrong(fused, index, given, (one, other))
            if wrong.any():
                place = tuple(map(int, np.argwhere(wrong)[0]))
                return _Fault(_title(one[place], other[place]), name, f"{other[place]}, not {one[place]} at {place}")
        return None

    def _wrong(
        self, fused: onnx.ModelProto, index: int, given: Mapping[str, Array], results: tuple[Array, Array]
    ) -> Array:
        """Where is the result another one than that of the original?"""
        kind = self.types.get(self.model.graph.output[index].name, TensorProto.FLOAT)
        base, tiny = BASE[kind], TINY[kind]
        left, right = (each.astype(np.float64) for each in results)
        wrong = ~_near(left, right, base, tiny)
        if not wrong.any():
            return wrong
        noise = self._noise(index, given, left)
        wrong &= ~_near(left, right, base, tiny + FACTOR * _largest(noise))
        is_alike = np.isfinite(left) == np.isfinite(right)
        if (wrong & is_alike).any():
            exact = [_exact(_part(each, index), given) for each in (self.model, fused)]
            if exact[0] is not None and exact[1] is not None:
                wrong &= ~(_near(exact[0], exact[1], base, tiny) & is_alike)  # 1
        if wrong.any() and self.is_short:
            wide = widened(widened(self.model), TensorProto.BFLOAT16)
            other = run_original(session(wide, custom=False), given)[index].astype(np.float64)
            wrong &= ~(_near(other, right, base, tiny) & (is_alike | self.is_finite))  # 2
        return wrong

    def _noise(self, index: int, given: Mapping[str, Array], plain: Array) -> Array:
        """How far an output moves when the inputs and the numbers of the model move by half of their last bit."""
        rng, worst = np.random.default_rng(0), np.zeros(plain.shape)
        for _ in range(SHAKES):
            arrays = {name: shaken(array, rng) for name, array in given.items()}
            moved = run_original(session(_shaken(self.model, rng), custom=False), arrays)[index].astype(np.float64)
            with np.errstate(all="ignore"):
                worst = np.maximum(worst, np.nan_to_num(np.abs(moved - plain), nan=0.0, posinf=0.0))
        return worst


def _part(model: onnx.ModelProto, index: int) -> onnx.ModelProto:
    """What one output of a model is computed from, as a model."""
    part = onnx.ModelProto()
    part.CopyFrom(model)
    needed, kept = {part.graph.output[index].name}, []
    for node in reversed(model.graph.node):
        if needed & {*node.output}:
            needed |= {*node.input}
            kept.append(node)
    del part.graph.node[:], part.graph.output[:]
    part.graph.node.extend(reversed(kept))
    part.graph.output.append(model.graph.output[index])
    return part


def _exact(model: onnx.ModelProto, given: Mapping[str, Array]) -> Array | None:
    """The only output of a model in float64; None where onnx's reference evaluation does not know an operator."""
    wide = widened(widened(onnx.inliner.inline_local_functions(model)), TensorProto.BFLOAT16)
    wide = widened(wide, TensorProto.FLOAT, TensorProto.DOUBLE)
    for node in wide.graph.node:
        for attr in node.attribute:
            if attr.name == "value_float":
                attr.CopyFrom(helper.make_attribute("value", numpy_helper.from_array(np.array(attr.f, np.float64))))
    arrays = {name: array.astype(np.float64) if array.dtype.kind == "f" else array for name, array in given.items()}
    found = evaluated(wide, arrays, CONTRIB)
    return None if found is None else found[0].astype(np.float64)


def _shaken(model: onnx.ModelProto, rng: np.random.Generator) -> onnx.ModelProto:
    """The model with its numbers moved by half of their last bit, but for exponents."""
    moved = onnx.ModelProto()
    moved.CopyFrom(model)
    kept = {node.input[1] for node in model.graph.node if node.op_type == "Pow"}
    constants = [(node.output[0], node.attribute[0].t) for node in moved.graph.node if node.op_type == "Constant"]
    for name, tensor in [*((tensor.name, tensor) for tensor in moved.graph.initializer), *constants]:
        if name not in kept and tensor.data_type in LAST_BIT:
            array = numpy_helper.to_array(tensor)
            steps = rng.uniform(-2.0, 2.0, array.shape) * LAST_BIT[tensor.data_type]
            tensor.CopyFrom(numpy_helper.from_array((array * (1.0 + steps)).astype(array.dtype), tensor.name))
    _shake_curves(moved, rng)
    return moved


def _shake_curves(model: onnx.ModelProto, rng: np.random.Generator) -> None:
    """Multiply what ends near 1 by a number next to 1: where it cancels, no change of the inputs shows how much it is
    rounded."""
    known = onnx.shape_inference.infer_shapes(model).graph.value_info
    types = {value.name: value.type.tensor_type.elem_type for value in known}
    for place, node in reversed([*enumerate(model.graph.node)]):
        name = node.output[0]
        if node.op_type not in CURVES or types.get(name) not in LAST_BIT:
            continue
        number = 1.0 + rng.choice([-1, 1]) * 2 * LAST_BIT[types[name]]
        factor = numpy_helper.from_array(np.array(number, NUMPY[types[name]]), f"{name}_near")
        model.graph.initializer.append(factor)
        node.output[0] = f"{name}_plain"
        model.graph.node.insert(place + 1, helper.make_node("Mul", [node.output[0], factor.name], [name]))


def narrowest(model: onnx.ModelProto) -> dict[str, int]:
    """The narrowest type that each value of a model is computed with."""
    order = list(BASE)
    found = {one.name: one.type.tensor_type.elem_type for one in model.graph.input}
    found |= {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    for node in model.graph.node:
        kinds = [found.get(name, TensorProto.FLOAT) for name in node.input]
        kinds += [attr.i for attr in node.attribute if node.op_type == "Cast"]
        kinds += [attr.t.data_type for attr in node.attribute if attr.HasField("t")]
        kind = max((order.index(each) for each in kinds if each in BASE), default=0)
        found |= dict.fromkeys(node.output, order[kind])
    return found


def _feeds(
    model: onnx.ModelProto, sizes: Mapping[str, int], rng: random.Random, special: list[float]
) -> dict[str, Array]:
    """Inputs whose rows are of all sizes, with special numbers here and there in one of two."""
    draws, found = np.random.default_rng(rng.getrandbits(32)), {}
    chance = rng.choice([0.0, 0.04])
    for value in model.graph.input:
        kind = value.type.tensor_type
        shape = tuple(sizes.get(dim.dim_param, dim.dim_value) for dim in kind.shape.dim)
        if kind.elem_type == TensorProto.INT64:
            found[value.name] = draws.integers(0, POSITIONS, shape)
            continue
        rows = 10.0 ** draws.uniform(-3, 1.5, (*shape[:-1], 1)) if value.name.startswith("x") else 1.0
        array = np.asarray(draws.standard_normal(shape) * rows)
        if value.name.startswith("x") and shape:
            array[draws.random(shape[:-1]) < 0.1] = 0.0
            places = draws.random(shape) < chance
            array[places] = draws.choice(special, int(places.sum()))
        with np.errstate(over="ignore"):
            found[value.name] = array.astype(NUMPY[kind.elem_type])
    return found


def _largest(array: Array) -> Array:
    """The largest number of each row."""
    if not array.ndim or not array.size:
        return array
    return np.broadcast_to(array.max(axis=-1, keepdims=True), array.shape)


def _near(left: Array, right: Array, base: float, more: Array | float) -> Array:
    """Which numbers agree."""
    size = _largest(np.where(np.isfinite(left), np.abs(left), 0.0))
    with np.errstate(all="ignore"):
        near = np.abs(left - right) <= base * size + more
    return np.asarray(near | (left == right) | (np.isnan(left) & np.isnan(right)))


def _title(left: float, right: float) -> str:
    if np.isnan(left) != np.isnan(right):
        return "NaN is lost" if np.isnan(left) else "NaN is gained"
    return "other numbers" if np.isinf(left) == np.isinf(right) else "another infinity"


def _fault_of_report(model: onnx.ModelProto, fused: onnx.ModelProto, report: Report) -> str | None:
    """What is wrong with a report of what is around attention."""
    made = sorted(node.op_type for node in fused.graph.node if node.domain == DOMAIN)
    told = (line.op or "" for line in report.around if line.status == "fused")
    if made != sorted(op for op in told if op in registered()):  # a joined product is no operator of ours
        return "the report has other operators than the model"
    names = {name for node in model.graph.node for name in (node.name, *node.output)}
    for line in report.around:
        if line.status == "declined" and not (line.code and line.reason and line.culprit in names):
            return f"a decline without code, reason or culprit: {line.code}"
    return None


def _lines_of(output: str, fused: onnx.ModelProto, report: Report) -> Iterator[AroundLine]:
    """The lines of the report for what an output is computed from."""
    needed = {output}
    for node in reversed(fused.graph.node):
        if needed & {*node.output}:
            needed |= {*node.input, node.name}
    return (line for line in report.around if line.node in needed)


def _bytes(model: onnx.ModelProto) -> bytes:
    return model.SerializeToString()
