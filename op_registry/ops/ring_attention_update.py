"""RingAttentionUpdate: joins two partial attention results of ring attention.

Its constraints are RAU.1 to RAU.6. Unlike in all other operators, actual_seq_qlen begins with 0, so
it has one entry more than there are sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from fa_compiler.op_registry import dtypes
from fa_compiler.op_registry.constraints.core import CheckedNode, Rules, first, shape_is, text
from fa_compiler.op_registry.constraints.decode_sizes import unlike
from fa_compiler.op_registry.cpu_kernel import CpuKernel
from fa_compiler.op_registry.diagnostic import NULLPTR, Diagnostic
from fa_compiler.op_registry.geometry import STATISTICS, Shape, no_multiple
from fa_compiler.op_registry.macros import REG_OP
from fa_compiler.op_registry.node import TensorInfo
from fa_compiler.op_registry.operator import Attrs, Inputs, Operator, Outputs

FLOATS = "DT_FLOAT16, DT_BF16, DT_FLOAT32"

CURRENT = (
    REG_OP(
        "RingAttentionUpdate",
        "opdef_2025_12",
        source="cannmirror/ops-transformer 05c401f9 (2025-12-31) "
        "attention/ring_attention_update/op_graph/ring_attention_update_proto.h; "
        "same, op_host/ring_attention_update_def.cpp",
        cann="8.5.0-beta.1",
    )
    .INPUT("prev_attn_out", FLOATS)
    .INPUT("prev_softmax_max", "DT_FLOAT32")
    .INPUT("prev_softmax_sum", "DT_FLOAT32")
    .INPUT("cur_attn_out", FLOATS)
    .INPUT("cur_softmax_max", "DT_FLOAT32")
    .INPUT("cur_softmax_sum", "DT_FLOAT32")
    .OPTIONAL_INPUT("actual_seq_qlen", "DT_INT64")
    .OUTPUT("attn_out", FLOATS)
    .OUTPUT("softmax_max", "DT_FLOAT32")
    .OUTPUT("softmax_sum", "DT_FLOAT32")
    .ATTR("input_layout", "String", "SBH")
    .ATTR("input_softmax_layout", "String", "")
    .PRODUCT(
        "ascend910b ascend910_93",
        """
        prev_attn_out=cur_attn_out=attn_out
        FLOAT
        FLOAT16
        BF16
        """,
    )
)

rules = Rules("RAU", typed=("prev_attn_out", "cur_attn_out"))

_STATISTICS = ("prev_softmax_max", "prev_softmax_sum", "cur_softmax_max", "cur_softmax_sum")


@rules(1)
def types(call: CheckedNode) -> Iterator[Diagnostic]:
    """The two results have one float type."""
    first = call.dtype("prev_attn_out")
    if first and first not in dtypes.FLOATS:
        yield Diagnostic(
            "prev_attn_out",
            f"prev_attn_out is {first}, expected one of {', '.join(dtypes.FLOATS)}",
            "aclnn",
        )
    other = call.dtype("cur_attn_out")
    if first and other and other != first:
        yield Diagnostic(
            "cur_attn_out", f"cur_attn_out is {other}, expected {first} as prev_attn_out", "aclnn"
        )


@rules(2)
def layout(call: CheckedNode) -> Iterator[Diagnostic]:
    """input_layout is SBH or TND. The two results have rank 3 and the same shape."""
    value = call.attr("input_layout")
    if value not in ("SBH", "TND"):
        yield Diagnostic("input_layout", f"input_layout is {value!r}, expected SBH or TND")
        return
    for name in ("prev_attn_out", "cur_attn_out"):
        rank = call.rank(name)
        if rank not in (None, 3):
            yield Diagnostic(name, f"{name} has rank {rank}, expected 3 for {value}")
            return
    previous, current = call["prev_attn_out"], call["cur_attn_out"]
    if previous is not None and current is not None and unlike(current, previous):
        message = (
            f"cur_attn_out has the shape {text(current.shape)}, expected {text(previous.shape)}"
        )
        yield Diagnostic("cur_attn_out", f"{message} as prev_attn_out")


@rules(3)
def statistics(call: CheckedNode) -> Iterator[Diagnostic]:
    """The statistics are [B,N,S,8] for SBH and [T,N,8] for TND, and their shapes are equal.
    Constant sums are positive."""
    if any(layout(call)) or call["prev_attn_out"] is None:
        return
    own = call.shape("prev_attn_out") or (None, None, None)
    packed = call.attr("input_layout") == "TND"
    expected: Shape = (own[0], own[1], STATISTICS) if packed else (own[1], None, own[0], STATISTICS)
    for name in _STATISTICS:
        faults = list(first(_statistic(call, name, expected)))
        yield from faults
        if faults:
            return
        found = call.shape(name)
        if not packed and found is not None:  # the first head count that is known is that of all
            expected = (expected[0], expected[1] or found[1], *expected[2:])
    heads, width = expected[1], own[2]
    if not packed and isinstance(heads, int) and heads and no_multiple(width, heads):
        message = f"prev_attn_out has the width {width}, expected a multiple of its {heads} heads"
        yield Diagnostic("prev_attn_out", message)


def _statistic(call: CheckedNode, name: str, expected: Shape) -> Iterator[Diagnostic]:
    """One statistic, if its rank is known, has the expected shape, and its constant sums are
    positive."""
    tensor = call[name]
    if tensor is None or tensor.shape is None:
        return
    yield from shape_is(name, tensor, expected)
    if tensor.value is not None and name.endswith("sum") and not (tensor.value > 0).all():
        yield Diagnostic(name, f"{name} holds numbers that are not positive", "document")


@rules(4)
def ranges(call: CheckedNode) -> Iterator[Diagnostic]:
    """In TND, D is a multiple of 64 up to 768, and N is at most 256."""
    result = call["prev_attn_out"]
    if (
        call.attr("input_layout") != "TND"
        or result is None
        or result.shape is None
        or len(result.shape) != 3
    ):
        return
    _, n, d = result.shape
    if isinstance(d, int) and (d % 64 or d > 768):
        yield Diagnostic(
            "prev_attn_out",
            f"prev_attn_out has the head size {d}, expected a multiple of 64 up to 768",
        )
    if isinstance(n, int) and n > 256:
        yield Diagnostic("prev_attn_out", f"prev_attn_out has {n} heads, expected at most 256")


@rules(5)
def lengths(call: CheckedNode) -> Iterator[Diagnostic]:
    """TND needs actual_seq_qlen: cumulative lengths that begin with 0 and end at T or before."""
    if call.attr("input_layout") != "TND":
        return
    tensor = call["actual_seq_qlen"]
    if tensor is None:
        message = "actual_seq_qlen is absent, expected one for TND"
        yield Diagnostic("actual_seq_qlen", message, "tiling", NULLPTR)
        return
    if call.rank("actual_seq_qlen") not in (None, 1):
        yield Diagnostic(
            "actual_seq_qlen",
            f"actual_seq_qlen has rank {call.rank('actual_seq_qlen')}, expected 1",
        )
        return
    ends, result = call.content("actual_seq_qlen"), call["prev_attn_out"]
    if ends is None:
        return
    tokens = result.shape[0] if result is not None and result.shape else None
    rising = all(a <= b for a, b in pairwise(ends))
    if not ends or ends[0] != 0 or not rising or (isinstance(tokens, int) and ends[-1] > tokens):
        message = f"actual_seq_qlen is {ends}, expected rising numbers from 0 to {tokens}"
        yield Diagnostic("actual_seq_qlen", message, "document")


rules.values(6, "input_softmax_layout", ("", "SBH", "TND"))


def infer(inputs: Inputs, attrs: Attrs) -> Outputs:
    """Each result has the type and shape of the first of the two operands that it joins."""
    names = {
        "attn_out": "prev_attn_out",
        "softmax_max": "prev_softmax_max",
        "softmax_sum": "prev_softmax_sum",
    }
    return {
        output: TensorInfo(inputs[name].dtype, inputs[name].shape)
        for output, name in names.items()
        if name in inputs
    }


OPERATOR = Operator(
    variants=(CURRENT.OP_END_FACTORY_REG(),),
    infer=infer,
    rules=rules,
    kernel=CpuKernel(required_output="attn_out"),
)
