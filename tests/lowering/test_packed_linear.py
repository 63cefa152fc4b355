"""The kernels of CANN's linear attention and causal convolutions against the float64 reference, on every variant.

Tokens are packed, states are transposed, and blocks and lines are changed in place. The bound is in test_linear.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fa_compiler import ops
from fa_compiler.lowering.ort import eager
from tests import linear_problems
from tests.linear_problems import BF16, Call, chunks, lines, steps

from .refusals import refused
from .test_linear import check
from .variants import thinned

HALFS = (np.float16, BF16)
STATES = (BF16, np.float32)
HEADS = ((1, 1), (2, 2), (2, 4), (1, 3))
RULES = ("ChunkGatedDeltaRule", "RecurrentGatedDeltaRule")
IN_PLACE = {
    "ChunkGatedDeltaRule": ("initial_state", "final_state"),
    "RecurrentGatedDeltaRule": ("state", "state"),
    "CausalConv1d": ("conv_states", "conv_states"),
    "FusedCausalConv1d": ("conv_states", "conv_states"),
}
"""The states that a call is given, and those that it returns."""
DRAWN = {
    "ChunkGatedDeltaRule": linear_problems.drawn_chunks,
    "RecurrentGatedDeltaRule": linear_problems.drawn_steps,
    "CausalConv1d": linear_problems.drawn_lines,
    "FusedCausalConv1d": linear_problems.drawn_added,
}


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@thinned(lengths=((1,), (9,), (10,), (64, 1, 65), (3, 130)), state=STATES, heads=HEADS, g=(False, True))
def test_chunks(isa: str, lengths: tuple[int, ...], state: Any, heads: tuple[int, int], g: bool) -> None:
    check("ChunkGatedDeltaRule", *chunks(rng(1), lengths, state, heads=heads, g=g), isa)


@thinned(size=(1, 5, 16, 128), width=(1, 8, 40, 128), op=RULES)
def test_sizes_of_heads(isa: str, size: int, width: int, op: str) -> None:
    make = chunks if op == RULES[0] else steps
    check(op, *make(rng(2), (3, 1, 8), size=size, width=width), isa)


@thinned(
    lengths=((1,), (1, 1, 1, 1), (8,), (1, 8, 2)),
    state=STATES,
    g=(False, True),
    gk=(False, True),
    accepted=(False, True),
)
def test_steps(isa: str, lengths: tuple[int, ...], state: Any, g: bool, gk: bool, accepted: bool) -> None:
    """A block of bfloat16 holds the rounded state of a token. The next token goes on with the unrounded state."""
    check("RecurrentGatedDeltaRule", *steps(rng(3), lengths, state, g=g, gk=gk, accepted=accepted))


@pytest.mark.parametrize("accepted", [False, True])
def test_blocks_that_are_named_more_than_once(accepted: bool) -> None:
    """The sequences are computed one after the other."""
    check("RecurrentGatedDeltaRule", *steps(rng(4), (3, 1, 8, 2), np.float32, accepted=accepted, shared=True))


@thinned(
    op=RULES,
    name=("query", "key", "value", "beta", "g", "gk", "state"),
    number=(np.nan, np.inf, -np.inf),
    state=STATES,
)
def test_undefined_numbers_of_a_rule(isa: str, op: str, name: str, number: float, state: Any) -> None:
    made = chunks(rng(6), (12, 3), state) if op == RULES[0] else steps(rng(6), (4, 3), state, gk=True)
    inputs, attrs = made
    name = IN_PLACE[op][0] if name == "state" else name
    if name not in inputs:
        return
    inputs[name].reshape(-1)[inputs[name].size // 3] = number
    check(op, inputs, attrs, isa)


@thinned(op=RULES, decay=((-80.0, -0.0), (-1e4, 0.0), (0.0, 0.0)), state=STATES)
def test_sums_of_decays_beyond_the_exponents_of_float32(
    isa: str, op: str, decay: tuple[float, float], state: Any
) -> None:
    made = chunks(rng(7), (100,), state, decay=decay) if op == RULES[0] else steps(rng(7), (8,), state, decay=decay)
    check(op, *made, isa)


@thinned(
    lengths=((2,), (0, 40, 0, 1), (3, 3, 7), (40,)),
    width=(2, 3, 4),
    dtype=HALFS,
    mode=(None, 0, 1),
    activation=("silu", "none"),
)
def test_prompts(isa: str, lengths: tuple[int, ...], width: int, dtype: Any, mode: int | None, activation: str) -> None:
    """Sequences of no tokens among them, and those of one line each that is read or not."""
    inputs = lines(rng(8), lengths, dtype, width=width, channels=272)
    if mode is not None:
        inputs["initial_state_mode"] = np.array([(n + mode) % 2 for n in range(len(lengths))], np.int32)
    inputs["bias"] = rng(9).standard_normal(272).astype(dtype)
    check("CausalConv1d", inputs, {"activation_mode": activation, "null_block_id": -1})


@thinned(dtype=HALFS, width=(2, 3, 4), length=(3, 6), batch=(1, 3))
def test_a_step(isa: str, dtype: Any, width: int, length: int, batch: int) -> None:
    inputs = lines(rng(10), (1,) * batch, dtype, width=width, length=length, packed=False)
    check("CausalConv1d", inputs, {"null_block_id": -1})


@thinned(dtype=HALFS, packed=(False, True), op=("CausalConv1d", "FusedCausalConv1d"))
def test_steps_behind_accepted_tokens(isa: str, dtype: Any, packed: bool, op: str) -> None:
    lengths = (3, 1, 4, 4) if packed else (4, 4, 4, 4)
    inputs = lines(rng(11), lengths, dtype, width=4 if op == "CausalConv1d" else 3, packed=packed)
    inputs["num_accepted_tokens"] = np.array([1, 1, 3, 2], np.int32)
    check(op, inputs, {} if op == "CausalConv1d" else {"max_query_len": 4})


@thinned(op=("CausalConv1d", "FusedCausalConv1d"), skipped=(-1, 0, 3))
def test_sequences_that_are_skipped(isa: str, op: str, skipped: int) -> None:
    inputs = lines(rng(12), (2, 2, 5, 2), width=3)
    inputs["cache_indices"] = np.array([skipped, 2, 1, skipped], np.int32)
    attrs = {"null_block_id": skipped} if op == "CausalConv1d" else {"pad_slot_id": skipped, "max_query_len": 5}
    check(op, inputs, attrs)
    found = ops.run(op, inputs, attrs)
    assert not found["y"][:2].any()
    assert found["y"][2:].any()


@thinned(
    op=("CausalConv1d", "FusedCausalConv1d"),
    name=("x", "weight", "conv_states", "bias"),
    number=(np.nan, np.inf, -np.inf),
    dtype=HALFS,
)
def test_undefined_numbers_of_a_convolution(isa: str, op: str, name: str, number: float, dtype: Any) -> None:
    inputs = lines(rng(13), (2, 20), dtype, width=3, length=2)
    attrs: dict[str, Any] = {"null_block_id": -1}
    if op == "CausalConv1d":
        inputs |= {"bias": inputs["weight"][0].copy(), "initial_state_mode": np.ones(2, np.int32)}
    else:
        attrs = {"max_query_len": 20}
    if name in inputs:
        inputs[name].reshape(-1)[inputs[name].size // 3] = number
        check(op, inputs, attrs)


@pytest.mark.parametrize("dtype", HALFS)
def test_the_input_is_added_before_the_result_is_rounded(dtype: Any) -> None:
    """The sum is much smaller than the convolution, so that a rounding of the convolution would show."""
    inputs = lines(rng(14), (30,), dtype, width=3)
    inputs["weight"] = np.array([[1e-3], [1e-3], [-0.875]]).repeat(80, axis=1).astype(dtype)
    check("FusedCausalConv1d", inputs, {"max_query_len": 30})


@pytest.mark.parametrize("residual", [0, 1])
def test_the_first_tokens_of_a_text_give_nothing(residual: int) -> None:
    inputs = lines(rng(15), (1, 3, 3, 4), width=3)
    inputs["num_computed_tokens"] = np.array([0, 0, 1, 2], np.int32)
    attrs = {"max_query_len": 4, "conv_mode": 1, "residual_connection": residual}
    check("FusedCausalConv1d", inputs, attrs)
    found = ops.run("FusedCausalConv1d", inputs, attrs)["y"]
    wanted = inputs["x"] if residual else np.zeros_like(inputs["x"])
    np.testing.assert_array_equal(found[[0, 1, 2, 4]], wanted[[0, 1, 2, 4]])


@thinned(op=DRAWN, seed=range(6))
def test_drawn_calls(isa: str, op: str, seed: int) -> None:
    check(op, *DRAWN[op](seed), isa)


def in_place(op: str, inputs: dict[str, Any], attrs: dict[str, Any]) -> dict[str, Any]:
    """The results of a call whose states are given back in the memory of the input."""
    given, result = IN_PLACE[op]
    spec, arrays, attributes = eager.allowed(op, inputs, attrs)
    arrays[given] = arrays[given].copy()
    request, placed = eager.requested(spec, arrays, attributes, None, None)
    session, tensors = eager.session_of({"": request}), eager.fed(request, placed)
    binding = session.io_binding()
    for name, tensor in tensors.items():
        binding.bind_ortvalue_input(name, tensor)
    for name, wanted in zip(request.wanted, request.results, strict=True):
        if name == result:
            binding.bind_ortvalue_output(wanted, tensors[given])
        else:
            binding.bind_output(wanted)
    session.run_with_iobinding(binding)
    values = zip(request.wanted, binding.get_outputs(), strict=True)
    return {name: eager.from_ort(value).astype(np.float32) for name, value in values}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("op", DRAWN)
def test_states_that_are_changed_in_place(op: str, seed: int) -> None:
    inputs, attrs = DRAWN[op](seed + 100)
    wanted = ops.run(op, inputs, attrs)
    for name, found in in_place(op, inputs, attrs).items():
        np.testing.assert_array_equal(found, wanted[name].astype(np.float32), name)


@pytest.mark.parametrize("op", DRAWN)
def test_results_that_nobody_reads(op: str) -> None:
    inputs, attrs = DRAWN[op](3)
    wanted = ops.run(op, inputs, attrs)
    for name, each in wanted.items():
        found = ops.run(op, inputs, attrs, outputs=[name])[name]
        np.testing.assert_array_equal(found.astype(np.float32), each.astype(np.float32), name)


def integers(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def halfs(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float16)


def shortened(call: Call, name: str) -> Call:
    """The call with one number less on the last axis of an input."""
    inputs, attrs = call
    return inputs | {name: inputs[name][..., :-1]}, attrs


def changed(call: Call, inputs: dict[str, Any] | None = None, attrs: dict[str, Any] | None = None) -> Call:
    return call[0] | (inputs or {}), call[1] | (attrs or {})


CHUNKS = chunks(rng(0), (3, 2))
STEPS = steps(rng(0), (3, 2), gk=True, accepted=True)
PROMPT: Call = lines(rng(0), (3, 2)), {}
FIXED: Call = lines(rng(0), (3, 3), packed=False), {}
STEP: Call = lines(rng(0), (1, 1), packed=False), {}
ADDED: Call = lines(rng(0), (3, 2), width=3), {"max_query_len": 3}
ADDED_FIXED: Call = lines(rng(0), (3, 3), width=3, packed=False), {}
BLOCKS: Call = (
    ADDED_FIXED[0]
    | {
        "conv_states": halfs(8, 4, 80),
        "cache_indices": np.array([[0, 1, 2], [3, 4, 5]], np.int32),
        "num_computed_tokens": integers(2, 2),
        "block_idx_first_scheduled_token": integers(1, 1),
        "block_idx_last_scheduled_token": integers(2, 2),
        "initial_state_idx": integers(0, 0),
    },
    {"block_size": 2},
)
UNREAD = np.array([[-1, 1, 2], [3, 4, 5]], np.int32)
REFUSED: dict[str, tuple[str, Call]] = {
    **{f"CG.2 {name}": (RULES[0], shortened(CHUNKS, name)) for name in ("key", "value", "beta", "g", "initial_state")},
    "CG.2 rank": (RULES[0], changed(CHUNKS, {"query": CHUNKS[0]["query"][0]})),
    "CG.2 lengths": (RULES[0], changed(CHUNKS, {"actual_seq_lengths": integers(5)})),
    "CG.3 heads": (RULES[0], chunks(rng(0), (2,), heads=(65, 65), size=2, width=2)),
    "CG.3 width": (RULES[0], chunks(rng(0), (2,), size=129)),
    "CG.3 groups": (RULES[0], changed(CHUNKS, {name: CHUNKS[0][name][:, [0, 1, 1]] for name in ("query", "key")})),
    "CG.4 empty": (RULES[0], changed(CHUNKS, {"actual_seq_lengths": integers(5, 0)})),
    "CG.4 sum": (RULES[0], changed(CHUNKS, {"actual_seq_lengths": integers(3, 3)})),
    **{
        f"RG.2 {name}": (RULES[1], shortened(STEPS, name))
        for name in ("key", "g", "gk", "ssm_state_indices", "num_accepted_tokens")
    },
    "RG.2 lengths": (RULES[1], changed(STEPS, {"actual_seq_lengths": np.array([[3, 2]], np.int32)})),
    "RG.3 heads": (RULES[1], steps(rng(0), (1,), heads=(257, 257), size=1, width=1)),
    "RG.3 blocks": (
        RULES[1],
        changed(STEPS, {"state": STEPS[0]["state"][:4], "ssm_state_indices": integers(0, 1, 2, 3, 0)}),
    ),
    "RG.5 long": (RULES[1], steps(rng(0), (9,))),
    "RG.5 accepted": (RULES[1], changed(STEPS, {"num_accepted_tokens": integers(1, 3)})),
    "RG.5 none accepted": (RULES[1], changed(STEPS, {"num_accepted_tokens": integers(0, 1)})),
    "RG.6 behind": (RULES[1], changed(STEPS, {"ssm_state_indices": integers(0, 1, 2, 3, 7)})),
    "RG.6 negative": (RULES[1], changed(STEPS, {"ssm_state_indices": integers(0, 1, 2, 3, -1)})),
    "CC.2": ("CausalConv1d", changed(PROMPT, attrs={"activation_mode": "gelu"})),
    "CC.3 rank": ("CausalConv1d", changed(FIXED, {"x": halfs(80)})),
    "CC.3 limits": ("CausalConv1d", changed(PROMPT, {"query_start_loc": None})),
    "CC.3 limits of another rank": ("CausalConv1d", changed(PROMPT, {"query_start_loc": integers(0, 5)[None]})),
    "CC.3 limits of others": ("CausalConv1d", changed(FIXED, {"query_start_loc": integers(0, 5)})),
    **{f"CC.3 {name}": ("CausalConv1d", shortened(FIXED, name)) for name in ("weight", "conv_states", "cache_indices")},
    "CC.3 rank of weight": ("CausalConv1d", changed(FIXED, {"weight": halfs(80)})),
    "CC.3 rank of states": ("CausalConv1d", changed(FIXED, {"conv_states": halfs(5, 80)})),
    "CC.3 bias": ("CausalConv1d", changed(FIXED, {"bias": halfs(79)})),
    "CC.4 width": ("CausalConv1d", (lines(rng(0), (3,), width=5), {})),
    "CC.4 channels": ("CausalConv1d", (lines(rng(0), (3,), channels=72), {})),
    "CC.4 few channels": ("CausalConv1d", (lines(rng(0), (3,), channels=48), {})),
    "CC.4 lines": ("CausalConv1d", changed(PROMPT, {"conv_states": halfs(1, 6, 80), "cache_indices": integers(0, 0)})),
    "CC.4 length": ("CausalConv1d", (lines(rng(0), (3,), length=2), {})),
    "CC.5 one token": ("CausalConv1d", changed(STEP, {"initial_state_mode": integers(1, 1)})),
    "CC.5 accepted": (
        "CausalConv1d",
        changed(FIXED, {"initial_state_mode": integers(1, 1), "num_accepted_tokens": integers(1, 1)}),
    ),
    "CC.5 width": ("CausalConv1d", changed(ADDED_FIXED, {"num_accepted_tokens": integers(1, 1)})),
    "CC.6 limits": ("CausalConv1d", changed(PROMPT, {"query_start_loc": integers(0, 6, 5)})),
    "CC.6 begin": ("CausalConv1d", changed(PROMPT, {"query_start_loc": integers(1, 3, 5)})),
    "CC.6 end": ("CausalConv1d", changed(PROMPT, {"query_start_loc": integers(0, 3, 4)})),
    "CC.6 steps": (
        "CausalConv1d",
        changed(PROMPT, {"query_start_loc": integers(0, 0, 5), "num_accepted_tokens": integers(1, 1)}),
    ),
    "CC.6 line": ("CausalConv1d", changed(PROMPT, {"cache_indices": integers(1, 5)})),
    "CC.6 negative line": ("CausalConv1d", changed(PROMPT, {"cache_indices": integers(1, -1)})),
    "CC.6 twice": ("CausalConv1d", changed(PROMPT, {"cache_indices": integers(1, 1)})),
    "CC.6 mode": ("CausalConv1d", changed(PROMPT, {"initial_state_mode": integers(1, 2)})),
    "CC.7 length": (
        "CausalConv1d",
        changed(PROMPT, {"num_accepted_tokens": integers(1, 1), "conv_states": halfs(5, 4, 80)}),
    ),
    "CC.7 count": ("CausalConv1d", changed(PROMPT, {"num_accepted_tokens": integers(1, 4)})),
    "CC.7 negative": ("CausalConv1d", changed(PROMPT, {"num_accepted_tokens": integers(1, -1)})),
    "FC.2": ("FusedCausalConv1d", changed(ADDED, attrs={"activation_mode": 1})),
    "FC.3": ("FusedCausalConv1d", changed(ADDED, attrs={"residual_connection": 2})),
    "FC.4": ("FusedCausalConv1d", changed(ADDED, attrs={"conv_mode": -1})),
    "FC.5 bias": ("FusedCausalConv1d", changed(ADDED, {"bias": halfs(80)})),
    "FC.5 mode": ("FusedCausalConv1d", changed(ADDED, {"initial_state_mode": integers(1, 1)})),
    "FC.6 lines": ("FusedCausalConv1d", changed(ADDED, {"cache_indices": integers(1, 2)[None]})),
    "FC.6 lines of blocks": ("FusedCausalConv1d", changed(BLOCKS, {"cache_indices": integers(1, 2)})),
    "FC.6 counts": ("FusedCausalConv1d", changed(ADDED, {"num_computed_tokens": integers(1)})),
    "FC.7 width": ("FusedCausalConv1d", changed(PROMPT, attrs={"max_query_len": 3})),
    "FC.7 tokens": ("FusedCausalConv1d", (lines(rng(0), (9,), width=3, length=12, packed=False), {})),
    "FC.7 length": ("FusedCausalConv1d", changed(ADDED_FIXED, {"conv_states": halfs(5, 3, 80)})),
    "FC.7 longest": ("FusedCausalConv1d", changed(ADDED, attrs={"max_query_len": 4})),
    "FC.7 no longest": ("FusedCausalConv1d", (ADDED[0], {})),
    "FC.8 blocks": ("FusedCausalConv1d", changed(BLOCKS, {"initial_state_idx": None})),
    "FC.8 computed": ("FusedCausalConv1d", changed(ADDED, attrs={"conv_mode": 1})),
    "FC.8 size": ("FusedCausalConv1d", changed(BLOCKS, attrs={"block_size": 1})),
    "FC.9 limits": ("FusedCausalConv1d", changed(ADDED, {"query_start_loc": integers(0, 0, 5)}, {"max_query_len": 5})),
    "FC.9 line": ("FusedCausalConv1d", changed(ADDED, {"cache_indices": integers(1, 5)})),
    "FC.9 computed": ("FusedCausalConv1d", changed(ADDED, {"num_computed_tokens": integers(1, -1)})),
    "FC.9 accepted": ("FusedCausalConv1d", changed(ADDED, {"num_accepted_tokens": integers(1, 3)})),
    "FC.9 accepted line": (
        "FusedCausalConv1d",
        changed(ADDED, {"num_accepted_tokens": integers(3, 1), "conv_states": halfs(5, 3, 80)}),
    ),
    "FC.9 order of blocks": ("FusedCausalConv1d", changed(BLOCKS, {"initial_state_idx": integers(0, 3)})),
    "FC.9 last block": ("FusedCausalConv1d", changed(BLOCKS, {"block_idx_last_scheduled_token": integers(2, 3)})),
    "FC.9 no line": ("FusedCausalConv1d", changed(BLOCKS, {"cache_indices": UNREAD})),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_calls_are_refused_by_the_number_of_the_constraint(case: str) -> None:
    op, (inputs, attrs) = REFUSED[case]
    constraint = f"({case.split()[0]})"
    said = refused(op, {name: array for name, array in inputs.items() if array is not None}, attrs)
    assert [text.endswith(constraint) for text in said] == [True, True], said


def test_blocks_that_the_tokens_do_not_fill() -> None:
    inputs, attrs = changed(BLOCKS, attrs={"block_size": 9})
    with pytest.raises(ops.KernelError, match="more blocks than the sequence fills"):
        ops.run("FusedCausalConv1d", inputs, attrs)


def test_a_sequence_that_begins_reads_no_line() -> None:
    inputs, attrs = changed(BLOCKS, {"cache_indices": UNREAD, "num_computed_tokens": integers(0, 2)})
    check("FusedCausalConv1d", inputs, attrs)
