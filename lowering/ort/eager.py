"""Running one operator eagerly: a model of one node, its session kept for the next call of the same kind."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnx import TensorProto, helper
from onnxruntime.capi import onnxruntime_pybind11_state as pybind

from fa_compiler.lowering.ort.library import register_custom_ops
from fa_compiler.op_registry import (
    DOMAIN,
    VERSION,
    Kind,
    NodeError,
    OpSpec,
    OutputSpec,
    TensorInfo,
    as_arrays,
    bind_inputs,
    count_attrs,
    dtypes,
    full_attrs,
    get,
    infer,
    place_inputs,
    refusal,
)

Array = npt.NDArray[Any]

# Any opset that every supported ONNX Runtime knows: the model holds nothing of it.
_ONNX_OPSET = 17
_IR_VERSION = 8

# The environment variables that change what a kernel computes with.
_KERNEL_SETTINGS = ("FA_COMPILER_ISA", "FA_COMPILER_FLOAT32_PRODUCTS")

# ONNX Runtime has a class for each status code and no common base; a few errors are plain RuntimeErrors.
_ORT_ERRORS: tuple[type[Exception], ...] = (
    RuntimeError,
    *(error for error in vars(pybind).values() if isinstance(error, type) and issubclass(error, Exception)),
)


class KernelError(ValueError):
    """The CPU kernel does not take these inputs or attributes; the text names the input and what it expects."""


def run(
    op_type: str,
    inputs: Mapping[str, Any],
    attrs: Mapping[str, Any],
    outputs: Sequence[str] | None = None,
    cann: str | None = None,
) -> dict[str, Array]:
    """Runs `op_type` on the CPU kernel and returns its outputs by name.

    `inputs` maps REG_OP names to arrays (a list of them for a dynamic input, bfloat16 as `ml_dtypes.bfloat16`); an
    absent input is None or missing. Arrays of any byte order and strides are taken, and Python numbers and lists of
    them. `outputs` asks for some outputs only. `cann` chooses the variant of the prototype (its names, their order, and
    the defaults of missing attributes), the newest without; the kernel has the orders that ONNX Runtime can tell apart
    by their types.

    The registry is asked first: what it refuses, and no extension allows, does not get to the kernel. Raises UnknownOp,
    UnknownVariant, NodeError (an unknown or missing name, a value of a wrong type) and KernelError.
    """
    return compute(*allowed(op_type, inputs, attrs, cann), outputs, cann)


def allowed(
    op_type: str, inputs: Mapping[str, Any], attrs: Mapping[str, Any], cann: str | None = None
) -> tuple[OpSpec, dict[str, Any], dict[str, Any]]:
    """The entry of the registry, the arrays and the attributes of a call that the registry does not refuse. Raises as
    `run` does."""
    inputs = _without_padding_mask(op_type, cann, inputs)
    spec = get(op_type, cann)
    attributes = full_attrs(spec, attrs)
    arrays = as_arrays(spec, inputs)
    place_inputs(spec, arrays)  # the required ones are there
    broken = refusal(spec, arrays, attributes, cann)
    if broken is not None:
        raise KernelError(f"{op_type}: {broken.message} ({broken.constraint})")
    return spec, arrays, attributes


def compute(
    spec: OpSpec,
    arrays: Mapping[str, Any],
    attributes: Mapping[str, Any],
    outputs: Sequence[str] | None = None,
    cann: str | None = None,
) -> dict[str, Array]:
    """`run` without the question to the registry: the kernel refuses by itself what it cannot compute, as it does in a
    model, by a KernelError. `arrays` are as `as_arrays` makes them, `attributes` as `full_attrs`."""
    request, placed = requested(spec, arrays, attributes, outputs, cann)
    try:
        session = _session(request, tuple(map(os.environ.get, _KERNEL_SETTINGS)))
        results = session.run_with_ort_values(list(request.wanted), fed(request, placed))
    except _ORT_ERRORS as error:
        raise KernelError(_own_words(spec, str(error))) from None
    return {name: from_ort(result) for name, result in zip(request.wanted, results, strict=True)}


@dataclass(frozen=True)
class Request:
    """A call as the node of a model: all but the numbers."""

    op_type: str
    cann: str | None
    attributes: tuple[tuple[str, Any], ...]
    types: tuple[int | None, ...]
    """ONNX's numbers of the inputs' types, None for an absent input."""
    wanted: tuple[str, ...]

    @property
    def spec(self) -> OpSpec:
        """The operator's entry of the registry."""
        return get(self.op_type, self.cann)


def requested(
    spec: OpSpec,
    arrays: Mapping[str, Any],
    attributes: Mapping[str, Any],
    outputs: Sequence[str] | None,
    cann: str | None,
) -> tuple[Request, list[Array | None]]:
    """The node of a call, and the arrays in the order of its inputs. Raises KernelError."""
    wanted = tuple(entry.name for entry in spec.outputs) if outputs is None else tuple(outputs)
    for name in wanted:
        spec.output(name)
    placed = place_inputs(spec, arrays)
    types = tuple(None if array is None else _element_type(spec, array) for array in placed)
    _check_type_of_lists(spec.name, arrays)
    return Request(spec.name, cann, tuple({**attributes, **count_attrs(spec, arrays)}.items()), types, wanted), placed


def fed(request: Request, placed: Sequence[Array | None], prefix: str = "") -> dict[str, ort.OrtValue]:
    """The model's inputs by name. One tensor for one array: a kernel may see that two inputs are the same memory."""
    tensors = {id(array): _to_ort(array) for array in placed if array is not None}
    names = _input_names(request.spec, dict(request.attributes))
    return {prefix + name: tensors[id(array)] for name, array in zip(names, placed, strict=False) if array is not None}


def _input_names(spec: OpSpec, attributes: Mapping[str, Any]) -> list[str]:
    """What the inputs of the model are called: as the operator's own, so that ONNX Runtime's errors name them."""
    names: list[str] = []
    for entry in spec.inputs:
        count = int(attributes.get(f"{entry.name}_count", 1)) if entry.kind is Kind.DYNAMIC else 1
        names += [entry.name] if count == 1 else [f"{entry.name}[{n}]" for n in range(count)]
    return names


def _check_type_of_lists(op_type: str, inputs: Mapping[str, Any]) -> None:
    """ONNX Runtime takes the type of a result from the type at the place of quant_scale2, and a list of keys moves that
    place (see op_registry/cpu_kernel.py). Raises KernelError where it would take the wrong one."""
    keys = inputs.get("key")
    count = len(keys) if isinstance(keys, list | tuple) else 1
    if op_type == "IncreFlashAttention" and count > 1 and inputs.get("quant_scale2") is not None:
        raise KernelError(
            f"{op_type}: input quant_scale2 is given beside a list of {count} keys, expected one key and one value. "
            "ONNX Runtime cannot tell that the result of a list is int8: leave quant_scale2 away, quantise the result"
        )


def _element_type(spec: OpSpec, array: Array) -> int:
    ge = dtypes.from_numpy(array.dtype)
    number = None if ge is None else dtypes.to_onnx(ge)
    if number is None:
        raise NodeError(f"{spec.name}: arrays of dtype {array.dtype} have no ONNX type")
    return number


@functools.lru_cache(maxsize=64)
def _session(request: Request, settings: tuple[str | None, ...]) -> ort.InferenceSession:
    return session_of({"": request})  # the settings are only part of the key: the library reads them here


def session_of(requests: Mapping[str, Request]) -> ort.InferenceSession:
    """A session with a node for each request; the names of its inputs and outputs have the key in front."""
    nodes, inputs, results = [], [], []
    for prefix, request in requests.items():
        spec, attributes = request.spec, request.attributes
        output_names = [prefix + entry.name if entry.name in request.wanted else "" for entry in spec.outputs]
        while output_names and not output_names[-1]:
            output_names.pop()
        given = list(zip(_input_names(spec, dict(attributes)), request.types, strict=False))
        node = helper.make_node(
            spec.name,
            ["" if dtype is None else prefix + name for name, dtype in given],
            output_names,
            name=prefix + spec.name,
            domain=DOMAIN,
        )
        node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes)
        nodes.append(node)
        inputs += [helper.make_tensor_value_info(prefix + name, dtype, None) for name, dtype in given if dtype]
        results += [
            helper.make_tensor_value_info(
                prefix + entry.name, _output_type(spec, entry, request.types, attributes), None
            )
            for entry in spec.outputs
            if entry.name in request.wanted
        ]
    model = helper.make_model(
        helper.make_graph(nodes, "calls", inputs, results),
        ir_version=_IR_VERSION,
        opset_imports=[helper.make_opsetid("", _ONNX_OPSET), helper.make_opsetid(DOMAIN, VERSION)],
    )
    options = ort.SessionOptions()
    options.log_severity_level = 4  # errors come as exceptions
    register_custom_ops(options)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _output_type(
    spec: OpSpec, entry: OutputSpec, types: tuple[int | None, ...], attributes: tuple[tuple[str, Any], ...]
) -> int:
    """An output that may have one type only has it; the gradient of the weights has theirs, which may differ from the
    query's; all others have the query's. With lists among the inputs it is what the registry infers."""
    if "quant_scale2" in spec.input_names or any(tensor.kind is Kind.DYNAMIC for tensor in spec.inputs):
        infos = [None if dtype is None else TensorInfo(dtypes.from_onnx(dtype) or "") for dtype in types]
        given = {name: info for name, info in bind_inputs(spec, infos, dict(attributes)).items() if info}
        own = {name: value for name, value in attributes if name in spec.attr_names}
        if "quant_scale2" in given and any(isinstance(info, list) and len(info) > 1 for info in given.values()):
            what = "is given beside a list of tensors, expected one tensor of keys: the type of the result is not seen"
            raise KernelError(f"{spec.name}: quant_scale2 {what}")
        return dtypes.to_onnx(infer(spec.name, given, own)[entry.name].dtype) or TensorProto.FLOAT
    source = {"d_weight": "weight"}.get(entry.name, spec.inputs[0].name)
    position = spec.input_names.index(source) if source in spec.input_names else 0
    only = dtypes.to_onnx(entry.dtypes[0]) if len(entry.dtypes) == 1 else None
    return only or types[position] or TensorProto.FLOAT


def _without_padding_mask(op_type: str, cann: str | None, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every operator ignores a padding_mask; where the newest variant has none, its place is another input's."""
    if "padding_mask" in get(op_type).input_names or "padding_mask" not in get(op_type, cann).input_names:
        return inputs
    return {name: value for name, value in inputs.items() if name != "padding_mask"}


def _to_ort(array: Array) -> ort.OrtValue:
    array = np.asarray(array, order="C")  # np.ascontiguousarray makes a scalar a vector
    if array.dtype.name == "bfloat16":
        # NumPy itself knows no bfloat16, so neither does the plain conversion.
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), TensorProto.BFLOAT16)
    return ort.OrtValue.ortvalue_from_numpy(array)


def from_ort(value: ort.OrtValue) -> Array:
    if value.data_type() != "tensor(bfloat16)":
        array: Array = value.numpy()
        return array
    bits = np.empty(value.shape(), np.uint16)
    ctypes.memmove(bits.ctypes.data, value.data_ptr(), bits.nbytes)
    return bits.view(dtypes.to_numpy("DT_BF16"))


def _own_words(spec: OpSpec, text: str) -> str:
    """What the kernel said, without what ONNX Runtime wraps around it; else what ONNX Runtime says, on one line."""
    start = text.find("node '")
    return f"{spec.name}: {' '.join(text.split())}" if start < 0 else text[start:].strip()
