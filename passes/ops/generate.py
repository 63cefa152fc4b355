"""Operators that make tensors: constants, ranges, random numbers, and tensors of or from shapes."""

from __future__ import annotations

import functools
import math

import numpy as np
import onnx
import onnx_ir as ir

from fa_compiler.passes.algebra.cases import Number, as_integer
from fa_compiler.passes.algebra.formula import Index
from fa_compiler.passes.algebra.known import if_known
from fa_compiler.passes.algebra.symbolic import Dim, integer, product
from fa_compiler.passes.ir.nodes import all_known, input_of
from fa_compiler.passes.ops.context import (
    LIMIT,
    Content,
    Context,
    Fact,
    content_fact,
    dim_array,
    fresh,
    or_fresh,
    rule,
)
from fa_compiler.passes.ops.moves import Reader, element, only_element


def fill_of(node: ir.Node) -> np.ndarray:
    """What a ConstantOfShape holds everywhere, in an array of one element; by default 0."""
    attr = node.attributes.get("value")
    return np.zeros(1, np.float32) if attr is None else attr.as_tensor().numpy()


def tensor_fact(tensor: ir.TensorProtocol) -> Fact:
    """The fact of a constant. Only tensors of at most 64 elements are read."""
    if isinstance(tensor, ir.serde.TensorProtoTensor) and math.prod(tensor.raw.dims) <= LIMIT:
        proto = tensor.raw
        if proto.HasField("raw_data"):
            return _raw_fact(proto.data_type, tuple(proto.dims), proto.raw_data)
    return _fact(tensor)


@functools.lru_cache(1 << 12)
def _raw_fact(data_type: int, dims: tuple[int, ...], data: bytes) -> Fact:
    """`tensor_fact` of raw data, with a cache: TorchScript writes the same few constants thousands
    of times."""
    return _fact(
        ir.serde.TensorProtoTensor(onnx.TensorProto(data_type=data_type, dims=dims, raw_data=data))
    )


def _fact(tensor: ir.TensorProtocol) -> Fact:
    dtype, shape = tensor.dtype, tensor.shape.numpy()
    content = _read(tensor, dtype) if math.prod(shape) <= LIMIT else None
    return Fact(tuple(map(integer, shape)), dtype, content)


def _read(tensor: ir.TensorProtocol, dtype: ir.DataType) -> Content | None:
    floating = dtype.is_floating_point()
    if not (floating or dtype.is_integer() or dtype == ir.DataType.BOOL):
        return None
    try:
        array = tensor.numpy()
    except (OSError, ValueError):
        # External data is missing or cut short. Whoever runs the model is told so.
        return None
    if floating:
        return np.array(array)
    values = np.empty(array.size, dtype=object)
    values[:] = [integer(int(item)) for item in array.reshape(-1).tolist()]
    return values.reshape(array.shape)


@rule("Constant")
def _constant(ctx: Context) -> Fact:
    for name, make in (
        ("value", tensor_fact),
        ("value_int", lambda value: content_fact(dim_array(value), ir.DataType.INT64)),
        ("value_ints", lambda value: content_fact(dim_array(list(value)), ir.DataType.INT64)),
        ("value_float", lambda value: content_fact(np.array(value, np.float32), ir.DataType.FLOAT)),
        (
            "value_floats",
            lambda value: content_fact(np.array(value, np.float32), ir.DataType.FLOAT),
        ),
    ):
        value = ctx.attr(name)
        if value is not None:
            return make(value)
    return Fact()


@rule("Shape")
def _shape(ctx: Context) -> Fact:
    shape = ctx.shape(0)
    if shape is None:
        return Fact(fresh(1), ir.DataType.INT64)
    if ctx.opset >= 15:
        end = ctx.attr("end")
        shape = shape[ctx.int_attr("start", 0) : if_known(int, end)]
    return content_fact(_vector(list(shape)), ir.DataType.INT64)


def _vector(dims: list[Dim]) -> Content:
    array = np.empty(len(dims), dtype=object)
    array[:] = dims
    return array


@rule("Size")
def _size(ctx: Context) -> Fact:
    shape = ctx.shape(0)
    return content_fact(dim_array(or_fresh(if_known(product, shape))), ir.DataType.INT64)


@rule("ConstantOfShape")
def _constant_of_shape(ctx: Context) -> Fact:
    tensor = ctx.attr("value")
    dtype = ir.DataType.FLOAT if tensor is None else tensor.dtype
    dims = ctx.vector(0)
    if dims is None:
        return Fact(None, dtype)
    sizes = [dim.const for dim in dims if dim.const is not None and 0 <= dim.const <= LIMIT]
    if len(sizes) == len(dims) and math.prod(sizes) <= LIMIT:
        value = np.zeros(1, np.float32) if tensor is None else _read(tensor, tensor.dtype)
        if value is not None and value.size == 1:
            return content_fact(np.full(sizes, value.reshape(-1)[0], value.dtype), dtype)
    # A negative entry fails at run time, so each entry is the dim.
    return Fact(tuple(dims), dtype)


@rule("Range")
def _range(ctx: Context) -> Fact:
    bounds = all_known(_range_bound(ctx.content(index)) for index in range(3))
    if bounds is None:
        return Fact(fresh(1), ctx.dtype(0))
    start, limit, delta = bounds
    if not delta.is_at_least(1) and not (-delta).is_at_least(1):
        return Fact(fresh(1), ctx.dtype(0))
    length = Dim.max(Dim.ceildiv(limit - start, delta), 0)
    count, content = length.const, ctx.content(0)
    are_integers = content is not None and content.dtype == object
    if are_integers and count is not None and count <= LIMIT:
        return content_fact(
            _vector([start + delta * index for index in range(count)]), ctx.dtype(0)
        )
    return Fact((length,), ctx.dtype(0))


def _range_bound(content: Content | None) -> Dim | None:
    """The start, limit or step of a Range, if it is an integer, or a float that is a small integer:
    only these are counted exactly. Others, or NaN, may give one step more or less."""
    number = None if content is None or content.size != 1 else content.reshape(-1)[0]
    if number is None or isinstance(number, Dim):
        return number
    return Dim(int(number)) if abs(number) < 2**11 and number == int(number) else None


@element("Range")
def _number_of_range(reader: Reader, node: ir.Node, index: Index) -> Number | None:
    """start + step * i, for a step that is known."""
    start, step = (as_integer(only_element(input_of(node, place), reader)) for place in (0, 2))
    if start is None or step is None or step.const is None:
        return None
    return start + index[0].times(step.const)


@rule("EyeLike", "RandomNormalLike", "RandomUniformLike")
def _like(ctx: Context) -> Fact:
    return Fact(ctx.shape(0), ctx.dtype_attr("dtype", ctx.dtype(0)))


@rule("RandomNormal", "RandomUniform")
def _random(ctx: Context) -> Fact:
    shape = tuple(Dim(item) for item in ctx.ints_attr("shape") or [])
    return Fact(shape, ctx.dtype_attr("dtype", ir.DataType.FLOAT))
