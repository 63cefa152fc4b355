"""RecurrentGatedDeltaRule: the gated delta rule token by token, for decoding, with states that it
updates in place.

The tokens of all sequences are packed. The states are blocks [Dv,Dk], transposed beside those of
ONNX: token i leaves its state in the block ssm_state_indices[i], and a sequence starts from the
block of its first token or, with num_accepted_tokens, from that of its last accepted one. The
output state is the input state, changed in place. Its constraints are RG.1 to RG.6. The products
are A2, A3 and, since CANN 9.1, 950.

The documents leave a promise to the caller, which no check can keep: -1 <= query, key <= 1, g < 0,
gk < 0 and 0 < beta < 1.
"""

from __future__ import annotations

from collections.abc import Iterator

from fa_compiler.op_registry.constraints import delta_rule
from fa_compiler.op_registry.constraints.core import CheckedNode, Rules, number
from fa_compiler.op_registry.cpu_kernel import CpuKernel
from fa_compiler.op_registry.diagnostic import Diagnostic
from fa_compiler.op_registry.geometry import shape_of
from fa_compiler.op_registry.macros import REG_OP
from fa_compiler.op_registry.operator import Attrs, Inputs, Operator, Outputs

MOST_HEADS, MOST_WIDTH, MOST_TOKENS = 256, 512, 8

_DEFINITION = "attention/recurrent_gated_delta_rule/op_host/recurrent_gated_delta_rule_def.cpp"
_TILING = "op_host/recurrent_gated_delta_rule_tiling.cpp"
_TYPES = "query=key=value=beta=out\nBF16"

OPDEF = (
    REG_OP(
        "RecurrentGatedDeltaRule",
        "opdef_2025_12",
        source=f"mirror-cann/ops-transformer v8.5.0-beta.1 05c401f9d (2025-12-31) {_DEFINITION}; {_TILING}",
        cann="8.5.0-beta.1",
        note="the tiling refuses gk",
    )
    .INPUT("query", "DT_BF16")
    .INPUT("key", "DT_BF16")
    .INPUT("value", "DT_BF16")
    .INPUT("beta", "DT_BF16")
    .INPUT("state", "DT_BF16")
    .INPUT("actual_seq_lengths", "DT_INT32")
    .INPUT("ssm_state_indices", "DT_INT32")
    .OPTIONAL_INPUT("g", "DT_FLOAT")
    .OPTIONAL_INPUT("gk", "DT_FLOAT")
    .OPTIONAL_INPUT("num_accepted_tokens", "DT_INT32")
    .OUTPUT("out", "DT_BF16")
    .OUTPUT("state", "DT_BF16")
    .ATTR("scale_value", "Float", 1.0)
    .PRODUCT("ascend910b ascend910_93", _TYPES)
)

WITH_KEY_DECAY = OPDEF.then(
    "opdef_2026_03",
    source=f"mirror-cann/ops-transformer v9.0.0-beta.2 8270850b6 (2026-03-28) {_DEFINITION}; {_TILING}",
    cann="9.0.0-beta.2",
    note="the tiling takes gk",
).PRODUCT("ascend910b ascend910_93", _TYPES)

ON_950 = WITH_KEY_DECAY.then(
    "opdef_2026_05",
    source=f"mirror-cann/ops-transformer v9.1.0-beta.1 f3bd2740a (2026-05-09) {_DEFINITION}; {_TILING}",
    cann="9.1.0-beta.1",
).PRODUCT("ascend910b ascend910_93 ascend950", _TYPES)

WITH_FLOAT_STATE = (
    ON_950.then(
        "opdef_2026_07",
        source=f"mirror-cann/ops-transformer 3a280bcc3 (2026-07-21) {_DEFINITION}; {_TILING}; "
        "aclnnRecurrentGatedDeltaRule.md; tests/pytest/recurrent_gated_delta_rule_golden.py",
        note="FLOAT states",
    )
    .INPUT("state", "DT_BF16, DT_FLOAT")
    .OUTPUT("state", "DT_BF16, DT_FLOAT")
    .PRODUCT(
        "ascend910b ascend910_93 ascend950", "query=key=value=beta=out state\nBF16 BF16\nBF16 FLOAT"
    )
)

_FIXED = {
    "actual_seq_lengths": "DT_INT32",
    "ssm_state_indices": "DT_INT32",
    "g": "DT_FLOAT",
    "gk": "DT_FLOAT",
    "num_accepted_tokens": "DT_INT32",
}

rules = Rules("RG", typed=(*delta_rule.TOKENS, "state", *_FIXED))


@rules(1)
def types(call: CheckedNode) -> Iterator[Diagnostic]:
    """query, key, value, beta and out are BF16, and g and gk FLOAT. actual_seq_lengths,
    ssm_state_indices and num_accepted_tokens are INT32. state is BF16 or, in the newest variant,
    FLOAT."""
    yield from delta_rule.types(call, ("state",), _FIXED)


@rules(2)
def shapes(call: CheckedNode) -> Iterator[Diagnostic]:
    """query and key are [T,Nk,Dk], value is [T,Nv,Dv], beta and g are [T,Nv], gk is [T,Nv,Dk],
    state is [blocks,Nv,Dv,Dk], ssm_state_indices [T], and actual_seq_lengths and
    num_accepted_tokens are [B]."""
    sizes, sequences = delta_rule.sizes_of(call, "state"), shape_of(call["actual_seq_lengths"], 1)
    more = {
        "gk": (sizes.t, sizes.nv, sizes.dk),
        "ssm_state_indices": (sizes.t,),
        "actual_seq_lengths": sequences,
        "num_accepted_tokens": sequences,
    }
    yield from delta_rule.shapes(call, "state", more)


@rules(3)
def limits(call: CheckedNode) -> Iterator[Diagnostic]:
    """query, key, value, state and actual_seq_lengths have no size of 0. Nk and Nv are at most 256,
    Dk and Dv at most 512, and Nv is a multiple of Nk. state has at least as many blocks as there
    are tokens in query."""
    sizes = delta_rule.sizes_of(call, "state")
    yield from delta_rule.limits(call, sizes, "state", MOST_HEADS, MOST_WIDTH)
    if shape_of(call["actual_seq_lengths"], 1)[0] == 0:
        yield Diagnostic(
            "actual_seq_lengths", "actual_seq_lengths is empty, expected 1 or more sequences"
        )
    if isinstance(sizes.t, int) and isinstance(sizes.states, int) and sizes.states < sizes.t:
        yield Diagnostic(
            "state",
            f"state has {sizes.states} blocks, expected at least {sizes.t}, the tokens of query",
        )


@rules(4)
def key_decay(call: CheckedNode) -> Iterator[Diagnostic]:
    """gk, a decay for each key dimension, is taken since CANN 9.0."""
    if call["gk"] is not None and call.spec.variant == OPDEF.spec.variant:
        yield Diagnostic("gk", f"gk is given, expected none in the prototype {call.spec.variant}")


@rules(5)
def lengths(call: CheckedNode) -> Iterator[Diagnostic]:
    """actual_seq_lengths holds the lengths of the sequences, which are no cumulative sums. Each is
    1 to 8, and their sum is T. num_accepted_tokens is 1 to the length of the sequence."""
    yield from delta_rule.sequence_lengths(
        call, delta_rule.sizes_of(call, "state").t, 1, MOST_TOKENS
    )
    counts, accepted = call.content("actual_seq_lengths"), call.content("num_accepted_tokens")
    for count, taken in zip(counts or (), accepted or (), strict=False):
        if not 1 <= taken <= count:
            message = f"num_accepted_tokens has {number(taken)}, expected 1 to {count}, the length of the sequence"
            yield Diagnostic("num_accepted_tokens", message, "document")
            return


@rules(6)
def blocks(call: CheckedNode) -> Iterator[Diagnostic]:
    """ssm_state_indices names blocks of state: 0 or more, and less than their number."""
    count = delta_rule.sizes_of(call, "state").states
    for index in call.content("ssm_state_indices") or ():
        if index < 0 or (isinstance(count, int) and index >= count):
            message = f"ssm_state_indices has {number(index)}, expected a block of state, 0 to {count} exclusive"
            yield Diagnostic("ssm_state_indices", message, "document")
            return


def infer(inputs: Inputs, attrs: Attrs) -> Outputs:
    """out is [T,Nv,Dv] in the type of query. state has its shape and type as input, and is changed
    in place."""
    return delta_rule.infer(inputs, "state", "state")


OPERATOR = Operator(
    variants=tuple(
        each.OP_END_FACTORY_REG() for each in (OPDEF, WITH_KEY_DECAY, ON_950, WITH_FLOAT_STATE)
    ),
    infer=infer,
    rules=rules,
    kernel=CpuKernel(),
)
