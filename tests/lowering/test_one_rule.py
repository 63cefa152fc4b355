"""The registry, the eager call, the kernel alone and the reference agree about which calls there are.

What only contents tell (the entries of sparse_indices) the registry does not look at; the kernel and the reference do.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fa_compiler import ops, reference
from fa_compiler.lowering.ort.eager import compute
from fa_compiler.op_registry import NodeError, as_arrays, full_attrs, get, refusal
from tests.corrupted import PREFIX_MASK, TRIANGLE, WITH_KERNEL, Case, asks_the_kernel, corrupted, flat
from tests.examples import examples

from .refusals import refused

COUNT = examples(120)
OWN = (NodeError, ops.KernelError, reference.ReferenceInputError)


@pytest.mark.parametrize("seed", range(4))
def test_corrupted_calls_are_computed_or_refused_by_name(seed: int) -> None:
    for case in corrupted(seed, COUNT // 4):
        said = outcome(reference.run, case)
        spec = get(case.op_type, case.cann)
        # A variant may lack an input that a call of its layout needs, so those of the newest one count, too.
        names = {*case.inputs, *case.attrs, *spec.input_names, *spec.attr_names, *get(case.op_type).input_names}
        assert said is None or any(name in said for name in names), (case.op_type, case.change, said)
        if case.op_type in WITH_KERNEL:
            check_against_the_kernel(case, said)


def outcome(run: Any, case: Case) -> str | None:
    """Why a call is refused, None where it is not; any other error than the project's own is a fault."""
    try:
        run(case.op_type, case.inputs, case.attrs, cann=case.cann)
    except OWN as error:
        return str(error)
    except Exception as error:
        raise AssertionError(f"{case.op_type}: {case.change}: {type(error).__name__}: {error}") from error
    return None


def check_against_the_kernel(case: Case, said: str | None) -> None:
    """The eager call does what the reference does, in words of its own, and the kernel alone what the registry says."""
    told = outcome(ops.run, case)
    assert told is None or ("ONNXRuntime" not in told and "tensor(" not in told), (case.op_type, case.change, told)
    spec = get(case.op_type, case.cann)
    try:
        arrays, attrs = as_arrays(spec, case.inputs), full_attrs(spec, case.attrs)
    except NodeError:
        assert told is not None
        assert said is not None
        return
    if not any(array.dtype == np.float64 for array in flat(arrays)):  # which only the reference takes
        assert (told is None) == (said is None), (case.op_type, case.change, told, said)
    if refusal(spec, arrays, attrs, case.cann) is not None and asks_the_kernel(case, arrays):
        with pytest.raises(OWN):
            compute(spec, arrays, attrs)


def f32(*shape: int) -> Any:
    return np.linspace(-1, 1, int(np.prod(shape))).reshape(shape).astype(np.float32)


def packed(q_lens: tuple[int, ...], k_lens: tuple[int, ...], **more: Any) -> dict[str, Any]:
    q, k = sum(q_lens), sum(k_lens)
    ends = {"actual_seq_qlen": np.cumsum(q_lens), "actual_seq_kvlen": np.cumsum(k_lens)}
    return {"query": f32(q, 2, 4), "key": f32(k, 2, 4), "value": f32(k, 2, 4)} | ends | more


def gradient(forward: dict[str, Any], attrs: dict[str, Any]) -> dict[str, Any]:
    """The inputs of the gradient of a packed call."""
    given = {("pse_shift" if name == "real_shift" else name): value for name, value in forward.items()}
    if "pse_shift" in given and given["pse_shift"].ndim == 2:
        forward = forward | {"real_shift": given["pse_shift"]}
        given["pse_shift"] = given["pse_shift"].reshape(-1)
    out = reference.run("FlashAttentionScore", forward, attrs)
    given |= {name: out[name] for name in ("softmax_max", "softmax_sum")}
    return given | {"attention_in": out["attention_out"], "dy": f32(*out["attention_out"].shape)}


TND = {"head_num": 2, "input_layout": "TND", "scale_value": 0.5}
BNSD = {"head_num": 2, "input_layout": "BNSD", "scale_value": 0.5}
DECODE = {"num_heads": 2, "input_layout": "BNSD", "scale_value": 0.5}
SQUARE = {"query": f32(2, 2, 3, 4), "key": f32(2, 2, 5, 4), "value": f32(2, 2, 5, 4)}
CACHE = {"query": f32(2, 2, 1, 4), "key": f32(2, 2, 5, 4), "value": f32(2, 2, 5, 4)}
MODE_7 = {"sparse_mode": 7, "next_tockens": 0}
MODE_8 = {"sparse_mode": 8}

TAKEN: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "queries without keys": ("FlashAttentionScore", packed((2, 3), (0, 4)), TND),
    "a bias beside queries without keys": ("FlashAttentionScore", packed((2, 3), (0, 4), real_shift=f32(24, 1)), TND),
    "a bias beside keys without queries": ("FlashAttentionScore", packed((0, 3), (2, 4), real_shift=f32(24, 1)), TND),
    "no heads": ("FlashAttentionScore", {name: f32(2, 0, 3, 4) for name in ("query", "key", "value")}, BNSD),
    "one mask in sparse_mode 5": (
        "FlashAttentionScore",
        SQUARE | {"atten_mask": np.triu(np.ones((3, 5), np.bool_), 3), "prefix": np.array([3, 4])},
        BNSD | {"sparse_mode": 5},
    ),
    "prefix in sparse_mode 0": ("FlashAttentionScore", packed((2, 3), (3, 4), prefix=np.array([0])), TND),
    "any prefix of a sequence without queries": (
        "FlashAttentionScore",
        packed((0, 3), (4, 4), atten_mask=PREFIX_MASK, prefix=np.array([9, 2])),
        TND | {"sparse_mode": 6},
    ),
    "mode 7": ("FlashAttentionScore", packed((2, 3), (3, 4), atten_mask=TRIANGLE), TND | MODE_7),
    "bytes in a mask": (
        "IncreFlashAttention",
        CACHE | {"atten_mask": np.array([[0, 2, 0, 255, 0]] * 2, np.uint8)},
        DECODE,
    ),
    "an empty mask": ("IncreFlashAttention", CACHE | {"atten_mask": np.zeros((0, 5), np.bool_)}, DECODE),
    "an empty offset": (
        "IncreFlashAttention",
        CACHE
        | {name: np.zeros((2, 2, 5, 4), np.int8) for name in ("key", "value")}
        | {"antiquant_scale": f32(2), "antiquant_offset": f32(0), "quant_scale2": f32(0)},
        DECODE,
    ),
    "no room for the padding": (
        "IncreFlashAttention",
        CACHE | {"actual_seq_lengths": np.array([2, 4]), "kv_padding_size": np.array([2])},
        DECODE,
    ),
}
TAKEN |= {
    f"gradient: {name}": ("FlashAttentionScoreGrad", gradient(inputs, attrs), attrs)
    for name, inputs, attrs in (
        ("queries without keys", packed((2, 3), (0, 4)), TND),
        ("a bias beside queries without keys", packed((2, 3), (0, 4), real_shift=f32(24, 1)), TND),
        ("prefix in sparse_mode 0", packed((2, 3), (3, 4), prefix=np.array([0])), TND),
        ("a bias in mode 7", packed((2, 3), (3, 4), atten_mask=TRIANGLE, real_shift=f32(36, 1)), TND | MODE_7),
        ("a bias in mode 8", packed((2, 3), (3, 4), atten_mask=TRIANGLE, real_shift=f32(36, 1)), TND | MODE_8),
    )
}


@pytest.mark.parametrize("case", TAKEN)
def test_what_the_kernel_takes_beyond_ascend_is_computed_alike(case: str) -> None:
    op_type, inputs, attrs = TAKEN[case]
    got, want = ops.run(op_type, inputs, attrs), reference.run(op_type, inputs, attrs)
    for name, array in want.items():
        np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=1e-5)


LIST = {"query": f32(1, 2, 4, 8), "key": f32(1, 5, 1, 8), "weights": f32(1, 2, 4)}
PAGES = {"key": f32(4, 24, 8), "value": f32(4, 24, 8), "block_table": np.array([[0], [1]], np.int32)}
LOSS = {
    "query": f32(1, 3, 4, 8),
    "key": f32(1, 2, 1, 8),
    "query_index": f32(1, 3, 2, 8),
    "key_index": f32(1, 2, 1, 8),
    "weight": f32(1, 3, 2),
    "sparse_indices": np.zeros((1, 3, 1, 1), np.int32),
    "softmax_max": np.ones((1, 1, 3, 4), np.float32),
    "softmax_sum": np.ones((1, 1, 3, 4), np.float32),
}
LOSS_ATTRS = {"scale_value": 0.5, "layout": "BSND"}
ROPES = {"query_rope": f32(2, 2, 3, 2), "key_rope": f32(2, 2, 5, 3)}

NOT_TAKEN: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "slopes": ("FA.9", "FlashAttentionScore", SQUARE | {"real_shift": f32(2)}, BNSD | {"pse_type": 2}),
    "rope parts": ("FA.18", "FlashAttentionScore", SQUARE | ROPES, BNSD),
    "a start": ("FA.19", "FlashAttentionScore", SQUARE | {"q_start_idx": np.array([2**40])}, BNSD),
    "a start of rank 2": ("FA.19", "FlashAttentionScore", SQUARE | {"q_start_idx": np.array([[1]])}, BNSD),
    "values without keys": (
        "FA.4",
        "FlashAttentionScore",
        {"query": f32(2, 3, 8), "key": f32(2, 5, 0), "value": f32(2, 5, 8)},
        BNSD | {"input_layout": "BSH"},
    ),
    "keys of queries without size": (
        "FA.5",
        "FlashAttentionScore",
        {"query": f32(2, 3, 0), "key": f32(2, 5, 8), "value": f32(2, 5, 8)},
        BNSD | {"input_layout": "BSH"},
    ),
    "lengths": ("FA.17", "FlashAttentionScore", SQUARE | {"actual_seq_qlen": np.array([3, 6])}, BNSD),
    "8-bit scales": ("FA.1", "FlashAttentionScore", SQUARE | {"d_scale_q": f32(1)}, BNSD),
    "more queries than keys": ("KL.10", "SparseLightningIndexerGradKLLoss", LOSS, LOSS_ATTRS),
    "tokens behind the last sequence": (
        "KL.10",
        "SparseLightningIndexerGradKLLoss",
        {name: value[0] for name, value in LOSS.items()}
        | {"key": f32(4, 1, 8), "key_index": f32(4, 1, 8)}
        | {"actual_seq_lengths_query": np.array([2]), "actual_seq_lengths_key": np.array([4])},
        LOSS_ATTRS | {"layout": "TND"},
    ),
    "a mode without a mask": (
        "PFA.3",
        "PromptFlashAttention",
        {name: f32(1, 2, 3, 4) for name in ("query", "key", "value")},
        {"num_heads": 2, "num_key_value_heads": 2, "input_layout": "BNSD", "sparse_mode": 5},
    ),
    "a negative floor": (
        "KL.8",
        "SparseLightningIndexerGradKLLoss",
        LOSS | {name: f32(1, 3, 1, 8) for name in ("key", "key_index")},
        LOSS_ATTRS | {"cpu_loss_floor": -1.0},
    ),
    "pages of 24": (
        "IFA.9",
        "IncreFlashAttention",
        {"query": f32(2, 1, 8), "actual_seq_lengths": np.array([2, 3])} | PAGES,
        {"num_heads": 1, "input_layout": "BSH", "block_size": 24},
    ),
    "lengths of no packed sequences": (
        "LIG.7",
        "LightningIndexerGrad",
        LIST
        | {"dy": f32(1, 2, 1), "sparse_indices": np.zeros((1, 2, 1, 1), np.int32)}
        | {"actual_seq_lengths_key": np.array([5], np.int32)},
        {"headNum": 4, "layout": "BSND"},
    ),
    "a prefix that is a number": (
        "FA.14",
        "FlashAttentionScore",
        SQUARE | {"atten_mask": np.zeros((2, 1, 3, 5), np.bool_), "prefix": np.array(3)},
        BNSD | {"sparse_mode": 5},
    ),
    "a bias of another type beside integers": (
        "PFA.10",
        "PromptFlashAttention",
        {name: np.ones((1, 2, 3, 16), np.int8) for name in ("query", "key", "value")}
        | {name: np.ones(1, np.float32) for name in ("quant_scale1", "deq_scale1", "deq_scale2")}
        | {"pse_shift": f32(1, 2, 3, 3)},
        {"num_heads": 2, "num_key_value_heads": 2, "input_layout": "BNSD"},
    ),
    "lengths of rank 2": (
        "LI.7",
        "LightningIndexer",
        LIST | {"actual_seq_lengths_key": np.array([[5]], np.int32)},
        {"sparse_count": 2},
    ),
}


NO_SEQUENCES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "attention": (
        "SparseFlashAttention",
        {name: f32(0, 2, 8) for name in ("query", "key", "value")}
        | {"sparse_indices": np.zeros((0, 2, 3), np.int32)}
        | {f"actual_seq_lengths_{name}": np.zeros(0, np.int32) for name in ("query", "kv")},
        {"scale_value": 0.5, "layout_query": "TND", "layout_kv": "TND", "attention_mode": 2},
    ),
    "loss": (
        "SparseLightningIndexerGradKLLoss",
        {name: value[:0] for name, value in LOSS.items()} | {name: f32(0, 3, 1, 8) for name in ("key", "key_index")},
        LOSS_ATTRS,
    ),
}


@pytest.mark.parametrize("case", NO_SEQUENCES)
def test_selected_keys_of_no_sequences(case: str) -> None:
    op_type, inputs, attrs = NO_SEQUENCES[case]
    got, want = ops.run(op_type, inputs, attrs), reference.run(op_type, inputs, attrs)
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array)


@pytest.mark.parametrize("case", NOT_TAKEN)
def test_what_one_refuses_all_refuse(case: str) -> None:
    constraint, op_type, inputs, attrs = NOT_TAKEN[case]
    said, _ = refused(op_type, inputs, attrs)
    assert said.endswith(f"({constraint})")


def test_the_sample_of_the_gradient_s_document() -> None:
    """The sample of aclnnFlashAttentionUnpaddingScoreGradV5: one sequence of 256 tokens, one head of 128, a mask, a
    sink, and a prefix that sparse_mode 0 does not read."""
    rows = np.ones((256, 1, 128), np.float16)
    inputs = dict.fromkeys(("query", "key", "value", "dy", "attention_in"), rows)
    inputs |= {name: np.full((1, 256, 8), 3.0, np.float32) for name in ("softmax_max", "softmax_sum")}
    inputs |= {"atten_mask": np.zeros((256, 256), np.uint8), "sink": np.zeros(1, np.float32)}
    inputs |= {name: np.array([256]) for name in ("actual_seq_qlen", "actual_seq_kvlen")}
    inputs |= {name: np.array([0]) for name in ("prefix", "q_start_idx", "kv_start_idx")}
    attrs = {"scale_value": 0.088388, "pre_tockens": 65536, "next_tockens": 65536, "head_num": 1}
    attrs |= {"input_layout": "TND", "sparse_mode": 0, "pse_type": 1, "softmax_in_layout": "same_as_input"}
    found, right = (run("FlashAttentionScoreGrad", inputs, attrs) for run in (ops.run, reference.run))
    for name in ("dq", "dk", "dv", "dsink"):
        np.testing.assert_allclose(found[name], right[name], rtol=2e-3, err_msg=name)
