"""Runs one operator eagerly, in a model of one node. The session is kept for the next call of the
same kind."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnx import TensorProto, helper
from onnxruntime.capi import onnxruntime_pybind11_state as pybind

from fa_compiler.lowering.ort.library import OPERATORS, register_custom_ops
from fa_compiler.lowering.ort.own_session import OwnSession
from fa_compiler.op_registry import (
    DOMAIN,
    VERSION,
    Kind,
    NodeError,
    OpSpec,
    TensorInfo,
    as_arrays,
    bind_inputs,
    count_attrs,
    dtypes,
    full_attrs,
    get,
    has_kernel,
    infer,
    place_inputs,
    refusal,
)
from fa_compiler.op_registry.errors import FaCompilerError, suggests_keywords

Array = npt.NDArray[Any]

# An opset of ONNX that every supported ONNX Runtime has. The model has no ONNX nodes, so its number
# does not matter.
_ONNX_OPSET = 17
_IR_VERSION = 8

# The environment variables that change the arithmetic of a kernel.
_KERNEL_SETTINGS = ("FA_COMPILER_ISA", "FA_COMPILER_FLOAT32_PRODUCTS")

_turns: ContextVar[int | None] = ContextVar("turns", default=None)
"""The threads of a call inside `taking_turns`; None outside."""

# ONNX Runtime has one class for each status code and no common base class. A few errors are plain
# RuntimeErrors.
ORT_ERRORS: tuple[type[Exception], ...] = (
    RuntimeError,
    *(
        error
        for error in vars(pybind).values()
        if isinstance(error, type) and issubclass(error, Exception)
    ),
)


class KernelError(FaCompilerError, ValueError):
    """The CPU kernel does not take these inputs or attributes. The text names the input and what
    was expected."""


@suggests_keywords
def run(
    op_type: str,
    inputs: Mapping[str, Any],
    attrs: Mapping[str, Any],
    outputs: Sequence[str] | None = None,
    cann: str | None = None,
) -> dict[str, Array]:
    """Run `op_type` on the CPU kernel, and return its outputs by name.

    The registry checks a call first. The kernel does not run a call that the registry refuses,
    unless an extension allows it.

    Args:
        op_type: the operator.
        inputs: arrays by REG_OP input name, a list of arrays for a dynamic input. An absent input
            is None or missing. bfloat16 is `ml_dtypes.bfloat16`. Arrays may have any byte order and
            strides; Python numbers and lists of numbers are accepted, too.
        attrs: attributes by name; a missing one has its default.
        outputs: the names of the outputs to return; None returns all.
        cann: the variant of the prototype, which determines names, their order and defaults; None
            is the newest. The kernel knows those orders that ONNX Runtime can distinguish by types.

    Raises:
        UnknownOp, UnknownVariant: the registry has no such operator or variant.
        NodeError: a name is unknown or missing, or a value has a wrong type.
        KernelError: the registry or the kernel does not take the call.
    """
    return compute(*allowed(op_type, inputs, attrs, cann), outputs, cann)


def allowed(
    op_type: str, inputs: Mapping[str, Any], attrs: Mapping[str, Any], cann: str | None = None
) -> tuple[OpSpec, dict[str, Any], dict[str, Any]]:
    """The registry's entry, the arrays and the attributes of a call. Raises as `run` if the
    registry refuses it."""
    inputs = _without_padding_mask(op_type, cann, inputs)
    spec = get(op_type, cann)
    if not has_kernel(op_type):
        raise KernelError(
            f"{op_type}: the library has no kernel of it; fa_compiler.reference.run computes it"
        )
    attributes = full_attrs(spec, attrs)
    arrays = as_arrays(spec, inputs)
    place_inputs(spec, arrays)  # raises for a missing required input
    refused = refusal(spec, arrays, attributes, cann)
    if refused is not None:
        raise KernelError(f"{op_type}: {refused.message} ({refused.constraint})")
    return spec, arrays, attributes


def compute(
    spec: OpSpec,
    arrays: Mapping[str, Any],
    attributes: Mapping[str, Any],
    outputs: Sequence[str] | None = None,
    cann: str | None = None,
) -> dict[str, Array]:
    """`run` without the registry's check. The kernel itself refuses a call that it cannot compute,
    as in a model.

    `arrays` is a result of `as_arrays`, and `attributes` of `full_attrs`. Raises KernelError.
    """
    request, placed = requested(spec, arrays, attributes, outputs, cann)
    try:
        session = _session(request, _turns.get(), tuple(map(os.environ.get, _KERNEL_SETTINGS)))
        results = session.run_with_ort_values(list(request.results), fed(request, placed))
    except ORT_ERRORS as error:
        raise KernelError(_kernel_message(spec, str(error))) from None
    return {name: from_ort(result) for name, result in zip(request.wanted, results, strict=True)}


@dataclass(frozen=True)
class Request:
    """A call without its numbers: everything that determines the model of one node."""

    op_type: str
    cann: str | None
    attributes: tuple[tuple[str, Any], ...]
    types: tuple[int | None, ...]
    """ONNX's numbers of the types of the inputs, None for an absent input."""
    wanted: tuple[str, ...]

    @property
    def spec(self) -> OpSpec:
        """The operator's entry in the registry."""
        return get(self.op_type, self.cann)

    @property
    def results(self) -> tuple[str, ...]:
        """The names of the model's outputs that are `wanted`."""
        return tuple(_result_name(self.spec, name) for name in self.wanted)


def requested(
    spec: OpSpec,
    arrays: Mapping[str, Any],
    attributes: Mapping[str, Any],
    outputs: Sequence[str] | None,
    cann: str | None,
) -> tuple[Request, list[Array | None]]:
    """The request for a call, and the arrays in the order of the node's inputs. Raises
    KernelError."""
    wanted = tuple(entry.name for entry in spec.outputs) if outputs is None else tuple(outputs)
    for name in wanted:
        spec.output(name)
    placed = place_inputs(spec, arrays)
    types = tuple(None if array is None else _element_type(spec, array) for array in placed)
    _check_type_of_lists(spec, arrays)
    return Request(
        spec.name, cann, tuple({**attributes, **count_attrs(spec, arrays)}.items()), types, wanted
    ), placed


def fed(
    request: Request, placed: Sequence[Array | None], prefix: str = ""
) -> dict[str, ort.OrtValue]:
    """The model's inputs by name. Equal arrays share one tensor, so a kernel can see that two
    inputs share memory."""
    tensors = {id(array): to_ort(array) for array in placed if array is not None}
    names = _input_names(request.spec, dict(request.attributes))
    return {
        prefix + name: tensors[id(array)]
        for name, array in zip(names, placed, strict=False)
        if array is not None
    }


def _result_name(spec: OpSpec, name: str) -> str:
    """The name of the model's output for an output of the operator. A state in place has the name
    of an input, too."""
    return f"new_{name}" if name in spec.input_names else name


def _input_names(spec: OpSpec, attributes: Mapping[str, Any]) -> list[str]:
    """The names of the model's inputs. They are the operator's names, because ONNX Runtime's errors
    contain them."""
    names: list[str] = []
    for entry in spec.inputs:
        count = int(attributes.get(f"{entry.name}_count", 1)) if entry.kind is Kind.DYNAMIC else 1
        names += [entry.name] if count == 1 else [f"{entry.name}[{n}]" for n in range(count)]
    return names


def _check_type_of_lists(spec: OpSpec, inputs: Mapping[str, Any]) -> None:
    """Raise KernelError for an int8 result with a list of keys.

    ONNX Runtime infers the type of a result from the position of quant_scale2, and a list of keys
    moves this input (see op_registry/cpu_kernel.py).
    """
    keys = inputs.get("key")
    count = len(keys) if isinstance(keys, list | tuple) else 1
    if count > 1 and inputs.get("quant_scale2") is not None:
        raise KernelError(
            f"{spec.name}: input quant_scale2 is given beside a list of {count} keys, expected one key and one value. "
            "ONNX Runtime cannot infer that the result of a list is int8: leave out quant_scale2, quantise the result"
        )


def _element_type(spec: OpSpec, array: Array) -> int:
    ge = dtypes.from_numpy(array.dtype)
    number = None if ge is None else dtypes.to_onnx(ge)
    if number is None:
        raise NodeError(f"{spec.name}: arrays of dtype {array.dtype} have no ONNX type")
    return number


@contextmanager
def taking_turns(threads: int) -> Iterator[None]:
    """Within it, the caller runs other sessions between its calls, on the same cores.

    The session of a call has so many threads; 0 is ONNX Runtime's default.
    """
    token = _turns.set(threads)
    try:
        yield
    finally:
        _turns.reset(token)


def leave_cores(options: ort.SessionOptions) -> None:
    """Let the threads of a session sleep as soon as a run ends.

    By default they spin for a while, in case that another run follows. In this time other sessions
    lack their cores.
    """
    options.add_session_config_entry("session.force_spinning_stop", "1")


@functools.lru_cache(maxsize=64)
def _session(
    request: Request, turns: int | None, settings: tuple[str | None, ...]
) -> ort.InferenceSession:
    # `settings` is only a key of the cache. The library reads the settings when the session is
    # made.
    return session_of({"": request}, turns)


def session_of(requests: Mapping[str, Request], turns: int | None = None) -> ort.InferenceSession:
    """A session with a node for each request. The names of its inputs and outputs begin with the
    request's key."""
    nodes, inputs, results = [], [], []
    for prefix, request in requests.items():
        spec, attributes, types = request.spec, request.attributes, _output_types(request)
        made = {
            name: prefix + _result_name(spec, name)
            for name in spec.output_names
            if name in request.wanted
        }
        output_names = [made.get(name, "") for name in spec.output_names]
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
        inputs += [
            helper.make_tensor_value_info(prefix + name, dtype, None)
            for name, dtype in given
            if dtype
        ]
        results += [
            helper.make_tensor_value_info(name, types[output], None)
            for output, name in made.items()
        ]
    model = helper.make_model(
        helper.make_graph(nodes, "calls", inputs, results),
        ir_version=_IR_VERSION,
        opset_imports=[helper.make_opsetid("", _ONNX_OPSET), helper.make_opsetid(DOMAIN, VERSION)],
    )
    options = ort.SessionOptions()
    options.log_severity_level = 4  # errors come as exceptions
    if turns is not None:
        options.intra_op_num_threads = turns
        leave_cores(options)
    options.add_session_config_entry(
        OPERATORS, ",".join(sorted({request.spec.name for request in requests.values()}))
    )
    register_custom_ops(options)
    return OwnSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _output_types(request: Request) -> dict[str, int]:
    """The types of the outputs, as the registry infers them. An output that it does not infer, as
    those of a call that it refuses, has its only type, or that of the first input."""
    spec, attributes = request.spec, dict(request.attributes)
    infos = [
        None if dtype is None else TensorInfo(dtypes.from_onnx(dtype) or "")
        for dtype in request.types
    ]
    given = {name: info for name, info in bind_inputs(spec, infos, attributes).items() if info}
    own = {name: value for name, value in attributes.items() if name in spec.attr_names}
    types = {
        entry.name: entry.dtypes[0] if len(entry.dtypes) == 1 else "" for entry in spec.outputs
    }
    with suppress(NodeError):
        types |= {
            name: info.dtype for name, info in infer(spec.name, given, own, request.cann).items()
        }
    first = request.types[0] or TensorProto.FLOAT
    return {
        name: (dtypes.to_onnx(dtype) or first) if dtype else first for name, dtype in types.items()
    }


def _without_padding_mask(
    op_type: str, cann: str | None, inputs: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The inputs without padding_mask, which every operator ignores.

    Another input may have its position in the newest variant.
    """
    if (
        "padding_mask" in get(op_type).input_names
        or "padding_mask" not in get(op_type, cann).input_names
    ):
        return inputs
    return {name: value for name, value in inputs.items() if name != "padding_mask"}


def to_ort(array: Array) -> ort.OrtValue:
    """The array as a tensor of ONNX Runtime, which shares its memory where it can."""
    array = np.asarray(array, order="C")  # np.ascontiguousarray makes a scalar a vector
    if array.dtype.name == "bfloat16":
        # NumPy does not have bfloat16, so the plain conversion does not know it.
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(
            array.view(np.uint16), TensorProto.BFLOAT16
        )
    return ort.OrtValue.ortvalue_from_numpy(array)


def from_ort(value: ort.OrtValue) -> Array:
    """The tensor as an array; bfloat16, which NumPy does not have, is `ml_dtypes.bfloat16`."""
    if value.data_type() != "tensor(bfloat16)":
        array: Array = value.numpy()
        return array
    bits = np.empty(value.shape(), np.uint16)
    ctypes.memmove(bits.ctypes.data, value.data_ptr(), bits.nbytes)
    return bits.view(dtypes.to_numpy("DT_BF16"))


def _kernel_message(spec: OpSpec, text: str) -> str:
    """The kernel's message without the text that ONNX Runtime adds; otherwise ONNX Runtime's
    message on one line."""
    start = text.find("node '")
    return f"{spec.name}: {' '.join(text.split())}" if start < 0 else text[start:].strip()
