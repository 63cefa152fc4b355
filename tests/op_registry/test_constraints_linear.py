"""The constraints of CANN's linear attention: each row breaks exactly one of an otherwise good node. Good nodes, their
outputs, and what the products and the versions of CANN take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fa_compiler.op_registry import NodeError, NodeView, TensorInfo, UnknownVariant, get, infer, operator, verify

from .linear_nodes import (
    BF16,
    DIM,
    DK,
    DV,
    FLOAT,
    INT32,
    LENGTH,
    LINES,
    NK,
    NV,
    PACKED,
    B,
    S,
    T,
    cached,
    chunk,
    convolution,
    fused,
    recurrent,
    whole,
)
from .nodes import constant, tensor

I, N = 161002, 161001  # noqa: E741  (the codes' names in the constraints list)
DELTA = ("ChunkGatedDeltaRule", "RecurrentGatedDeltaRule")
CONVOLUTIONS = ("CausalConv1d", "FusedCausalConv1d")
STEP = {"x": tensor((B, 1, DIM))}
ACCEPTED = {"num_accepted_tokens": constant((1, 2), INT32)}


def ints(*numbers: int) -> TensorInfo:
    return constant(numbers, INT32)


def sized(make: object, nk: int = NK, nv: int = NV, dk: int = DK, dv: int = DV) -> NodeView:
    """A delta rule with other heads and head sizes, in every tensor."""
    state, count = ("initial_state", B) if make is chunk else ("state", T + 1)
    changes = {
        "query": tensor((T, nk, dk), BF16),
        "key": tensor((T, nk, dk), BF16),
        "value": tensor((T, nv, dv), BF16),
        "beta": tensor((T, nv), BF16),
        "g": tensor((T, nv), FLOAT),
        state: tensor((count, nv, dv, dk), BF16),
    }
    return chunk(changes) if make is chunk else recurrent(changes)


def channels(make: object, dim: int) -> NodeView:
    changes = {
        "x": tensor((B, S, dim)),
        "weight": tensor((4 if make is convolution else 3, dim)),
        "conv_states": tensor((LINES, LENGTH, dim)),
    }
    return convolution(changes) if make is convolution else fused(changes)


def sequences(make: object, count: int) -> NodeView:
    changes = {"x": tensor((count, S, DIM)), "conv_states": tensor((count, LENGTH, DIM))}
    return convolution(changes) if make is convolution else fused(changes)


BROKEN: list[tuple[str, NodeView, str, int]] = [
    ("CG.1", chunk({"key": tensor((T, NK, DK))}), "key", I),
    ("CG.1", chunk({"g": tensor((T, NV), BF16)}), "g", I),
    ("CG.1", chunk({"actual_seq_lengths": constant((4, 8))}), "actual_seq_lengths", I),
    ("CG.1", chunk({"initial_state": tensor((B, NV, DV, DK))}), "initial_state", I),
    ("CG.1", chunk({"initial_state": tensor((B, NV, DV, DK), FLOAT)}), "initial_state", I),
    ("CG.2", chunk({"query": tensor((T, NK * DK), BF16), "key": None}), "query", I),
    ("CG.2", chunk({"key": tensor((T, NV, DK), BF16)}), "key", I),
    ("CG.2", chunk({"beta": tensor((T, NK), BF16)}), "beta", I),
    ("CG.2", chunk({"g": tensor((T, NV, DK), FLOAT)}), "g", I),
    ("CG.2", chunk({"initial_state": tensor((B, NV, DK, DV), BF16)}), "initial_state", I),
    ("CG.2", chunk({"actual_seq_lengths": ints(1, 3, 8)}), "actual_seq_lengths", I),
    ("CG.3", sized(chunk, nv=68), "value", I),
    ("CG.3", sized(chunk, nk=3), "value", I),
    ("CG.3", sized(chunk, dk=129), "query", I),
    ("CG.3", sized(chunk, dv=129), "value", I),
    ("CG.4", chunk({"actual_seq_lengths": ints(4, T)}), "actual_seq_lengths", I),
    ("CG.4", chunk({"actual_seq_lengths": ints(0, T)}), "actual_seq_lengths", I),
    ("RG.1", recurrent({"beta": tensor((T, NV), FLOAT)}), "beta", I),
    ("RG.1", recurrent({"state": tensor((T + 1, NV, DV, DK))}), "state", I),
    ("RG.2", recurrent({"ssm_state_indices": whole(T + 1)}), "ssm_state_indices", I),
    ("RG.2", recurrent({"gk": tensor((T, NV), FLOAT)}), "gk", I),
    ("RG.2", recurrent({"num_accepted_tokens": whole(T)}), "num_accepted_tokens", I),
    ("RG.3", sized(recurrent, nv=260), "value", I),
    ("RG.3", sized(recurrent, dk=513), "query", I),
    ("RG.3", recurrent({"state": tensor((T - 1, NV, DV, DK), BF16), "ssm_state_indices": whole(T)}), "state", I),
    ("RG.5", recurrent({"actual_seq_lengths": ints(3, 9)}), "actual_seq_lengths", I),
    ("RG.5", recurrent({"num_accepted_tokens": ints(1, 9)}), "num_accepted_tokens", I),
    ("RG.6", recurrent({"ssm_state_indices": ints(*range(T - 1), T + 1)}), "ssm_state_indices", I),
    ("RG.6", recurrent({"ssm_state_indices": ints(*range(T - 1), -1)}), "ssm_state_indices", I),
    ("CC.1", convolution({"weight": tensor((4, DIM), BF16)}), "weight", I),
    ("CC.1", convolution({"cache_indices": constant((0, 1))}), "cache_indices", I),
    ("CC.2", convolution(attrs={"activation_mode": "swish"}), "activation_mode", I),
    ("CC.3", convolution({"x": tensor((T, DIM))}), "query_start_loc", N),
    ("CC.3", convolution({"x": tensor((B, S, 1, DIM))}), "x", I),
    ("CC.3", convolution({"bias": tensor((4,))}), "bias", I),
    ("CC.3", convolution({"cache_indices": whole(B + 1)}), "cache_indices", I),
    ("CC.3", sequences(convolution, 1025), "x", I),
    ("CC.4", convolution(k=5), "weight", I),
    ("CC.4", channels(convolution, 72), "x", I),
    ("CC.4", channels(convolution, 48), "x", I),
    ("CC.4", convolution({"conv_states": tensor((1, LENGTH, DIM))}), "conv_states", I),
    ("CC.4", convolution({"conv_states": tensor((LINES, 2, DIM))}), "conv_states", I),
    ("CC.4", convolution({"x": tensor((B, 16385, DIM))}), "x", I),
    ("CC.5", convolution(STEP | {"initial_state_mode": whole(B)}), "initial_state_mode", I),
    ("CC.5", convolution(ACCEPTED, k=3), "num_accepted_tokens", I),
    ("CC.6", convolution(PACKED | {"query_start_loc": ints(0, 4, T - 1)}), "query_start_loc", I),
    ("CC.6", convolution(PACKED | {"query_start_loc": ints(4, 2, T)}), "query_start_loc", I),
    ("CC.6", convolution({"cache_indices": ints(1, LINES)}), "cache_indices", I),
    ("CC.6", convolution({"cache_indices": ints(1, 1)}), "cache_indices", I),
    ("CC.6", convolution({"initial_state_mode": ints(0, 2)}), "initial_state_mode", I),
    ("CC.7", convolution(ACCEPTED | {"conv_states": tensor((LINES, S + 1, DIM))}), "conv_states", I),
    ("CC.7", convolution({"num_accepted_tokens": ints(1, LENGTH - 2)}), "num_accepted_tokens", I),
    ("FC.1", fused({"conv_states": tensor((LINES, LENGTH, DIM), BF16)}), "conv_states", I),
    ("FC.2", fused(attrs={"activation_mode": 1}), "activation_mode", I),
    ("FC.3", fused(attrs={"residual_connection": 2}), "residual_connection", I),
    ("FC.4", fused(attrs={"conv_mode": 2}), "conv_mode", I),
    ("FC.5", fused({"bias": tensor((DIM,))}), "bias", I),
    ("FC.5", fused({"initial_state_mode": whole(B)}), "initial_state_mode", I),
    ("FC.6", fused({"cache_indices": whole(B, 3)}), "cache_indices", I),
    ("FC.6", cached({"cache_indices": whole(B)}), "cache_indices", I),
    ("FC.6", cached({"cache_indices": whole(B, 1025)}), "cache_indices", I),
    ("FC.6", sequences(fused, 257), "x", I),
    ("FC.7", fused({"weight": tensor((4, DIM))}), "weight", I),
    ("FC.7", fused({"x": tensor((B, 9, DIM))}), "x", I),
    ("FC.7", fused({"conv_states": tensor((LINES, S, DIM))}), "conv_states", I),
    ("FC.7", fused(PACKED), "max_query_len", I),
    ("FC.7", fused(PACKED, {"max_query_len": 7}), "max_query_len", I),
    ("FC.8", fused(attrs={"conv_mode": 1}), "num_computed_tokens", N),
    ("FC.8", cached({"initial_state_idx": None}), "initial_state_idx", N),
    ("FC.8", cached(attrs={"block_size": 1}), "block_size", I),
    ("FC.9", fused({"num_accepted_tokens": ints(1, S + 1)}), "num_accepted_tokens", I),
    ("FC.9", fused({"num_computed_tokens": ints(0, -1)}), "num_computed_tokens", I),
    ("FC.9", fused({"cache_indices": ints(0, LINES)}), "cache_indices", I),
    ("FC.9", cached({"block_idx_last_scheduled_token": ints(2, 3)}), "block_idx_last_scheduled_token", I),
    ("FC.9", cached({"initial_state_idx": ints(0, 3)}), "block_idx_last_scheduled_token", I),
    ("FC.9", cached({"cache_indices": constant([[0, 1, 2], [-1, 4, 5]], INT32)}), "initial_state_idx", I),
]


@pytest.mark.parametrize(("constraint", "node", "at", "code"), BROKEN, ids=[row[0] for row in BROKEN])
def test_one_fault_is_found_once(constraint: str, node: NodeView, at: str, code: int) -> None:
    found = verify(node, "A2" if node.op_type in DELTA else "950")
    ours = [(fault.constraint, fault.tensor, fault.code) for fault in found if fault.constraint != "G0"]
    assert dict.fromkeys(ours) == {(constraint, at, code): None}


def test_every_number_is_broken_by_a_row() -> None:
    numbers = {
        f"{operator(name).rules.prefix}.{number}"
        for name in (*DELTA, *CONVOLUTIONS)
        for number in operator(name).rules.table
    }
    assert numbers - {row[0] for row in BROKEN} == {"RG.4"}  # which is about the oldest prototype only, see below


GOOD_CONVOLUTIONS = [
    convolution(),
    convolution({"bias": tensor((DIM,)), "cache_indices": ints(3, 5), "initial_state_mode": ints(0, 1)}),
    convolution(PACKED),
    convolution(STEP, k=2),
    convolution(ACCEPTED),
    convolution(PACKED | ACCEPTED | {"conv_states": tensor((LINES, 10, DIM))}),
    convolution({"cache_indices": ints(0, 0)}, {"null_block_id": 0}),
    fused(),
    fused(PACKED, {"max_query_len": 8, "residual_connection": 0}),
    fused(ACCEPTED | {"num_computed_tokens": ints(0, 7), "cache_indices": ints(-1, 2)}, {"conv_mode": 1}),
    cached(),
]
GOOD_RULES = [
    chunk(),
    chunk({"g": None}, {"scale_value": 0.25}),
    recurrent(),
    recurrent({"gk": tensor((T, NV, DK), FLOAT), "num_accepted_tokens": ints(1, 8)}),
]


@pytest.mark.parametrize("node", [*GOOD_RULES, *GOOD_CONVOLUTIONS], ids=lambda node: node.op_type)
def test_good_nodes_and_what_they_give(node: NodeView) -> None:
    is_rule = node.op_type in DELTA
    for target in ("ort", "950", *(("A2", "A3") if is_rule else ())):
        assert verify(node, target) == []
    found = infer(node.op_type, node.inputs, node.attrs)
    assert verify(replace(node, outputs=found), "950") == []
    state = next(name for name in ("initial_state", "state", "conv_states") if name in node.inputs)
    last = "final_state" if state == "initial_state" else state
    assert found[last] == node.inputs[state]
    assert found["out" if is_rule else "y"] == node.inputs["value" if is_rule else "x"]


def test_the_state_in_place_keeps_its_type() -> None:
    """Input and output have one name, and are told apart."""
    for node in (recurrent(), convolution()):
        name = next(name for name in ("state", "conv_states") if name in node.inputs)
        given = node.inputs[name]
        assert isinstance(given, TensorInfo)
        other = replace(node, outputs={name: TensorInfo(FLOAT, given.shape)})
        assert [(fault.constraint, fault.tensor) for fault in verify(other, "950")] == [("G0", name)]


def test_products_and_versions() -> None:
    for name in (*DELTA, *CONVOLUTIONS):
        node = {"ChunkGatedDeltaRule": chunk, "RecurrentGatedDeltaRule": recurrent, "CausalConv1d": convolution}.get(
            name, fused
        )()
        assert "not available on" in verify(node, "310P")[0].message
        assert bool(verify(node, "A2")) == (name in CONVOLUTIONS)
    wide = recurrent({"state": tensor((T + 1, NV, DV, DK), FLOAT)})
    assert verify(wide, "A2") == []
    assert [fault.constraint for fault in verify(wide, "A2", "9.1.0")] == ["RG.1"]
    assert verify(chunk({"initial_state": tensor((B, NV, DV, DK), FLOAT)}), "950") == []
    by_key = recurrent({"gk": tensor((T, NV, DK), FLOAT)})
    assert [(fault.constraint, fault.tensor) for fault in verify(by_key, "A2", "8.5.0")] == [("RG.4", "gk")]
    assert verify(by_key, "A2", "9.0.0") == []
    assert [get(DELTA[1], cann).variant for cann in ("8.5.0", "9.0.0", "9.1.0", None)] == [
        "opdef_2025_12",
        "opdef_2026_03",
        "opdef_2026_05",
        "opdef_2026_07",
    ]
    for name, cann in ((DELTA[0], "9.0.0"), (CONVOLUTIONS[0], "9.1.0"), (CONVOLUTIONS[1], "9.0.0")):
        with pytest.raises(UnknownVariant):
            get(name, cann)


def test_ranks_that_give_no_outputs() -> None:
    for changes in ({"value": tensor((T, NV * DV), BF16)}, {"initial_state": None}):
        node = chunk(changes)
        with pytest.raises(NodeError):
            infer(node.op_type, node.inputs, node.attrs)
