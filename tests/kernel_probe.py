"""Which nodes of standard operators the installed onnxruntime loads: each operator, in each opset, with each type.

    PYTHONPATH=. python -m tests.kernel_probe > op_registry/lost_kernels.tsv

A node loads if the CPU has a kernel for its types, if ONNX Runtime casts 16 bits, or if it can inline the body of the
operator. It inlines a body only where the operators of the body mean the same in the opset of the model as in that of
the operator. So a node may load in one opset, and not in a later one, without the operator having changed.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import onnx
import onnxruntime as ort
from onnx import TensorProto, defs, helper
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

OLDEST, NEWEST = 13, 25
MISSING = re.compile(r"NOT_IMPLEMENTED|Failed to find kernel|No Op registered|not registered")
"""What onnxruntime says of a node that it has no kernel for."""
OPEN_END = 2**31 - 1
MAX_COMBINATIONS = 200
"""Of more combinations of types only those are looked at in which one type differs from the most common ones."""
COMMON = ("tensor(float)", "tensor(int64)", "tensor(int32)", "tensor(uint8)", "tensor(bool)")
NAMES = {"float": "FLOAT", "double": "DOUBLE"}
ATTRIBUTES: dict[defs.OpSchema.AttrType, Any] = {
    defs.OpSchema.AttrType.INT: 1,
    defs.OpSchema.AttrType.INTS: [1, 1],
    defs.OpSchema.AttrType.FLOAT: 1.0,
    defs.OpSchema.AttrType.STRING: "x",
    defs.OpSchema.AttrType.FLOATS: [1.0],
}
MORE = {kind: {"hidden_size": 2} for kind in ("LSTM", "GRU", "RNN")}
_Param = defs.OpSchema.FormalParameterOption


@dataclass(frozen=True)
class Typed:
    """A node of one operator: the types of its inputs and outputs, as ONNX writes them."""

    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def model(self, opset: int) -> onnx.ModelProto | None:
        """A model of this one node; None where an attribute is a graph."""
        attrs: dict[str, Any] = dict(MORE.get(self.operator, {}))
        for name, attr in defs.get_schema(self.operator, opset, "").attributes.items():
            if attr.required and name == "to":
                attrs[name] = _element(self.outputs[0])
            elif attr.required and attr.type not in ATTRIBUTES:
                return None
            elif attr.required:
                attrs.setdefault(name, ATTRIBUTES[attr.type])
        infos = [
            [helper.make_tensor_value_info(f"{word}{place}", _element(kind), None) for place, kind in enumerate(kinds)]
            for word, kinds in (("x", self.inputs), ("y", self.outputs))
        ]
        node = helper.make_node(self.operator, *([each.name for each in some] for some in infos), **attrs)
        graph = helper.make_graph([node], "g", *infos)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def _element(kind: str) -> int:
    word = kind.removeprefix("tensor(").removesuffix(")")
    return int(getattr(TensorProto, NAMES.get(word, word.upper())))


@functools.cache
def _schemas() -> Mapping[str, list[defs.OpSchema]]:
    """All definitions of each standard operator."""
    found: dict[str, list[defs.OpSchema]] = {}
    for schema in defs.get_all_schemas_with_history():
        if not schema.domain:
            found.setdefault(schema.name, []).append(schema)
    return found


def operators() -> list[str]:
    """Every standard operator of the opsets up to NEWEST."""
    return sorted(name for name in _schemas() if versions(name))


def versions(operator: str) -> list[int]:
    """The opsets from OLDEST on in which the operator is defined anew, and OLDEST itself where it is defined before."""
    found = {max(schema.since_version, OLDEST) for schema in _schemas()[operator] if not schema.deprecated}
    return sorted(version for version in found if version <= NEWEST)


@functools.cache
def nodes(operator: str, opset: int) -> list[Typed]:
    """The nodes of an operator with each of the types that its definition has, with optional inputs and without."""
    schema = defs.get_schema(operator, opset, "")
    if schema.deprecated:
        return []
    allowed = {
        each.type_param_str: [kind for kind in each.allowed_type_strs if kind.startswith("tensor(")]
        for each in schema.type_constraints
    }
    given = [each for each in schema.inputs if each.option != _Param.Optional]
    made = [each for place, each in enumerate(schema.outputs) if place == 0 or each.option != _Param.Optional]
    found: dict[Typed, None] = {}
    for kinds in _combinations(allowed):
        for inputs in (given, schema.inputs):
            node = Typed(
                operator,
                tuple(kinds.get(each.type_str, each.type_str) for each in inputs),
                tuple(kinds.get(each.type_str, each.type_str) for each in made),
            )
            if all(kind.startswith("tensor(") for kind in (*node.inputs, *node.outputs)):
                found[node] = None
    return list(found)


def _combinations(allowed: dict[str, list[str]]) -> Iterator[dict[str, str]]:
    count = functools.reduce(lambda product, kinds: product * len(kinds), allowed.values(), 1)
    if count <= MAX_COMBINATIONS:
        yield from (dict(zip(allowed, kinds, strict=True)) for kinds in itertools.product(*allowed.values()))
        return
    common = {name: next((each for each in COMMON if each in kinds), *kinds[:1]) for name, kinds in allowed.items()}
    for name, kinds in allowed.items():
        yield from (common | {name: kind} for kind in kinds)


@functools.cache
def _options() -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return options


def has_kernel(node: Typed, opset: int) -> bool | None:
    """Does onnxruntime load the node in this opset? None where it refuses it for another reason than a kernel."""
    try:
        model = node.model(opset)
        if model is None:
            return None
        ort.set_default_logger_severity(4)
        ort.InferenceSession(model.SerializeToString(), _options(), providers=["CPUExecutionProvider"])
    except Exception as error:  # of onnx or onnxruntime: they share no class
        return False if MISSING.search(str(error)) else None
    return True


@functools.cache
def _kernels() -> list[Any]:
    """The CPU's kernels of standard operators."""
    found = ort_state.get_all_opkernel_def()
    return [each for each in found if (each.domain, each.provider) == ("", "CPUExecutionProvider")]


def may_be_lost(operator: str) -> bool:
    """Has an operator a body, or a kernel of an opset before NEWEST for a type that later kernels do not take?"""
    if any(each.has_function or each.has_context_dependent_function for each in _schemas()[operator]):
        return True
    kernels = [each for each in _kernels() if each.op_name == operator]
    since = defs.get_schema(operator, NEWEST, "").since_version
    old, new = set[str](), set[str]()
    for each in kernels:
        first, last = each.version_range
        # A kernel without an end serves one definition: that of its first opset.
        serves = first == since or first <= since <= last < OPEN_END
        (new if serves else old).update(kind for kinds in each.type_constraints.values() for kind in kinds)
    return bool(old - new)


def lost(some: Iterable[str]) -> dict[Typed, tuple[int, ...]]:
    """The nodes of some operators that load in one opset and not in a later one: each with the opsets in which it
    loads, and the first one after those."""
    found: dict[Typed, tuple[int, ...]] = {}
    for operator in some:
        known = versions(operator)
        typed = dict.fromkeys(node for version in known for node in nodes(operator, version))
        for node in typed:
            # What has a kernel in the newest opset, and had one when it was defined, has kept it.
            newest = has_kernel(node, NEWEST)
            if newest:
                continue
            loads = [opset for opset in range(OLDEST, NEWEST) if opset >= known[0] and has_kernel(node, opset)]
            if loads:
                found[node] = (*loads, loads[-1] + 1)
    return found


def table(found: Mapping[Typed, tuple[int, ...]]) -> str:
    """The text of op_registry/lost_kernels.tsv."""
    rows = [
        f"{node.operator}\t{opsets[0]}\t{opsets[-1]}\t{_types(node.inputs)}\t{_types(node.outputs)}"
        for node, opsets in found.items()
    ]
    head = f"# onnxruntime {ort.__version__}, CPU: nodes that load from the first opset on, and not in the last one\n"
    return head + "operator\tfirst\tlast\tinputs\toutputs\n" + "\n".join(sorted(rows)) + "\n"


def _types(kinds: tuple[str, ...]) -> str:
    return " ".join(kind.removeprefix("tensor(").removesuffix(")") for kind in kinds) or "-"


if __name__ == "__main__":
    sys.stdout.write(table(lost(operators())))
