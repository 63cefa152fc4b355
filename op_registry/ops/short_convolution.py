"""ShortConvolution: a short convolution of each channel along the tokens, with the tokens before as
its state.

It is no operator of Ascend, but the one of ai.onnx 27, with channels_last of com.microsoft. Its
constraints are SC.1 to SC.4.
"""

from __future__ import annotations

from collections.abc import Iterator

from fa_compiler.op_registry import dtypes
from fa_compiler.op_registry.constraints.core import CheckedNode, Rules, one_type, shape_is
from fa_compiler.op_registry.cpu_kernel import CpuKernel, TypeRow
from fa_compiler.op_registry.diagnostic import Diagnostic
from fa_compiler.op_registry.geometry import shape_of
from fa_compiler.op_registry.macros import REG_OP
from fa_compiler.op_registry.node import Dim, TensorInfo
from fa_compiler.op_registry.operator import Attrs, Inputs, Operator, Outputs

FLOATS = "DT_FLOAT, DT_FLOAT16, DT_BF16"
ACTIVATIONS = ("none", "silu")

OURS = (
    REG_OP(
        "ShortConvolution",
        "fa_compiler_1",
        source="onnx/onnx f75469120, the definition of CausalConvWithState 27; "
        "the schema of com.microsoft CausalConvWithState in onnxruntime 1.32.0",
    )
    .INPUT("input", FLOATS)
    .INPUT("weight", FLOATS)
    .OPTIONAL_INPUT("bias", FLOATS)
    .OPTIONAL_INPUT("past_state", FLOATS)
    .OUTPUT("output", FLOATS)
    .OUTPUT("present_state", FLOATS)
    .ATTR("activation", "String", "none")
    .ATTR("channels_last", "Bool", False)
)

_TENSORS = ("input", "weight", "bias", "past_state")

rules = Rules("SC", typed=(*_TENSORS, "output", "present_state"))


@rules(1)
def types(call: CheckedNode) -> Iterator[Diagnostic]:
    """All tensors have one type: FLOAT, FLOAT16 or BF16."""
    yield from one_type(call, (*_TENSORS, "output", "present_state"), dtypes.FLOATS)


rules.values(2, "activation", ACTIVATIONS)


@rules(3)
def ranks(call: CheckedNode) -> Iterator[Diagnostic]:
    """input has rank 3: [B,C,L] or, with channels_last, [B,L,C]. weight is [C,1,K] with K of 1 or
    more."""
    for name in ("input", "weight"):
        if call.rank(name) not in (None, 3):
            yield Diagnostic(name, f"{name} has rank {call.rank(name)}, expected 3")
            return
    channels = _sizes(call.tensors, call.attrs)[1]
    yield from shape_is("weight", call["weight"], (channels, 1, None))
    if shape_of(call["weight"], 3)[2] == 0:
        yield Diagnostic("weight", "weight has no columns, expected 1 or more")


@rules(4)
def shapes(call: CheckedNode) -> Iterator[Diagnostic]:
    """bias is [C], and past_state [B,C,K-1]."""
    yield from shape_is("bias", call["bias"], _sizes(call.tensors, call.attrs)[1:2])
    yield from shape_is("past_state", call["past_state"], _state(call.tensors, call.attrs))


def _sizes(inputs: Inputs, attrs: Attrs) -> tuple[Dim, ...]:
    """Batch, channels and tokens."""
    batch, second, third = shape_of(inputs.get("input"), 3)
    return (batch, third, second) if attrs["channels_last"] else (batch, second, third)


def _state(inputs: Inputs, attrs: Attrs) -> tuple[Dim, ...]:
    width = shape_of(inputs.get("weight"), 3)[2]
    return (*_sizes(inputs, attrs)[:2], width - 1 if isinstance(width, int) else None)


def infer(inputs: Inputs, attrs: Attrs) -> Outputs:
    """output has the shape of input. present_state is [B,C,K-1]."""
    given = inputs["input"]
    return {
        "output": TensorInfo(given.dtype, given.shape),
        "present_state": TensorInfo(given.dtype, _state(inputs, attrs)),
    }


def _type_rows() -> tuple[TypeRow, ...]:
    return tuple(TypeRow((each,) * 4, (each, each)) for each in ("float32", "float16", "bfloat16"))


OPERATOR = Operator(
    variants=(OURS.OP_END_FACTORY_REG(),),
    infer=infer,
    rules=rules,
    kernel=CpuKernel(type_rows=_type_rows),
)
