"""`verify`: a right change of a model is taken for the same, and a wrong one is found.

    model     := attention(tensor) | branches | rounded attention
    tensor    := an input of floats | DequantizeLinear of an input of integers
    branches  := If(use_cache_branch), a switch of shape [] or [1]
    rounded   := what DynamicQuantizeLinear makes of the result, less most of the result: a step more or less shows

A right change is the fusion, or an operator that hands on its input. A wrong one is put in where every run shows it:
numbers below 0 are lost, one branch is another function, the values are larger. Sizes have odd names.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import fa_compiler
from fa_compiler.comparison.compare import MOST_NOISE
from tools.fuzz.kind import Finding, Kind, Outcome

FLOAT, BOOL = TensorProto.FLOAT, TensorProto.BOOL
INTEGERS = {"int8": (TensorProto.INT8, 0), "uint8": (TensorProto.UINT8, 128), "int16": (TensorProto.INT16, 0)}
SCALES = {"int16": 1e-4}
NAMES = ("batch", "length", "True", "False", "None", "seq//2")
MANY = 96
"""Rows of a result that is rounded: of so many numbers, some lie in the middle between two integers."""
node = helper.make_node


class Verify(Kind):
    """One model and a change of it."""

    limit_s = 60.0

    def check(self, seed: int) -> Outcome:
        rng = random.Random(seed)
        drawn = _Drawn(rng)
        wrong = rng.choice(sorted(drawn.wrong)) if rng.random() < 0.5 else ""
        model, other = drawn.model(), drawn.wrong[wrong]() if wrong else drawn.same()
        if other is None:
            return Outcome("skipped")
        detail = f"{' '.join(drawn.words)}; {wrong or 'right'}"
        try:
            found = fa_compiler.verify(model, other)
        except fa_compiler.FaCompilerError as error:
            text = "".join("#" if char.isdigit() else char for char in str(error))
            return Outcome("refused", Finding(f"verify: {text[:100]}", f"{detail}\n{error}", model.SerializeToString()))
        if found.same == (not wrong):
            return Outcome("different" if wrong else "accepted")
        if wrong and found.blunt >= MOST_NOISE:
            return Outcome("noisy")
        title = f"a wrong model is taken for the same: {wrong}" if wrong else "a right model is taken for another"
        faults = [output.fault for output in found.outputs]
        text = f"{detail}\n{faults}"
        return Outcome("wrong", Finding(f"{title} [{drawn.words[0]}]", text, model.SerializeToString()))


class _Drawn:
    """A model, and its changes by what they do."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.form = rng.choice(("attention", "attention", "branches", "rounded"))
        self.words = [self.form]
        self.weights: dict[str, np.ndarray] = {}
        self.inputs: list[onnx.ValueInfoProto] = []
        self.heads, self.size = rng.choice((1, 2)), rng.choice((4, 8))
        first, second = rng.sample(NAMES, 2)
        self.shape: list[int | str] = [first, self.heads, second, self.size]
        if self.form == "rounded":
            self.shape = [2, 4, MANY, 32]
        self.nodes: list[onnx.NodeProto] = []
        self.changed: dict[str, Callable[[], list[onnx.NodeProto]]] = {}
        if self.form == "branches":
            self._branches()
        else:
            self._attention()
            if self.form == "rounded":
                self._rounded()
        self.wrong = {name: lambda change=change: self.model(change()) for name, change in self.changed.items()}

    def model(self, nodes: list[onnx.NodeProto] | None = None) -> onnx.ModelProto:
        """The model, or one of other nodes."""
        weights = [numpy_helper.from_array(array, name) for name, array in self.weights.items()]
        result = helper.make_tensor_value_info("result", FLOAT, self.shape)
        graph = helper.make_graph(self.nodes if nodes is None else nodes, "verify", self.inputs, [result], weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    def same(self) -> onnx.ModelProto | None:
        """The model after a right change; None where nothing is fused."""
        if self.form == "branches" or (self.form == "attention" and self.rng.random() < 0.3):
            self.words.append("handed on")
            last = self._behind(self.nodes, "result", "Identity")
            return self.model(last)
        made = fa_compiler.optimize(self.model())
        assert isinstance(made.model, onnx.ModelProto)
        return made.model if made.report.count("fused") else None

    @staticmethod
    def _behind(nodes: list[onnx.NodeProto], value: str, op_type: str, *others: str) -> list[onnx.NodeProto]:
        """The nodes, with one more that stands where a value is made."""
        found = []
        for each in nodes:
            copy = onnx.NodeProto.FromString(each.SerializeToString())
            if value in copy.output:
                copy.output[list(copy.output).index(value)] = f"{value}_before"
                found += [copy, node(op_type, [f"{value}_before", *others], [value])]
            else:
                found.append(copy)
        return found

    def _input(self, name: str) -> str:
        """Real numbers of the shape: an input, or what integers stand for."""
        rng = self.rng
        if rng.random() < 0.5:
            self.inputs.append(helper.make_tensor_value_info(name, FLOAT, self.shape))
            return name
        kind = rng.choice(sorted(INTEGERS))
        number, point = INTEGERS[kind]
        self.inputs.append(helper.make_tensor_value_info(f"{name}_{kind}", number, self.shape))
        scale = SCALES.get(kind, 0.02)
        self.words.append(f"{name} {kind}")
        self.weights[f"{name}_scale"] = np.array(scale, np.float32)
        given = [f"{name}_{kind}", f"{name}_scale"]
        if point or rng.random() < 0.5:
            self.weights[f"{name}_point"] = np.array(point, kind)
            given.append(f"{name}_point")
        if kind == "int16":
            real = f"{name}_real"
            self.nodes += [node("Cast", given[:1], [real], to=FLOAT), node("Mul", [real, f"{name}_scale"], [name])]
        else:
            self.nodes.append(node("DequantizeLinear", given, [name]))
        self.changed[f"numbers of {name} below 0 are lost"] = lambda: self._behind(self.nodes, name, "Relu")
        return name

    def _attention(self) -> None:
        query, key, value = map(self._input, "qkv")
        self.weights["scale"] = np.array(0.5, np.float32)
        self.weights["larger"] = np.array(1.3, np.float32)
        self.nodes += [
            node("Transpose", [key], ["turned"], perm=[0, 1, 3, 2]),
            node("MatMul", [query, "turned"], ["scores"]),
            node("Mul", ["scores", "scale"], ["scaled"]),
            node("Softmax", ["scaled"], ["weights"], axis=-1),
            node("MatMul", ["weights", value], ["result"]),
        ]
        self.changed["the result is larger"] = lambda: self._behind(self.nodes, "weights", "Mul", "larger")

    def _rounded(self) -> None:
        """A tenth of the result, beside which a step is ten times as large."""
        self.weights["most"] = np.array(0.9, np.float32)
        self.nodes = self._behind(self.nodes, "result", "Identity")[:-1]
        made = "result_before"
        self.nodes += [
            node("DynamicQuantizeLinear", [made], ["integers", "step", "point"]),
            node("DequantizeLinear", ["integers", "step", "point"], ["near"]),
            node("Mul", [made, "most"], ["part"]),
            node("Sub", ["near", "part"], ["result"]),
        ]

    def _branches(self) -> None:
        rng = self.rng
        switch, flag = rng.choice(([], [1])), "use_cache_branch"
        self.words.append(f"a switch of {switch}")
        self.inputs += [
            helper.make_tensor_value_info("x", FLOAT, self.shape),
            helper.make_tensor_value_info(flag, BOOL, switch),
        ]

        def chosen(one: str, other: str) -> list[onnx.NodeProto]:
            branches = {
                f"{name}_branch": helper.make_graph(
                    [node(op_type, ["x"], [name])], name, [], [helper.make_tensor_value_info(name, FLOAT, None)]
                )
                for name, op_type in (("then", one), ("else", other))
            }
            return [node("If", [flag], ["result"], **branches)]

        self.nodes = chosen("Sin", "Cos")
        self.changed["the branch of true"] = lambda: chosen("Exp", "Cos")
        self.changed["the branch of false"] = lambda: chosen("Sin", "Exp")
