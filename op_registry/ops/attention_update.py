"""AttentionUpdate: joins the attention results of several sequence-parallel ranks.

Its constraints are AU.1 to AU.5.
"""

from __future__ import annotations

from collections.abc import Iterator

from fa_compiler.op_registry import dtypes
from fa_compiler.op_registry.constraints.core import CheckedNode, Rules, text
from fa_compiler.op_registry.cpu_kernel import CpuKernel, TypeRow, type_row
from fa_compiler.op_registry.diagnostic import Diagnostic
from fa_compiler.op_registry.geometry import Shape, differ
from fa_compiler.op_registry.macros import REG_OP
from fa_compiler.op_registry.node import TensorInfo
from fa_compiler.op_registry.operator import Attrs, Inputs, Operator, Outputs

FLOATS = "DT_FLOAT, DT_FLOAT16, DT_BF16"

EXPERIMENT = (
    REG_OP("AttentionUpdate", "experiment_ops", source="Ascend/torchair experiment_ops.h:3867")
    .DYNAMIC_INPUT("lse", "DT_FLOAT")
    .DYNAMIC_INPUT("go", FLOATS)
    .OUTPUT("output", FLOATS)
    .OUTPUT("lse_m", "DT_FLOAT")
    .REQUIRED_ATTR("update_type", "Int")
    .REQUIRED_ATTR("sp", "Int")
)

CURRENT = EXPERIMENT.then(
    "opdef_2025_12",
    source="cannmirror/ops-transformer 05c401f9 (2025-12-31) "
    "attention/attention_update/op_graph/attention_update_proto.h; same, op_host/attention_update_def.cpp",
    cann="8.5.0-beta.1",
).PRODUCT(
    "ascend910b ascend910_93 ascend910_95",
    """
    go=output
    FLOAT
    FLOAT16
    BF16
    """,
)

MAX_RANKS = 16

rules = Rules("AU", typed=("lse", "go"))


@rules(1)
def types(call: CheckedNode) -> Iterator[Diagnostic]:
    """lse is float32, and the tensors of go have one float type."""
    for tensor in call.lists.get("lse", ()):
        if tensor.dtype and tensor.dtype != "DT_FLOAT":
            yield Diagnostic("lse", f"lse is {tensor.dtype}, expected DT_FLOAT", "aclnn")
            return
    types = [tensor.dtype for tensor in call.lists.get("go", ()) if tensor.dtype]
    for dtype in types:
        if dtype not in dtypes.FLOATS:
            yield Diagnostic(
                "go", f"go is {dtype}, expected one of {', '.join(dtypes.FLOATS)}", "aclnn"
            )
            return
        if dtype != types[0]:
            yield Diagnostic("go", f"go holds {types[0]} and {dtype}, expected one type", "aclnn")
            return


@rules(2)
def counts(call: CheckedNode) -> Iterator[Diagnostic]:
    """sp is 1 to 16, and each list has that many tensors."""
    sp = call.attr("sp")
    if not 1 <= sp <= MAX_RANKS:
        yield Diagnostic("sp", f"sp is {sp}, expected 1 to {MAX_RANKS}")
        return
    for name in ("lse", "go"):
        count = len(call.lists.get(name, ()))
        if count not in (0, sp):
            yield Diagnostic(name, f"{name} is a list of {count}, expected {sp} (sp)")


rules.values(3, "update_type", (0, 1))


@rules(4)
def merged(call: CheckedNode) -> Iterator[Diagnostic]:
    """lse_m is given with update_type 1 only."""
    stated = call.outputs.get("lse_m")
    if call.attr("update_type") == 0 and stated is not None and stated.shape not in (None, (0,)):
        yield Diagnostic("lse_m", "lse_m is given with update_type 0, expected none", "aclnn")


@rules(5)
def shapes(call: CheckedNode) -> Iterator[Diagnostic]:
    """The tensors of lse are [rows] and those of go [rows,D], each with equal shapes. Batch, tokens
    and heads are folded into rows."""
    known: dict[str, Shape] = {}
    for name, rank in (("lse", 1), ("go", 2)):
        for tensor in call.lists.get(name, ()):
            if tensor.shape is None:
                continue
            if len(tensor.shape) != rank:
                yield Diagnostic(name, f"{name} has rank {len(tensor.shape)}, expected {rank}")
                return
            first = known.setdefault(name, tensor.shape)
            if any(map(differ, tensor.shape, first)):
                yield Diagnostic(
                    name,
                    f"{name} has the shape {text(tensor.shape)}, expected {text(first)} as the first",
                )
                return
    if len(known) == 2 and differ(known["lse"][0], known["go"][0]):
        yield Diagnostic("go", f"go has {known['go'][0]} rows, expected {known['lse'][0]} as lse")


def infer(inputs: Inputs, attrs: Attrs) -> Outputs:
    """output has the type and shape of a tensor of go, lse_m those of a tensor of lse. With
    update_type 0 lse_m is empty, [0]."""
    lse, go = inputs["lse"][0], inputs["go"][0]
    merged = TensorInfo("DT_FLOAT", lse.shape if attrs["update_type"] == 1 else (0,))
    return {"output": TensorInfo(go.dtype, go.shape), "lse_m": merged}


def _type_rows() -> tuple[TypeRow, ...]:
    """The float32 tensors of lse come first, then the same number of tensors of go. The counts tell
    the kernel where go begins."""
    places = 2 * MAX_RANKS
    rows = [TypeRow(("float32",) * places, ("float32", "float32"))]
    for result in ("float16", "bfloat16"):
        for ranks in range(1, MAX_RANKS + 1):
            rows.append(
                type_row(("float32",) * ranks + (result,) * ranks, places, result, "float32")
            )
    return tuple(rows)


OPERATOR = Operator(
    variants=(EXPERIMENT.OP_END_FACTORY_REG(), CURRENT.OP_END_FACTORY_REG()),
    infer=infer,
    rules=rules,
    kernel=CpuKernel(required_output="output", type_rows=_type_rows),
)
