"""ChunkGatedDeltaRule: the gated delta rule for several tokens, which are computed in chunks of 64.

The tokens of all sequences are packed, and the states are [Dv,Dk], transposed beside those of ONNX.
Its constraints are CG.1 to CG.4. The products are A2, A3 and, since the newest variant, 950.

The documents leave a promise to the caller, which no check can keep: -1 <= query, key <= 1, -1 <= g
<= 0 and 0 < beta < 1. Otherwise an exponential of the sums of g in a chunk may overflow.
"""

from __future__ import annotations

from collections.abc import Iterator

from fa_compiler.op_registry.constraints import delta_rule
from fa_compiler.op_registry.constraints.core import CheckedNode, Rules
from fa_compiler.op_registry.cpu_kernel import CpuKernel
from fa_compiler.op_registry.diagnostic import Diagnostic
from fa_compiler.op_registry.macros import REG_OP
from fa_compiler.op_registry.operator import Attrs, Inputs, Operator, Outputs

MOST_HEADS, MOST_WIDTH = 64, 128

OPDEF = (
    REG_OP(
        "ChunkGatedDeltaRule",
        "opdef_2026_05",
        source="mirror-cann/ops-transformer v9.1.0-beta.1 f3bd2740a (2026-05-09) "
        "attention/chunk_gated_delta_rule/op_host/chunk_gated_delta_rule_def.cpp",
        cann="9.1.0-beta.1",
    )
    .INPUT("query", "DT_BF16")
    .INPUT("key", "DT_BF16")
    .INPUT("value", "DT_BF16")
    .INPUT("beta", "DT_BF16")
    .INPUT("initial_state", "DT_BF16")
    .INPUT("actual_seq_lengths", "DT_INT32")
    .OPTIONAL_INPUT("g", "DT_FLOAT")
    .OUTPUT("out", "DT_BF16")
    .OUTPUT("final_state", "DT_BF16")
    .ATTR("scale_value", "Float", 1.0)
    .PRODUCT(
        "ascend910b ascend910_93", "query=key=value=beta=out initial_state=final_state\nBF16 BF16"
    )
)

WITH_FLOAT_STATE = (
    OPDEF.then(
        "opdef_2026_07",
        source="mirror-cann/ops-transformer 3a280bcc3 (2026-07-21) "
        "attention/chunk_gated_delta_rule/op_host/chunk_gated_delta_rule_def.cpp; "
        "op_host/chunk_gated_delta_rule_tiling.cpp; aclnnChunkGatedDeltaRule.md",
        note="950, and FLOAT states there",
    )
    .INPUT("initial_state", "DT_BF16, DT_FLOAT")
    .OUTPUT("final_state", "DT_BF16, DT_FLOAT")
    .PRODUCT(
        "ascend910b ascend910_93 ascend950",
        """
        query=key=value=beta=out initial_state=final_state
        BF16 BF16
        BF16 FLOAT
        """,
    )
)

_STATES = ("initial_state", "final_state")
_FIXED = {"actual_seq_lengths": "DT_INT32", "g": "DT_FLOAT"}

rules = Rules("CG", typed=(*delta_rule.TOKENS, *_STATES, *_FIXED))


@rules(1)
def types(call: CheckedNode) -> Iterator[Diagnostic]:
    """query, key, value, beta and out are BF16, g is FLOAT, and actual_seq_lengths INT32.
    initial_state and final_state are both BF16 or, on 950 only, both FLOAT."""
    yield from delta_rule.types(call, _STATES, _FIXED)
    if (
        call.product is not None
        and not call.on("950")
        and call.dtype("initial_state") == "DT_FLOAT"
    ):
        message = f"initial_state is DT_FLOAT, expected DT_BF16 on {call.product.title}"
        yield Diagnostic("initial_state", message)


@rules(2)
def shapes(call: CheckedNode) -> Iterator[Diagnostic]:
    """query and key are [T,Nk,Dk], value is [T,Nv,Dv], beta and g are [T,Nv], initial_state is
    [B,Nv,Dv,Dk], and actual_seq_lengths [B]."""
    sizes = delta_rule.sizes_of(call, "initial_state")
    yield from delta_rule.shapes(call, "initial_state", {"actual_seq_lengths": (sizes.states,)})


@rules(3)
def limits(call: CheckedNode) -> Iterator[Diagnostic]:
    """query, key, value and initial_state have no size of 0. Nk and Nv are at most 64, Dk and Dv at
    most 128, and Nv is a multiple of Nk."""
    sizes = delta_rule.sizes_of(call, "initial_state")
    yield from delta_rule.limits(call, sizes, "initial_state", MOST_HEADS, MOST_WIDTH)


@rules(4)
def lengths(call: CheckedNode) -> Iterator[Diagnostic]:
    """actual_seq_lengths holds the lengths of the sequences, which are no cumulative sums. Each is
    1 or more, because the kernel leaves the final_state of an empty sequence unwritten. Their sum
    is T."""
    yield from delta_rule.sequence_lengths(
        call, delta_rule.sizes_of(call, "initial_state").t, 1, None
    )


def infer(inputs: Inputs, attrs: Attrs) -> Outputs:
    """out is [T,Nv,Dv] in the type of query. final_state has the shape and type of
    initial_state."""
    return delta_rule.infer(inputs, "initial_state", "final_state")


OPERATOR = Operator(
    variants=(OPDEF.OP_END_FACTORY_REG(), WITH_FLOAT_STATE.OP_END_FACTORY_REG()),
    infer=infer,
    rules=rules,
    kernel=CpuKernel(),
)
