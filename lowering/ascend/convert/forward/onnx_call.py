"""The argument of a handler of the forward table, and the decorator that registers a handler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from fa_compiler.lowering.ascend.convert.emit import Emitter, Shape, Tensor, Type
from fa_compiler.lowering.ascend.convert.errors import CannotMapError
from fa_compiler.lowering.ascend.dtypes import attr_number
from fa_compiler.lowering.ascend.graph import ge_shape
from fa_compiler.op_registry import dtypes
from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.ir.nodes import constant, float_attr, input_of, int_attr, is_read, text_attr
from fa_compiler.passes.ops.context import integers_of
from fa_compiler.passes.values.shapes import ShapeInfo

STANDARD = ""
MICROSOFT = "com.microsoft"

READ_LIMIT = 1 << 16
"""Constants of more elements are not read. No list of axes or sizes is that long."""


@dataclass(frozen=True)
class OnnxCall:
    """An ONNX node whose inputs are already tensors of the GE graph."""

    node: ir.Node
    emitter: Emitter
    inputs: Sequence[Tensor | None]
    info: ShapeInfo
    opset: int

    # -- inputs ----------------------------------------------------------------------------------

    def has(self, index: int) -> bool:
        """Whether input `index` is present."""
        return self.optional(index) is not None

    def x(self, index: int = 0) -> Tensor:
        """Input `index`. Raises CannotMapError if it is absent."""
        tensor = self.optional(index)
        if tensor is None:
            raise CannotMapError(f"input {index} is missing")
        return tensor

    def optional(self, index: int) -> Tensor | None:
        """Input `index`, or None if it is absent."""
        return self.inputs[index] if index < len(self.inputs) else None

    def present(self) -> list[Tensor]:
        """The present inputs."""
        return [tensor for tensor in self.inputs if tensor is not None]

    def array(self, index: int) -> np.ndarray[Any, Any] | None:
        """The content of a small input, if it is the same in every run."""
        if not self.has(index):
            return None
        value = self.node.inputs[index]
        assert value is not None
        found = constant(value, READ_LIMIT)
        if found is not None:
            return found
        content = self.info.fact(value).content
        if content is None or content.dtype != object:
            return content
        numbers = integers_of(content)
        return None if numbers is None else numbers.astype(np.int64)

    def integers(self, index: int) -> list[int] | None:
        """The elements of an integer input, if they are the same in every run."""
        found = self.array(index)
        return None if found is None else [int(number) for number in found.reshape(-1)]

    def content(self, index: int) -> list[Dim] | None:
        """The elements of a small integer vector as symbolic sizes, if they are known."""
        value = self.node.inputs[index]
        found = None if value is None else self.info.fact(value).content
        if found is None or found.dtype != object or found.ndim != 1:
            return None
        return list(found)

    def dims(self, index: int) -> tuple[Dim, ...] | None:
        """The symbolic shape of input `index`."""
        value = input_of(self.node, index)
        return None if value is None else self.info.shape(value)

    # -- attributes ------------------------------------------------------------------------------

    def integer(self, name: str, default: int) -> int:
        """An integer attribute."""
        return int_attr(self.node, name, default)

    def number(self, name: str, default: float) -> float:
        """A float attribute."""
        return float_attr(self.node, name, default)

    def text(self, name: str, default: str) -> str:
        """A string attribute."""
        return text_attr(self.node, name, default)

    def integer_list(self, name: str) -> list[int] | None:
        """An attribute with a list of integers, None if it is absent."""
        attr = self.node.attributes.get(name)
        return None if attr is None else [int(number) for number in attr.as_ints()]

    def listed(self, name: str, index: int) -> list[int] | None:
        """An attribute with a list of integers, which is input `index` in newer opsets; None if it
        is absent or computed."""
        numbers = self.integer_list(name)
        return self.integers(index) if numbers is None else numbers

    def axis(self, default: int, of: int = 0) -> int:
        """The attribute `axis` as a number from 0 on. Raises CannotMapError for an unknown rank."""
        return self.front(self.integer("axis", default), self.x(of).rank)

    @staticmethod
    def front(axis: int, rank: int) -> int:
        """An axis as a number from 0 on. Raises CannotMapError for an axis outside the rank."""
        if not -rank <= axis < max(rank, 1):
            raise CannotMapError(f"axis {axis} is outside a tensor of rank {rank}")
        return axis + rank if axis < 0 else axis

    # -- outputs ---------------------------------------------------------------------------------

    def out(self, index: int = 0) -> Type:
        """The type and shape of output `index`."""
        return type_of(self.node.outputs[index], self.info)

    def wanted(self, index: int) -> bool:
        """Whether anything reads output `index`."""
        return any(value.name and is_read(value) for value in self.node.outputs[index : index + 1])

    # -- emitting --------------------------------------------------------------------------------

    def cast(self, x: Tensor, dtype: str) -> Tensor:
        """`x` in another type."""
        if x.dtype == dtype:
            return x
        if x.value is not None:
            return self.emitter.const(x.value, dtype)
        return self.emitter.op("Cast", x, dst_type=attr_number(dtype), out=x.with_dtype(dtype))

    def like(self, number: float, x: Type) -> Tensor:
        """A number as a scalar of the type of `x`."""
        return self.emitter.const(number, x.dtype)

    def reshape(self, x: Tensor, parts: Sequence[int | Tensor]) -> Tensor:
        """`x` in a shape of constant sizes (-1 for the remaining elements) and vectors with one
        computed size each."""
        shape = tuple(part if isinstance(part, int) else -1 for part in parts)
        if -1 in shape and x.shape is not None and -1 not in x.shape:
            rest = int(np.prod([size for size in shape if size >= 0]))
            if shape.count(-1) == 1 and rest:
                shape = tuple(
                    int(np.prod(x.shape)) // rest if size == -1 else size for size in shape
                )
        return self.emitter.op("Reshape", x, self.vector(parts), out=x.with_shape(shape))

    def vector(self, parts: Sequence[int | Tensor]) -> Tensor:
        """Sizes as one int64 vector. Tensors among the sizes have one element each."""
        if all(isinstance(part, int) for part in parts):
            return self.emitter.ints([part for part in parts if isinstance(part, int)])
        pieces = [self.emitter.ints([part]) if isinstance(part, int) else part for part in parts]
        if len(pieces) == 1:
            return pieces[0]
        out = Type("DT_INT64", (len(pieces),))
        return self.emitter.op("ConcatD", pieces, concat_dim=0, N=len(pieces), out=out)

    def size(self, x: Tensor, axis: int) -> int | Tensor:
        """The size of an axis: a number, or a vector of one element that is computed at run
        time."""
        if x.shape is not None and x.shape[axis] >= 0:
            return x.shape[axis]
        return self.element(self.shape(x), axis)

    def shape(self, x: Tensor) -> Tensor:
        """The shape of `x` as an int64 vector."""
        if x.shape is not None and -1 not in x.shape:
            return self.emitter.ints(x.shape)
        rank = -1 if x.shape is None else len(x.shape)
        return self.emitter.op(
            "Shape", x, dtype=attr_number("DT_INT64"), out=Type("DT_INT64", (rank,))
        )

    def element(self, vector: Tensor, index: int) -> Tensor:
        """Element `index` of a vector, as a vector of one element."""
        return self.cut(vector, [index], [index + 1])

    def cut(
        self, x: Tensor, begin: Sequence[int], end: Sequence[int], axes: Sequence[int] = (0,)
    ) -> Tensor:
        """`x` from `begin` to `end` along `axes`."""
        shape = None if x.shape is None else list(x.shape)
        for axis, first, last in zip(axes, begin, end, strict=True):
            if shape is not None and (shape[axis] >= 0 or last >= 0 <= first):
                size = shape[axis]
                ends = [n + size if n < 0 else n for n in (first, last)]
                shape[axis] = max(0, (ends[1] if size < 0 else min(ends[1], size)) - ends[0])
        return self.emitter.op(
            "StridedSliceV2",
            x,
            self.emitter.ints(begin),
            self.emitter.ints(end),
            self.emitter.ints(axes),
            self.emitter.ints([1] * len(axes)),
            out=x.with_shape(None if shape is None else tuple(shape)),
        )

    def binary(self, op_type: str, a: Tensor, b: Tensor, dtype: str | None = None) -> Tensor:
        """An operator with two inputs that broadcast."""
        return self.emitter.op(
            op_type, a, b, out=Type(dtype or a.dtype, broadcast(a.shape, b.shape))
        )

    def reduced(
        self, op_type: str, x: Tensor, axes: Tensor, out: Type, keep: bool = False
    ) -> Tensor:
        """A reduction over some axes, or over none if these are none."""
        return self.emitter.op(
            op_type, x, axes, keep_dims=keep, noop_with_empty_axes=False, out=out
        )

    def positions(self, size: int | Tensor) -> Tensor:
        """The positions along an axis of this size, in int64."""
        limit = self.emitter.ints(size) if isinstance(size, int) else self.squeeze(size, [0])
        out = Type("DT_INT64", (size if isinstance(size, int) else -1,))
        return self.emitter.op("Range", self.emitter.ints(0), limit, self.emitter.ints(1), out=out)

    def unary(self, op_type: str, x: Tensor, **attrs: Any) -> Tensor:
        """An operator that keeps type and shape."""
        return self.emitter.op(op_type, x, out=x, **attrs)

    def transpose(self, x: Tensor, perm: Sequence[int]) -> Tensor:
        """`x` with its axes in another order."""
        if list(perm) == list(range(len(perm))):
            return x
        shape = None if x.shape is None else tuple(x.shape[axis] for axis in perm)
        return self.emitter.op("Transpose", x, self.emitter.ints(perm), out=x.with_shape(shape))

    def unsqueeze(self, x: Tensor, axes: Sequence[int]) -> Tensor:
        """`x` with new axes of size 1, at these axes of the result."""
        if not axes:
            return x
        shape = None
        if x.shape is not None:
            sizes = iter(x.shape)
            shape = tuple(
                1 if axis in axes else next(sizes) for axis in range(len(x.shape) + len(axes))
            )
        return self.emitter.op("Unsqueeze", x, axes=sorted(axes), out=x.with_shape(shape))

    def squeeze(self, x: Tensor, axes: Sequence[int]) -> Tensor:
        """`x` without these axes of size 1."""
        if not axes:
            return x
        shape = (
            None
            if x.shape is None
            else tuple(s for axis, s in enumerate(x.shape) if axis not in axes)
        )
        return self.emitter.op("Squeeze", x, axis=sorted(axes), out=x.with_shape(shape))


Handler = Callable[[OnnxCall], "Tensor | Sequence[Tensor]"]
HANDLERS: dict[tuple[str, str], Handler] = {}


def handles(*op_types: str, domain: str = STANDARD) -> Callable[[Handler], Handler]:
    """A decorator that registers a function for ONNX operators of a domain."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update({(domain, op_type): handler for op_type in op_types})
        return handler

    return register


def type_of(value: ir.Value, info: ShapeInfo) -> Type:
    """The GE type and shape of an ONNX value. Raises CannotMapError if the type is unknown or GE
    does not have it."""
    dtype = info.dtype(value) or value.dtype
    if dtype is None:
        raise CannotMapError(
            f"the type of '{value.name}' is not known", "run ONNX's shape inference on the model"
        )
    name = dtypes.from_onnx(int(dtype))
    if name is None:
        raise CannotMapError(f"GE has no type {dtype.name.lower()}, which '{value.name}' has")
    dims = info.shape(value)
    return Type(name, None if dims is None else ge_shape([dim.const for dim in dims]))


def broadcast(a: Shape, b: Shape) -> Shape:
    """The shape to which two shapes broadcast, as far as it is known."""
    if a is None or b is None:
        return None
    rank = max(len(a), len(b))
    pairs = zip((1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b, strict=True)
    # If one of two sizes is 1, their product is the other one.
    return tuple(x * y if 1 in (x, y) else max(x, y) for x, y in pairs)
