"""Random programs of operators that only move elements: what the preparation makes of them gives the same bits, and
undone it is the model itself."""

from __future__ import annotations

import random

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from fa_compiler.passes.emit.build import Names
from fa_compiler.passes.ir.nodes import remember_versions
from fa_compiler.passes.prepare.preparation import prepare
from fa_compiler.passes.values.shapes import analyse
from tests.examples import examples
from tests.passes.running import ORIGINAL_OFF

SHAPE = (2, 3, 4, 6)


class Program:
    """Random nodes on values of known shapes; sequences hold values of known shapes."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.opset = self.rng.choice((11, 13, 18))
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.tensors: list[tuple[str, tuple[int, ...]]] = [("x", SHAPE)]
        self.sequences: list[tuple[str, list[tuple[int, ...]]]] = []
        self.products: list[tuple[str, tuple[int, ...]]] = []

    def constant(self, *numbers: int, scalar: bool = False) -> str:
        name = f"c{len(self.constants)}"
        array = np.array(numbers[0] if scalar else numbers, np.int64)
        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def add(self, op_type: str, inputs: list[str], count: int = 1, **attributes: object) -> list[str]:
        names = [f"n{len(self.nodes)}_{index}" for index in range(count)]
        self.nodes.append(helper.make_node(op_type, inputs, names, **attributes))
        return names

    def keep(self, names: list[str], shapes: list[tuple[int, ...]]) -> None:
        self.tensors.extend(zip(names, shapes, strict=True))

    def sizes(self, whole: int) -> list[int]:
        parts = self.rng.choice([each for each in (1, 2, 3, whole) if each and whole % each == 0])
        if self.rng.random() < 0.7:
            return [whole // parts] * parts
        first = self.rng.randint(1, whole)
        return [first, whole - first] if first < whole else [whole]

    def split(self, name: str, shape: tuple[int, ...], axis: int, op_type: str) -> list[str]:
        sizes = self.sizes(shape[axis])
        place = axis - len(shape) if self.rng.random() < 0.5 else axis
        if op_type == "Split" and self.opset < 13:
            names = self.add("Split", [name], len(sizes), axis=place, split=sizes)
        elif op_type == "Split":
            names = self.add("Split", [name, self.constant(*sizes)], len(sizes), axis=place)
        else:
            (made,) = self.add("SplitToSequence", [name, self.constant(*sizes)], axis=place)
            self.sequences.append((made, [(*shape[:axis], size, *shape[axis + 1 :]) for size in sizes]))
            return []
        self.keep(names, [(*shape[:axis], size, *shape[axis + 1 :]) for size in sizes])
        return names

    def cut_transposed(self, name: str, shape: tuple[int, ...]) -> None:
        """A Reshape that takes a dimension apart, a Transpose, and cuts of it."""
        axis = self.rng.randrange(len(shape))
        if shape[axis] % 3 == 0 and self.rng.random() < 0.7:
            shape = (*shape[:axis], 3, shape[axis] // 3, *shape[axis + 1 :])
            (name,) = self.add("Reshape", [name, self.constant(*shape)])
        perm = self.rng.sample(range(len(shape)), len(shape))
        (name,), shape = self.add("Transpose", [name], perm=perm), tuple(shape[place] for place in perm)
        axis = self.rng.randrange(len(shape))
        rest, known = (*shape[:axis], *shape[axis + 1 :]), len(self.tensors)
        if self.rng.random() < 0.4:
            self.split(name, shape, axis, "Split")
            self.multiply(known)
            return
        for index in range(shape[axis] - (self.rng.random() < 0.1)):
            if self.rng.random() < 0.5:
                (made,) = self.add("Gather", [name, self.constant(index, scalar=True)], axis=axis)
                self.keep([made], [rest])
            else:
                places = [self.constant(each) for each in (index, index + 1, axis)]
                self.keep(self.add("Slice", [name, *places]), [(*shape[:axis], 1, *shape[axis + 1 :])])
        self.multiply(known)

    def multiply(self, known: int) -> None:
        """A product of each tensor made since, with its transposed self."""
        for name, shape in self.tensors[known:] if self.rng.random() < 0.8 else ():
            if len(shape) > 1:
                perm = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
                (turned,) = self.add("Transpose", [name], perm=perm)
                self.products.append((self.add("MatMul", [name, turned])[0], (*shape[:-1], shape[-2])))

    def join(self) -> None:
        """A Concat of values of one shape, or of the parts of the last Split, in order or not."""
        name, shape = self.rng.choice(self.tensors)
        axis, split = self.rng.randrange(len(shape)), self.nodes[-1] if self.nodes else None
        known = dict(self.tensors)
        if split is not None and split.op_type == "Split" and self.rng.random() < 0.8:
            names = list(split.output)
            if self.rng.random() < 0.2:
                self.rng.shuffle(names)
            axis = next(each.i for each in split.attribute if each.name == "axis") % len(known[names[0]])
        else:
            names = [each for each, other in self.tensors if other == shape][: self.rng.randint(1, 3)] or [name]
        shapes = [known[each] for each in names]
        size = sum(each[axis] for each in shapes)
        whole = (*shapes[0][:axis], size, *shapes[0][axis + 1 :])
        self.keep(self.add("Concat", names, axis=axis), [whole])

    def list_step(self) -> None:
        """Something with a sequence."""
        if not self.sequences or self.rng.random() < 0.3:
            _, shape = self.rng.choice(self.tensors)
            names = [each for each, other in self.tensors if other == shape][:3]
            self.sequences.append((self.add("SequenceConstruct", names)[0], [shape] * len(names)))
            return
        name, shapes = self.rng.choice(self.sequences)
        kind = self.rng.choice(("at", "at", "join", "stack", "insert", "erase"))
        place = self.rng.randint(-len(shapes), len(shapes) - 1)
        if kind == "at":
            self.keep(self.add("SequenceAt", [name, self.constant(place, scalar=True)]), [shapes[place]])
        elif kind == "insert":
            extra, shape = self.rng.choice(self.tensors)
            (made,) = self.add("SequenceInsert", [name, extra, self.constant(place, scalar=True)])
            index = place % len(shapes)
            self.sequences.append((made, [*shapes[:index], shape, *shapes[index:]]))
        elif kind == "erase" and len(shapes) > 1:
            (made,) = self.add("SequenceErase", [name, self.constant(place, scalar=True)])
            index = place % len(shapes)
            self.sequences.append((made, [*shapes[:index], *shapes[index + 1 :]]))
        elif kind == "stack" and len(set(shapes)) == 1:
            axis = self.rng.randint(-len(shapes[0]) - 1, len(shapes[0]))
            (made,) = self.add("ConcatFromSequence", [name], axis=axis, new_axis=1)
            whole = list(shapes[0])
            whole.insert(axis % (len(whole) + 1), len(shapes))
            self.keep([made], [tuple(whole)])
        elif kind == "join":
            axis = self.rng.randrange(len(shapes[0]))
            if len({(*each[:axis], *each[axis + 1 :]) for each in shapes if len(each) == len(shapes[0])}) > 1:
                return
            if any(len(each) != len(shapes[0]) for each in shapes):
                return
            (made,) = self.add("ConcatFromSequence", [name], axis=axis - len(shapes[0]))
            self.keep([made], [(*shapes[0][:axis], sum(each[axis] for each in shapes), *shapes[0][axis + 1 :])])

    def model(self) -> onnx.ModelProto:
        for _ in range(self.rng.randint(3, 9)):
            name, shape = self.rng.choice(self.tensors[-4:])
            if not shape:
                continue
            step = self.rng.random()
            if step < 0.3:
                self.cut_transposed(name, shape)
            elif step < 0.5:
                self.split(name, shape, self.rng.randrange(len(shape)), self.rng.choice(("Split", "SplitToSequence")))
            elif step < 0.75:
                self.join()
            else:
                self.list_step()
        read = self.rng.sample(self.tensors[1:], min(len(self.tensors) - 1, 4))
        results = [(self.add("Neg", [name])[0], shape) for name, shape in read]
        results += self.products
        results += [each for each in read if self.rng.random() < 0.2]
        results.append((self.add("Softmax", ["x"], axis=1)[0], SHAPE))
        graph = helper.make_graph(
            self.nodes,
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("B", *SHAPE[1:]))],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * len(shape)) for name, shape in results],
            self.constants,
        )
        opsets = [helper.make_opsetid("", self.opset)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def outputs(model: onnx.ModelProto) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.graph_optimization_level, options.log_severity_level = ORIGINAL_OFF, 4
    x = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
    return list(ort.InferenceSession(model.SerializeToString(), options).run(None, {"x": x}))


def test_the_preparation_keeps_every_bit() -> None:
    changed = 0
    for seed in range(examples(30)):
        proto = Program(seed).model()
        wanted = outputs(proto)
        model = ir.from_proto(proto)
        graphs = remember_versions(model)
        prepared = prepare(model, graphs, analyse(model), Names.of(graphs))
        result = ir.to_proto(model)
        onnx.checker.check_model(result, full_check=True)
        for got, other in zip(outputs(result), wanted, strict=True):
            np.testing.assert_array_equal(got, other, strict=True, err_msg=f"seed {seed}")
        changed += bool(prepared.before)
        prepared.undo()
        assert ir.to_proto(model) == ir.to_proto(ir.from_proto(proto)), seed
    assert changed > 10
