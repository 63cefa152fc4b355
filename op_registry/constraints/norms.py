"""What the operators that normalise rows ask of the rows and of their weight."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from fa_compiler.op_registry import dtypes
from fa_compiler.op_registry.constraints.core import CheckedNode, text
from fa_compiler.op_registry.diagnostic import Diagnostic
from fa_compiler.op_registry.geometry import differ
from fa_compiler.op_registry.node import TensorInfo

MOST_AXES = 8
LEAST_BYTES = 32
"""What the normalised axes hold at least on 310P."""


def float_type(call: CheckedNode, name: str) -> Iterator[Diagnostic]:
    """The tensor is float32, float16 or bfloat16."""
    found = call.dtype(name)
    if found and found not in dtypes.FLOATS:
        yield Diagnostic(
            name, f"{name} is {found}, expected one of {', '.join(dtypes.FLOATS)}", "aclnn"
        )


def weight_types(
    call: CheckedNode, names: tuple[str, ...], dtype: str | None
) -> Iterator[Diagnostic]:
    """The weights have one type, which is that of the tensor, or float32."""
    found = {name: own for name in names if (own := call.dtype(name))}
    for name, own in found.items():
        if dtype and own not in (dtype, "DT_FLOAT"):
            yield Diagnostic(name, f"{name} is {own}, expected {dtype} or DT_FLOAT", "aclnn")
            return
        if own != (wanted := next(iter(found.values()))):
            yield Diagnostic(
                name, f"{name} is {own}, expected {wanted} as {next(iter(found))}", "aclnn"
            )


def ranks(call: CheckedNode, name: str) -> Iterator[Diagnostic]:
    """The tensor has 1 to 8 axes, and gamma 1 to as many."""
    rank, own = call.rank(name), call.rank("gamma")
    most = MOST_AXES if rank is None else rank
    if rank is not None and not 1 <= rank <= MOST_AXES:
        yield Diagnostic(name, f"{name} has rank {rank}, expected 1 to {MOST_AXES}")
    elif own is not None and not 1 <= own <= most:
        yield Diagnostic("gamma", f"gamma has rank {own}, expected 1 to {most}")


def weights(call: CheckedNode, name: str) -> Iterator[Diagnostic]:
    """gamma has the sizes of the last axes of the tensor."""
    shape, gamma = call.shape(name), call.shape("gamma")
    if shape is None or not gamma or len(gamma) > len(shape):
        return
    last = shape[len(shape) - len(gamma) :]
    if any(map(differ, gamma, last)):
        yield Diagnostic(
            "gamma",
            f"gamma has the shape {text(gamma)}, expected {text(last)} as the end of {name}",
        )


def elements(call: CheckedNode, name: str) -> Iterator[Diagnostic]:
    """The tensor has elements."""
    if 0 in (shape := call.shape(name) or ()):
        yield Diagnostic(name, f"{name} has the shape {text(shape)}, expected sizes of at least 1")


def epsilon(call: CheckedNode) -> Iterator[Diagnostic]:
    """epsilon is at least 0."""
    if call.attr("epsilon") < 0:
        yield Diagnostic("epsilon", f"epsilon is {call.attr('epsilon')}, expected at least 0")


def least_bytes(call: CheckedNode, name: str) -> Iterator[Diagnostic]:
    """On 310P the axes of gamma hold at least 32 bytes."""
    dtype, gamma = call.dtype(name), call.shape("gamma")
    if not call.on("310P") or not dtype or dtype not in dtypes.FLOATS or gamma is None:
        return
    sizes = [size for size in gamma if isinstance(size, int)]
    if (
        len(sizes) == len(gamma)
        and (found := prod(sizes) * dtypes.lookup(dtype).bits // 8) < LEAST_BYTES
    ):
        yield Diagnostic(
            "gamma",
            f"the axes of gamma hold {found} bytes, expected at least {LEAST_BYTES}",
            "document",
        )


def reciprocal(x: TensorInfo, gamma: TensorInfo) -> TensorInfo:
    """The reciprocal of the root mean square: float32, with size 1 along the axes of gamma."""
    if x.shape is None or gamma.shape is None:
        return TensorInfo("DT_FLOAT")
    count = min(len(gamma.shape), len(x.shape))
    return TensorInfo("DT_FLOAT", x.shape[: len(x.shape) - count] + (1,) * count)
