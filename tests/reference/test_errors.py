"""Bad input: one sentence that names the operator and the input."""

import numpy as np
import pytest

from fa_compiler import reference
from fa_compiler.reference.call import OPERATORS

from .naive import causal_constant, prefix_constant


def base():
    """A legal call: B=2, N1=4, N2=2, S1=3, S2=5, D=2."""
    inputs = {
        "query": np.zeros((2, 4, 3, 2), np.float32),
        "key": np.zeros((2, 2, 5, 2), np.float32),
        "value": np.zeros((2, 2, 5, 2), np.float32),
    }
    return inputs, {"head_num": 4, "input_layout": "BNSD"}


def packed():
    inputs = {
        "query": np.zeros((5, 1, 2), np.float32),
        "key": np.zeros((6, 1, 2), np.float32),
        "value": np.zeros((6, 1, 2), np.float32),
        "actual_seq_qlen": np.array([2, 5]),
        "actual_seq_kvlen": np.array([3, 6]),
    }
    return inputs, {"head_num": 1, "input_layout": "TND"}


def u8(*shape):
    return np.zeros(shape, np.uint8)


def f32(*shape):
    return np.zeros(shape, np.float32)


CASES = {
    "missing input": ({"value": None}, {}, "value", "absent"),
    "unknown input": ({"querry": f32(1)}, {}, "querry", "is not an input"),
    "unknown layout": ({}, {"input_layout": "BNDS"}, "input_layout", "BSH, SBH"),
    "lower case layout": ({}, {"input_layout": "bnsd"}, "input_layout", "BNSD"),
    "rank": ({"key": f32(2, 5, 2)}, {}, "key", "has rank 3, expected 4 for BNSD (FA.2)"),
    "batch": ({"key": f32(3, 2, 5, 2)}, {}, "key", "has the batch size 3, expected 2 as query"),
    "batch of value": (
        {"query": f32(1, 4, 3, 2), "value": f32(0, 2, 5, 2)},
        {},
        "value",
        "has the batch size 0, expected 2 as key",
    ),
    "batch of rope": (
        {"query": f32(1, 4, 3, 2), "query_rope": f32(2, 4, 3, 1), "key_rope": f32(2, 2, 5, 1)},
        {},
        "query_rope",
        "has the shape [2,4,3,1], expected [1,4,3,Dr]",
    ),
    "key and value": ({"value": f32(2, 2, 4, 2)}, {}, "value", "has 4 as S, expected 5 as key"),
    "head size": ({"key": f32(2, 2, 5, 3)}, {}, "key", "head size 3"),
    "head count": ({}, {"head_num": 3}, "head_num", "is 3, expected 4"),
    "no heads": ({}, {"head_num": 0}, "head_num", "positive"),
    "group": ({"key": f32(2, 3, 5, 2), "value": f32(2, 3, 5, 2)}, {}, "key", "expected a divisor of the 4 heads"),
    "dtypes differ": (
        {"key": np.zeros((2, 2, 5, 2), np.float16)},
        {},
        "key",
        "is DT_FLOAT16, expected DT_FLOAT as query",
    ),
    "integers": ({"query": np.zeros((2, 4, 3, 2), np.int32)}, {}, "query", "is DT_INT32, expected one of"),
    "lengths without TND": ({"actual_seq_qlen": np.array([3, 6])}, {}, "actual_seq_qlen", "TND only"),
    "mask dtype": ({"atten_mask": f32(3, 5)}, {}, "atten_mask", "expected DT_BOOL or DT_UINT8"),
    "mask rank": ({"atten_mask": u8(2, 3, 5)}, {}, "atten_mask", "has rank 3, expected 2 or 4"),
    "mask shape": ({"atten_mask": u8(2, 2, 3, 5)}, {}, "atten_mask", "expected [2,4,3,5]"),
    "mode": ({"atten_mask": u8(3, 5)}, {"sparse_mode": 9}, "sparse_mode", "9"),
    "packed mode": ({"atten_mask": causal_constant()}, {"sparse_mode": 7}, "sparse_mode", "BNSD"),
    "causal constant": ({"atten_mask": u8(3, 5)}, {"sparse_mode": 2}, "atten_mask", "expected [2048,2048]"),
    "causal content": (
        {"atten_mask": u8(2048, 2048)},
        {"sparse_mode": 3},
        "atten_mask",
        "does not hold ones above the diagonal",
    ),
    "prefix constant": ({"atten_mask": causal_constant()}, {"sparse_mode": 6}, "atten_mask", "expected [3072,2048]"),
    "prefix missing": ({"atten_mask": prefix_constant()}, {"sparse_mode": 6}, "prefix", "absent"),
    "prefix count": (
        {"atten_mask": prefix_constant(), "prefix": np.array([3])},
        {"sparse_mode": 6},
        "prefix",
        "has the shape [1], expected [2]",
    ),
    "prefix range": (
        {"atten_mask": prefix_constant(), "prefix": np.array([1, 3])},
        {"sparse_mode": 6},
        "prefix",
        "of sequence 0 is 1, expected 2 to 5",
    ),
    "pse absent": ({}, {"pse_type": 0}, "real_shift", "pse_type"),
    "pse type": ({"real_shift": f32(2, 4, 3, 5)}, {"pse_type": 4}, "pse_type", "is 4, expected 0, 1, 2 or 3"),
    "pse shape": ({"real_shift": f32(2, 2, 3, 5)}, {}, "real_shift", "expected [2 or 1,4,3 or 1,5]"),
    "pse rank": ({"real_shift": f32(3, 5)}, {}, "real_shift", "has rank 2, expected 4"),
    "short compressed pse": ({"real_shift": f32(2, 4, 1024, 5)}, {}, "real_shift", "has 1024 rows (compressed ALiBi)"),
    "slopes": ({"real_shift": f32(3)}, {"pse_type": 2}, "real_shift", "expected slopes [4] or [2,4]"),
    "keep_prob": ({}, {"keep_prob": 0.0}, "keep_prob", "above 0 and at most 1"),
    "no bits": ({}, {"keep_prob": 0.5}, "drop_mask", "only 950 draws its own"),
    "few bits": ({"drop_mask": u8(14)}, {"keep_prob": 0.5}, "drop_mask", "15"),
    "bits dtype": ({"drop_mask": f32(15)}, {"keep_prob": 0.5}, "drop_mask", "expected DT_UINT8"),
    "sink": ({"sink": f32(2)}, {}, "sink", "has the shape [2], expected [4]"),
    "one rope": ({"query_rope": f32(2, 4, 3, 1)}, {}, "key_rope", "absent beside query_rope"),
    "rope shape": (
        {"query_rope": f32(2, 4, 2, 1), "key_rope": f32(2, 2, 5, 1)},
        {},
        "query_rope",
        "has the shape [2,4,2,1]",
    ),
    "rope sizes": (
        {"query_rope": f32(2, 4, 3, 1), "key_rope": f32(2, 2, 5, 2)},
        {},
        "key_rope",
        "head size 2",
    ),
    "fp8 scales": ({"d_scale_q": f32(1)}, {}, "d_scale_q", "8-bit floats"),
    "statistics order": ({}, {"softmax_out_layout": "TND"}, "softmax_out_layout", "same_as_input"),
    "empty rows": ({}, {"cpu_empty_rows": "one"}, "cpu_empty_rows", "'zero', 'mean', 'unmasked', 'nan'"),
    "empty rows and sink": ({"sink": f32(4)}, {"cpu_empty_rows": "mean"}, "cpu_empty_rows", "sink"),
    "a list": ({"query": [f32(1), f32(1)]}, {}, "query", "one tensor"),
}

PACKED = {
    "no lengths": ({"actual_seq_qlen": None}, {}, "actual_seq_qlen", "absent"),
    "batches differ": (
        {"actual_seq_kvlen": np.array([6])},
        {},
        "actual_seq_kvlen",
        "has 1 lengths, expected 2, as query",
    ),
    "too long": ({"actual_seq_qlen": np.array([2, 6])}, {}, "actual_seq_qlen", "ends at 6, expected at most 5"),
    "decreasing": ({"actual_seq_qlen": np.array([4, 2])}, {}, "actual_seq_qlen", "never shrink"),
    "mode 5": ({"atten_mask": u8(3, 3)}, {"sparse_mode": 5}, "sparse_mode", "TND"),
    "mask": ({"atten_mask": u8(2, 3)}, {}, "atten_mask", "expected [3,3] or [5,6]"),
    "rank 1 pse": ({"real_shift": f32(15)}, {}, "real_shift", "rank 2"),
    "pse size": ({"real_shift": f32(14, 1)}, {}, "real_shift", "15"),
    "compressed pse, lengths": ({"real_shift": f32(1, 1, 1024, 3)}, {}, "real_shift", "expected a causal atten_mask"),
}


def call(start, inputs, attrs):
    all_inputs, all_attrs = start()
    reference.run("FlashAttentionScore", all_inputs | inputs, all_attrs | attrs)


@pytest.mark.parametrize("case", CASES)
def test_forward(case):
    inputs, attrs, name, text = CASES[case]
    with pytest.raises(reference.ReferenceInputError) as error:
        call(base, inputs, attrs)
    assert str(error.value).startswith(f"FlashAttentionScore: {name}: ")
    assert text in str(error.value)


@pytest.mark.parametrize("case", PACKED)
def test_packed(case):
    inputs, attrs, name, text = PACKED[case]
    with pytest.raises(reference.ReferenceInputError) as error:
        call(packed, inputs, attrs)
    assert str(error.value).startswith(f"FlashAttentionScore: {name}: ")
    assert text in str(error.value)


@pytest.mark.parametrize("start", [base, packed])
def test_the_starting_points_are_legal(start):
    call(start, {}, {})


def test_compressed_bias_needs_a_causal_mask():
    inputs = {name: np.zeros((1, 1, 1025, 1), np.float32) for name in ("query", "key", "value")}
    inputs["real_shift"] = np.zeros((1, 1, 1024, 1025), np.float32)
    attrs = {"head_num": 1, "input_layout": "BNSD", "pse_type": 0}
    with pytest.raises(reference.ReferenceInputError, match=r"real_shift: .*causal"):
        reference.run("FlashAttentionScore", inputs, attrs)
    inputs["key"] = inputs["value"] = np.zeros((1, 1, 1026, 1), np.float32)
    inputs["real_shift"] = np.zeros((1, 1, 1024, 1026), np.float32)
    with pytest.raises(reference.ReferenceInputError, match=r"real_shift: .*expected as many keys"):
        reference.run("FlashAttentionScore", inputs, attrs)


def test_ambiguous_packed_bias():
    """Lengths (2, 0) and (1, 1): two elements are one row a batch, or the matrix of the first batch."""
    inputs = {
        "query": f32(2, 1, 1),
        "key": f32(2, 1, 1),
        "value": f32(2, 1, 1),
        "actual_seq_qlen": np.array([2, 2]),
        "actual_seq_kvlen": np.array([1, 2]),
        "real_shift": f32(2, 1),
    }
    with pytest.raises(reference.ReferenceInputError, match=r"real_shift: .*one row or a matrix"):
        reference.run("FlashAttentionScore", inputs, {"head_num": 1, "input_layout": "TND"})


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"key": f32(1, 2, 5, 2)}, "key"),
        ({"value": f32(1, 2, 5, 2)}, "value"),
        ({"dy": None}, "dy"),
        ({"dy": f32(2, 4, 3, 1)}, "dy"),
        ({"attention_in": f32(2, 4, 3, 3)}, "attention_in"),
        ({"softmax_max": None}, "softmax_max"),
        ({"softmax_sum": f32(2, 4, 3, 1)}, "softmax_sum"),
        ({"d_scale_dy": f32(1)}, "d_scale_dy"),
        ({"dy": np.zeros((2, 4, 3, 2), np.float16)}, "dy"),
    ],
)
def test_backward(change, name):
    inputs, attrs = base()
    inputs |= {"dy": f32(2, 4, 3, 2), "attention_in": f32(2, 4, 3, 2)}
    inputs |= {"softmax_max": f32(2, 4, 3, 8), "softmax_sum": np.ones((2, 4, 3, 8), np.float32)}
    reference.run("FlashAttentionScoreGrad", inputs, attrs)
    with pytest.raises(reference.ReferenceInputError, match=f"^FlashAttentionScoreGrad: {name}: "):
        reference.run("FlashAttentionScoreGrad", inputs | change, attrs)


def test_run_itself(monkeypatch):
    inputs, attrs = base()
    monkeypatch.delitem(OPERATORS, "RingAttentionUpdate")
    with pytest.raises(reference.ReferenceInputError, match="RingAttentionUpdate: operator: has no reference"):
        reference.run("RingAttentionUpdate", {}, {})
    with pytest.raises(ValueError, match="FlashAttentionScor'"):
        reference.run("FlashAttentionScor", {}, {})
    with pytest.raises(reference.ReferenceInputError, match="attn_out: is not an output"):
        reference.run("FlashAttentionScore", inputs, attrs, ["attn_out"])
    with pytest.raises(reference.ReferenceInputError, match="dtype"):
        reference.run("FlashAttentionScore", inputs, attrs, dtype="float32")
    with pytest.raises(ValueError, match="head_num"):
        reference.run("FlashAttentionScore", inputs, {"input_layout": "BNSD"})
    with pytest.raises(ValueError, match="scale"):
        reference.run("FlashAttentionScore", inputs, attrs | {"scale": 1.0})
    assert list(reference.run("FlashAttentionScore", inputs, attrs, ["softmax_sum"])) == ["softmax_sum"]
