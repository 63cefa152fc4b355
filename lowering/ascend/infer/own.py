"""Operators that do not infer as their meaning in ONNX does. Each rule says why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fa_compiler.lowering.ascend.dtypes import attr_name
from fa_compiler.lowering.ascend.graph import UNKNOWN, Opaque, Weight, ge_shape, known_sizes
from fa_compiler.lowering.ascend.infer.facts import (
    Fact,
    InferenceError,
    OpFacts,
    broadcast,
    shapes_agree,
)
from fa_compiler.lowering.ascend.infer.misfits import MOST_PARTS
from fa_compiler.op_registry import NodeError, TensorInfo, can_infer, get, names
from fa_compiler.op_registry import infer as infer_registered
from fa_compiler.op_registry.spec import Kind

Rule = Callable[[OpFacts], Sequence[Fact]]
RULES: dict[str, Rule] = {}
"""The rule of each operator. A rule returns the facts of the outputs in order."""


def _rule(*op_types: str) -> Callable[[Rule], Rule]:
    def enter(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(op_types, function))
        return function

    return enter


@_rule("Cast")
def _cast(call: OpFacts) -> Sequence[Fact]:
    """The meaning demands that the declared type is the right one; here it is to be found out."""
    x, dtype = call.x(), attr_name(call.attr("dst_type"))
    if dtype is None:
        raise InferenceError(f"dst_type {call.attr('dst_type')} is not a type of GE")
    return [Fact(dtype, x.shape, x.value if dtype in ("DT_INT32", "DT_INT64") else None)]


@_rule("FastGelu", "Gelu", "PRelu", "Selu", "SoftmaxV2", "LogSoftmaxV2")
def _like_first(call: OpFacts) -> Sequence[Fact]:
    """They have no meaning in ONNX here; ONNX's softmax runs along one axis only."""
    return [call.first.with_shape(call.first.shape)]


@_rule("FloorDiv", "RealDiv", "GeluGrad", "SigmoidGrad")
def _element_by_element(call: OpFacts) -> Sequence[Fact]:
    """They have no meaning in ONNX here, or (RealDiv) none for integers."""
    return [Fact(call.first.dtype, broadcast(*(fact.shape for fact in call.inputs.values())))]


@_rule("LayerNorm")
def _layer_norm(call: OpFacts) -> Sequence[Fact]:
    """The meaning takes the weights' axes from begin_params_axis, which GE's inference does not
    read. The type of the statistics is not inferred."""
    x = call.x()
    if x.shape is None:
        return [x]
    axis = call.axis(call.attr("begin_norm_axis"), len(x.shape), "begin_norm_axis")
    for name in ("gamma", "beta"):
        if not shapes_agree(call.x(name).shape, x.shape[axis:]):
            shape = list(call.x(name).shape or ())
            raise InferenceError(
                f"{name} has the shape {shape}, the normalised axes are {list(x.shape[axis:])}"
            )
    statistics = Fact("", (*x.shape[:axis], *(1,) * (len(x.shape) - axis)))
    return [x.with_shape(x.shape), statistics, statistics]


@_rule("LayerNormGradV3")
def _layer_norm_gradient(call: OpFacts) -> Sequence[Fact]:
    """The gradients of the weights are floats, whatever the type of the tensor."""
    weights = Fact("DT_FLOAT", call.x("gamma").shape)
    return [call.x().with_shape(call.x().shape), weights, weights]


@_rule("SplitV")
def _split(call: OpFacts) -> Sequence[Fact]:
    """A part of -1 is the rest. ONNX has none."""
    x, count, place = call.x(), call.attr("num_split"), call.integer("split_dim")
    if not 1 <= count <= MOST_PARTS:
        raise InferenceError(f"num_split is {count}")
    if x.shape is None or place is None:
        return [x.with_shape(None)] * count
    axis = call.axis(place, len(x.shape), "split_dim")
    given, total = call.ints("size_splits"), x.shape[axis]
    if given is None:
        return [x.with_shape((*x.shape[:axis], UNKNOWN, *x.shape[axis + 1 :]))] * count
    if len(given) != count or (total >= 0 and -1 not in given and sum(given) != total):
        raise InferenceError(f"the parts {given} are not {count} parts of {total}")
    rest = UNKNOWN if total < 0 else total - sum(size for size in given if size != -1)
    sizes = [rest if size == -1 else size for size in given]
    return [x.with_shape((*x.shape[:axis], size, *x.shape[axis + 1 :])) for size in sizes]


@_rule(*(name for name in names() if can_infer(name)))
def _registered(call: OpFacts) -> Sequence[Fact]:
    """The registry infers them; it says what does not fit, which an ONNX rule does not."""
    spec = get(call.op.type)
    inputs: dict[str, Any] = {}
    for entry in spec.inputs:
        if entry.kind is not Kind.DYNAMIC:
            given: Any = call.inputs.get(entry.name)
            inputs |= {} if given is None else {entry.name: _info(given)}
        elif tensors := call.dynamic(entry.name):
            inputs[entry.name] = [_info(fact) for fact in tensors]
    known = {name: attr.value for name, attr in call.op.attrs.items() if name in spec.attr_names}
    attrs = {name: value for name, value in known.items() if not isinstance(value, Weight | Opaque)}
    try:
        found = infer_registered(call.op.type, inputs, attrs)
    except NodeError as error:
        raise InferenceError(str(error)) from None
    return [_fact(found.get(entry.name)) for entry in spec.outputs]


def _info(fact: Fact) -> TensorInfo:
    return TensorInfo(fact.dtype, known_sizes(fact.shape))


def _fact(info: TensorInfo | None) -> Fact:
    return Fact("") if info is None else Fact(info.dtype, ge_shape(info.shape))
