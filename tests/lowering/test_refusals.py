"""What the kernel does not take is refused by name: the node, the input or attribute, what was found and expected.

The kernel repeats the registry's rules, because a model tells it sizes and contents only while it runs. So every case
here is put to the kernel alone, and to the registry, which the eager call and the reference ask.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from fa_compiler import ops
from fa_compiler.lowering.ort import register_custom_ops
from fa_compiler.op_registry import NodeError, UnknownOp

from . import refusals
from .problems import OP, TRIANGLE, Form

FORM = Form(heads=4, kv_heads=2, queries=6, keys=7, size=8)
ONE = np.ones(1, np.float32)


def refused(inputs: dict[str, Any], **attrs: Any) -> str:
    """The kernel's error text for the form's own inputs with these replaced (None: left out)."""
    given = FORM.inputs(np.random.default_rng(0)) | inputs
    said, text = refusals.refused(OP, given, FORM.all_attrs | attrs)
    assert re.search(r"\((G0|FA\.\d+)\)$", said)
    assert text.startswith("node 'FlashAttentionScore' (FlashAttentionScore): ")
    return text.partition("): ")[2]


SINK = np.ones(4, np.float32)
SLOPES = np.ones(4, np.float32)


@pytest.mark.parametrize("name", ["d_scale_q", "d_scale_k", "d_scale_v", "p_scale"])
def test_inputs_of_types_that_only_950_has(name: str) -> None:
    assert refused({name: ONE}).startswith(f"the input {name} (of FP8 types) is not supported")


@pytest.mark.parametrize(
    ("inputs", "attrs", "text"),
    [
        (
            {},
            {"keep_prob": 0.5},
            "keep_prob is 0.500000 without the input drop_mask, which only 950 draws itself (FA.15)",
        ),
        (
            {"drop_mask": np.ones(41, np.uint8)},
            {"keep_prob": 0.9},
            "input drop_mask has 41 bytes, expected at least 42, a bit for each score (FA.15)",
        ),
        (
            {"sink": np.ones(3, np.float32)},
            {},
            "input sink has shape [3], expected [4], one for each query head (FA.16)",
        ),
        ({"sink": np.ones((1, 4), np.float32)}, {}, "input sink has shape [1,4], expected [4]"),
        (
            {"real_shift": np.ones((3, 4, 6, 7), np.float32)},
            {"cpu_mask_batch": "repeated"},
            "input real_shift has shape [3,4,6,7], expected [2,4,6,7], any of these dimensions may be 1, the "
            "first one a divisor (FA.10)",
        ),
        (
            {"atten_mask": np.zeros((0, 4, 6, 7), np.bool_)},
            {"cpu_mask_batch": "repeated"},
            "input atten_mask has shape [0,4,6,7], expected [2,4,6,7] or [6,7], any of these dimensions may be 1, the "
            "first one a divisor (FA.11)",
        ),
        ({}, {"cpu_mask_batch": "half"}, 'cpu_mask_batch is "half", expected one of "", "repeated" (FA.11)'),
        ({"sink": SINK}, {"cpu_empty_rows": "mean"}, 'cpu_empty_rows is "mean" beside a sink, which no mask excludes'),
        ({"query_rope": ONE}, {}, "input key_rope is absent beside query_rope, expected both or none (FA.18)"),
        ({"key_rope": ONE}, {}, "input query_rope is absent beside key_rope"),
        (
            {"query_rope": ONE, "key_rope": ONE},
            {},
            "input query_rope has shape [1], expected the shape [2,4,6,8] of query with another head size (FA.18)",
        ),
        (
            {"query_rope": np.ones((2, 4, 6, 3), np.float32), "key_rope": np.ones((2, 2, 7, 4), np.float32)},
            {},
            "input key_rope has shape [2,2,7,4], expected the head size 3 of query_rope",
        ),
        ({}, {"pse_type": 2}, "pse_type is 2 without the input real_shift, expected 1 (FA.8)"),
        ({}, {"pse_type": 0}, "pse_type is 0 without the input real_shift, expected 1 (FA.8)"),
        ({}, {"cpu_softcap": -2.0}, "cpu_softcap is -2, expected 0 or a number from 1e-06 to 1e+06 (FA.24)"),
        (
            {},
            {"cpu_softcap": 1e5, "scale_value": 1e-34},
            "scale_value is 1e-34 beside a cpu_softcap of 100000, expected a quotient that float32 can hold (FA.24)",
        ),
        (
            {"real_shift": np.ones((1, 1, 6, 7), np.float32)},
            {"cpu_softcap": 2.0, "pse_type": 1},
            "pse_type is 1 beside cpu_softcap, expected 0, 2 or 3: real_shift is added after the cap (FA.24)",
        ),
        ({"real_shift": SLOPES}, {"pse_type": 2}, "pse_type 2 needs as many queries as keys, found 6 and 7 (FA.9)"),
        (
            {"real_shift": SLOPES[:3]},
            {"pse_type": 3},
            "input real_shift has shape [3], expected slopes [4] or [2,4] for pse_type 3 (FA.9)",
        ),
    ],
)
def test_optional_inputs(inputs: dict[str, Any], attrs: dict[str, Any], text: str) -> None:
    assert refused(inputs, **attrs).startswith(text)


def test_slopes_beside_narrow_types_are_float32() -> None:
    own = Form(dtype="float16", heads=4, kv_heads=4).inputs(np.random.default_rng(0))
    text = refused(own | {"real_shift": SLOPES.astype(np.float16)}, pse_type=2)
    assert text.startswith("input real_shift of pse_type 2 holds slopes, expected float32 (FA.9)")


def test_start_indices() -> None:
    square = {"key": np.ones((2, 2, 6, 8), np.float32), "value": np.ones((2, 2, 6, 8), np.float32)}
    inputs = square | {"real_shift": SLOPES}
    far = np.array([2**31], np.int64)
    assert "kv_start_idx less q_start_idx needs more than 32 bits (FA.19)" in refused(
        inputs | {"kv_start_idx": far}, pse_type=2
    )
    assert refused(inputs | {"q_start_idx": far[None]}, pse_type=2).startswith(
        "input q_start_idx has shape [1,1], expected rank 1"
    )


@pytest.mark.parametrize(
    ("mode", "inputs", "text"),
    [
        (5, {}, "input atten_mask has shape [2048,2048], expected [2,4,6,7]"),
        (6, {}, "input prefix is needed for sparse_mode 6 (FA.14)"),
        (6, {"prefix": np.array([3])}, "input prefix has shape [1], expected [2] (FA.14)"),
        (6, {"prefix": np.array([1, 8])}, "input prefix of batch 1 is 8, expected 1 to 7 (FA.14)"),
        (6, {"prefix": np.array([0, 3])}, "input prefix of batch 0 is 0, expected 1 to 7 (FA.14)"),
        (
            6,
            {"prefix": np.array([1, 3])},
            "input atten_mask of sparse_mode 6 has shape [2048,2048], expected [3072,2048] (FA.11)",
        ),
        (
            6,
            {"prefix": np.array([1, 3]), "atten_mask": np.concatenate([TRIANGLE, TRIANGLE[:1024]])},
            "input atten_mask of sparse_mode 6 differs in row 2048 from the expected 0 in its left half",
        ),
        (7, {}, "sparse_mode is 7, expected 0 to 6 for input_layout BNSD (FA.12)"),
        (8, {}, "sparse_mode is 8, expected 0 to 6 for input_layout BNSD (FA.12)"),
        (9, {}, "sparse_mode is 9, expected 0 to 8 (FA.12)"),
        (-1, {}, "sparse_mode is -1, expected 0 to 8 (FA.12)"),
        (
            3,
            {"atten_mask": np.zeros((2, 3, 1, 7), np.bool_)},
            "input atten_mask has shape [2,3,1,7], expected [2,4,1,7] beside the band of sparse_mode 3, any of",
        ),
        (
            6,
            {"prefix": np.array([1, 3]), "atten_mask": np.zeros((1, 1, 1, 7), np.bool_)},
            "input atten_mask of sparse_mode 6 has shape [1,1,1,7], expected [3072,2048]",
        ),
    ],
)
def test_masks_of_a_mode(mode: int, inputs: dict[str, Any], text: str) -> None:
    assert refused({"atten_mask": TRIANGLE} | inputs, sparse_mode=mode).startswith(text)


@pytest.mark.parametrize(
    ("attrs", "text"),
    [
        ({"head_num": 0}, "head_num is 0, expected the number of query heads"),
        ({"input_layout": "BNDS"}, 'input_layout is "BNDS", expected one of "BSH", "SBH", "BSND", "BNSD", "TND"'),
        ({"pse_type": 4}, "pse_type is 4, expected 0 to 3"),
        ({"keep_prob": 0.0}, "keep_prob is 0.000000, expected more than 0 and at most 1"),
        ({"softmax_out_layout": "TND"}, 'softmax_out_layout is "TND", expected one of "", "same_as_input"'),
        ({"out_dtype": -1}, "out_dtype is -1, expected 0 (float16) or 1 (bfloat16) (FA.22)"),
        ({"cpu_empty_rows": "one"}, 'cpu_empty_rows is "one", expected one of "", "zero", "mean", "unmasked"'),
        ({"cpu_nan_rows": "one"}, 'cpu_nan_rows is "one", expected one of "", "zero", "infinite"'),
    ],
)
def test_attributes(attrs: dict[str, Any], text: str) -> None:
    assert refused({}, **attrs).startswith(text)


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({"query": zeros(2, 6, 32)}, "input query has shape [2,6,32], expected rank 4 for input_layout BNSD"),
        ({"query": zeros(2, 3, 6, 8)}, "input query has shape [2,3,6,8], expected 4 heads"),
        ({"query": zeros(3, 4, 6, 8)}, "input key has shape [2,2,7,8], expected the batch 3 of query, or 1"),
        ({"value": zeros(0, 2, 7, 8)}, "input value has shape [0,2,7,8], expected the batch 2 of query, or 1"),
        (
            {"query": zeros(1, 4, 6, 8), "value": zeros(3, 2, 7, 8)},
            "input value has shape [3,2,7,8], expected the batch 2 of key, or 1",
        ),
        (
            {"query": zeros(1, 4, 6, 8), "atten_mask": np.zeros((3, 1, 6, 7), np.bool_)},
            "input atten_mask has shape [3,1,6,7], expected [2,4,6,7]",
        ),
        ({"key": zeros(2, 2, 7, 9)}, "input key has shape [2,2,7,9], expected the query's head size 8"),
        ({"key": zeros(2, 3, 7, 8), "value": zeros(2, 3, 7, 8)}, "input key has shape [2,3,7,8], expected a number"),
        ({"value": zeros(2, 2, 8, 8)}, "input value has shape [2,2,8,8], expected the heads and length"),
        (
            {"atten_mask": np.zeros((6, 8), np.bool_)},
            "input atten_mask has shape [6,8], expected [2,4,6,7] or [6,7], any of these dimensions may be 1",
        ),
        ({"atten_mask": np.zeros((2, 6, 7), np.bool_)}, "input atten_mask has shape [2,6,7], expected [2,4,6,7]"),
        ({"atten_mask": np.zeros((2, 2, 6, 7), np.bool_)}, "input atten_mask has shape [2,2,6,7], expected [2,4,6,7]"),
        ({"real_shift": zeros(6, 7)}, "input real_shift has shape [6,7], expected [2,4,6,7]"),
        ({"real_shift": zeros(2, 4, 5, 7)}, "input real_shift has shape [2,4,5,7], expected [2,4,6,7]"),
        ({"actual_seq_qlen": np.array([6])}, "input actual_seq_qlen has a meaning for input_layout TND only"),
        ({"actual_seq_kvlen": np.array([8])}, "input actual_seq_kvlen is 8, expected 0 to 7, the rows of key"),
        ({"actual_seq_kvlen": np.array([-1])}, "input actual_seq_kvlen is -1, expected 0 to 7, the rows of key"),
        (
            {"actual_seq_kvlen": np.array([5]), "value": zeros(2, 2, 4, 8)},
            "input actual_seq_kvlen is 5, expected 0 to 4, the rows of value",
        ),
        ({"actual_seq_kvlen": np.array([5, 5])}, "input actual_seq_kvlen has shape [2], expected [1]"),
        (
            {"actual_seq_kvlen": np.array([5]), "atten_mask": np.zeros((6, 7), np.bool_)},
            "input atten_mask has shape [6,7], expected [2,4,6,5]",
        ),
    ],
)
def test_shapes(inputs: dict[str, Any], text: str) -> None:
    assert refused(inputs).startswith(text)


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({"query": zeros(2, 6, 30)}, "input query has shape [2,6,30], expected a last dimension that head_num 4"),
        ({"key": zeros(2, 7, 20)}, "input key has shape [2,7,20], expected a last dimension that is a multiple of"),
        ({"value": zeros(2, 7, 15)}, "input value has shape [2,7,15], expected a last dimension that the 2 key"),
    ],
)
def test_folded_heads(inputs: dict[str, Any], text: str) -> None:
    own = {"query": zeros(2, 6, 32), "key": zeros(2, 7, 16), "value": zeros(2, 7, 16)}
    assert refused(own | inputs, input_layout="BSH").startswith(text)


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({"actual_seq_qlen": None}, "input actual_seq_qlen is needed for input_layout TND"),
        ({"actual_seq_kvlen": None}, "input actual_seq_kvlen is needed for input_layout TND"),
        ({"actual_seq_qlen": np.array([5, 4])}, "input actual_seq_qlen is [5,4], expected cumulative lengths"),
        ({"actual_seq_kvlen": np.array([3, 9])}, "input actual_seq_kvlen is [3,9], expected cumulative lengths"),
        ({"actual_seq_qlen": np.array([0, 4])}, None),
        ({"actual_seq_qlen": np.array([6])}, "input actual_seq_kvlen has 2 batches, expected the 1"),
        ({"atten_mask": np.zeros((4, 4), np.bool_)}, "input atten_mask has shape [4,4], expected [4,5] (longest"),
        ({"real_shift": zeros(5)}, "input real_shift has shape [5], expected [B or 1,N1,1024,maxS2] (compressed)"),
    ],
)
def test_packed_lengths(inputs: dict[str, Any], text: str | None) -> None:
    own = Form("TND", heads=4, kv_heads=2, queries=(2, 4), keys=(3, 5)).inputs(np.random.default_rng(0))
    if text is None:
        ops.run(OP, own | inputs, {"head_num": 4, "input_layout": "TND"}, ["attention_out"])
    else:
        assert refused(own | inputs, input_layout="TND").startswith(text)


@pytest.mark.parametrize(
    ("inputs", "attrs", "text"),
    [
        (
            {"atten_mask": TRIANGLE},
            {"sparse_mode": 5},
            "sparse_mode is 5, expected 0 to 4 or 6 to 8 for input_layout TND (FA.12)",
        ),
        (
            {"atten_mask": np.zeros((1, 1, 1, 5), np.bool_)},
            {"sparse_mode": 3},
            "input atten_mask has shape [1,1,1,5], expected [2048,2048] for input_layout TND (FA.11)",
        ),
        (
            {"atten_mask": TRIANGLE, "real_shift": SLOPES},
            {"sparse_mode": 7, "pse_type": 2},
            "sparse_mode 7 takes no slopes, expected pse_type 0 or 1 (FA.9)",
        ),
        (
            {"atten_mask": TRIANGLE, "real_shift": SLOPES},
            {"sparse_mode": 8, "pse_type": 2},
            "pse_type 2 in sparse_mode 8 needs batch 0 to end its queries and keys at the same position (FA.9)",
        ),
        (
            {"atten_mask": TRIANGLE, "real_shift": SLOPES, "q_start_idx": np.array([1])},
            {"sparse_mode": 8, "pse_type": 2},
            "pse_type 2 in sparse_mode 8 needs batch 1 to end its queries and keys at the same position (FA.9)",
        ),
        (
            {"drop_mask": np.ones(12, np.uint8)},
            {"keep_prob": 0.5},
            "input drop_mask has 12 bytes, expected at least 13",
        ),
    ],
)
def test_packed_features(inputs: dict[str, Any], attrs: dict[str, Any], text: str) -> None:
    own = Form("TND", heads=4, kv_heads=2, queries=(2, 4), keys=(3, 5)).inputs(np.random.default_rng(0))
    assert refused(own | inputs, input_layout="TND", **attrs).startswith(text)


@pytest.mark.parametrize(
    ("length", "attrs", "text"),
    [
        (1200, {"sparse_mode": 1}, "needs a causal atten_mask: sparse_mode 2 or 3, or next_tockens 0 and pre_tockens"),
        (1200, {"sparse_mode": 4, "next_tockens": 0}, "needs a causal atten_mask"),
        (1200, {"sparse_mode": 0, "next_tockens": 0, "pre_tockens": 1199}, "needs a causal atten_mask"),
        (1201, {"sparse_mode": 3}, "needs as many queries as keys, found 1200 and 1201"),
    ],
)
def test_a_compressed_bias_needs_a_triangle(length: int, attrs: dict[str, Any], text: str) -> None:
    form = Form(batch=1, queries=1200, keys=length, size=1, attrs={"pse_type": 0})
    inputs = form.inputs(np.random.default_rng(0)) | {
        "real_shift": np.zeros((1, 2, 1024, length), np.float32),
        "atten_mask": TRIANGLE if attrs["sparse_mode"] > 1 else np.zeros((1, 1), np.bool_),
    }
    found = refused(inputs, head_num=2, **form.attrs, **attrs)
    assert found.startswith("input real_shift of 1024 rows (compressed) " + text)
    assert found.endswith("(FA.10)")


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (TRIANGLE[:1024, :1024], "input atten_mask of sparse_mode 3 has shape [1024,1024], expected [2048,2048]"),
        (TRIANGLE.T, "input atten_mask of sparse_mode 3 differs in row 0 from the expected 1 above the diagonal"),
        (np.triu(np.ones((2048, 2048), np.bool_)), "input atten_mask of sparse_mode 3 differs in row 0"),
        (TRIANGLE ^ (np.arange(2048 * 2048).reshape(2048, 2048) == 5000), "input atten_mask of sparse_mode 3 differs"),
    ],
)
def test_content_of_the_constant_mask(mask: np.ndarray, text: str, constant: bool) -> None:
    """Checked once if it is a constant, while the session is made, and else on every call."""
    model = _model(mask if constant else None, sparse_mode=3)
    feeds = {"query": zeros(1, 1, 4, 8), "key": zeros(1, 1, 4, 8)}
    if constant:
        with pytest.raises(Exception, match=re.escape(text)):
            _session(model)
        return
    session = _session(model)
    with pytest.raises(Exception, match=re.escape(text)):
        session.run(None, feeds | {"mask": mask})


def test_a_refusal_at_session_creation_names_the_node() -> None:
    model = _model(None, keep_prob=0.5)
    with pytest.raises(Exception, match=r"node 'layer 3/attention' \(FlashAttentionScore\): keep_prob is 0\.5"):
        _session(model)


def test_a_session_survives_a_refused_call() -> None:
    session = _session(_model(None))
    good = {"query": zeros(1, 1, 4, 8), "key": zeros(1, 1, 4, 8), "mask": np.zeros((4, 4), np.bool_)}
    with pytest.raises(Exception, match="node 'layer 3/attention'"):
        session.run(None, good | {"mask": np.zeros((3, 3), np.bool_)})
    assert session.run(None, good)[0].shape == (1, 1, 4, 8)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["scale_value", "keep_prob", "cpu_mask_value", "cpu_softcap"])
def test_an_attribute_that_is_no_finite_number(name: str, value: float) -> None:
    message = (
        rf"node 'layer 3/attention' \(FlashAttentionScore\): attribute {name} is {value}, expected a finite number"
    )
    with pytest.raises(Exception, match=message):
        _session(_model(None, **{name: value}))


def test_the_mode_means_nothing_without_a_mask() -> None:
    given = FORM.inputs(np.random.default_rng(0))
    want = ops.run(OP, given, FORM.all_attrs, ["attention_out"])["attention_out"]
    for mode in (-1, 9):
        got = ops.run(OP, given, FORM.all_attrs | {"sparse_mode": mode}, ["attention_out"])["attention_out"]
        np.testing.assert_array_equal(got, want)


def test_a_wrong_attribute_type_is_an_error() -> None:
    with pytest.raises(Exception, match="scale_value"):
        _session(_model(None, scale_value=1))


def test_attributes_that_are_not_written_have_the_defaults_of_the_newest_variant() -> None:
    """scale_value 1, not 1/sqrt(D)."""
    rng = np.random.default_rng(3)
    query, key = rng.standard_normal((2, 1, 1, 4, 8), np.float32)
    feeds = {"query": query, "key": key, "mask": np.zeros((4, 4), np.bool_)}
    (got,) = _session(_model(None)).run(None, feeds)
    attrs = {"head_num": 1, "input_layout": "BNSD", "scale_value": 1.0}
    inputs = {"query": query, "key": key, "value": key, "atten_mask": feeds["mask"]}
    want = ops.run(OP, inputs, attrs, ["attention_out"])
    np.testing.assert_array_equal(got, want["attention_out"])


def test_unknown_kernel_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA_COMPILER_ISA", "mmx")
    with pytest.raises(ops.KernelError, match="FA_COMPILER_ISA=mmx is unknown; this library has .*reference"):
        ops.run(OP, FORM.inputs(np.random.default_rng(0)), FORM.all_attrs)


def test_names_and_types_of_the_eager_call() -> None:
    inputs = FORM.inputs(np.random.default_rng(0))
    with pytest.raises(UnknownOp, match="FlashAttention"):
        ops.run("FlashAttention", inputs, FORM.all_attrs)
    with pytest.raises(NodeError, match="has no input 'mask'"):
        ops.run(OP, inputs | {"mask": ONE}, FORM.all_attrs)
    with pytest.raises(NodeError, match="has no output 'out'"):
        ops.run(OP, inputs, FORM.all_attrs, ["out"])
    with pytest.raises(NodeError, match="needs the attribute head_num"):
        ops.run(OP, inputs, {"input_layout": "BNSD"})
    with pytest.raises(NodeError, match="needs the input key"):
        ops.run(OP, {"query": inputs["query"]}, FORM.all_attrs)
    with pytest.raises(ops.KernelError, match=r"^FlashAttentionScore: query is DT_DOUBLE, expected .* \(FA\.1\)"):
        ops.run(OP, {name: array.astype(np.float64) for name, array in inputs.items()}, FORM.all_attrs)


def _model(mask: np.ndarray | None, **attrs: Any) -> onnx.ModelProto:
    """One node called "layer 3/attention" whose value is its key; the mask is a constant or an input."""
    node = helper.make_node(
        OP,
        ["query", "key", "key", "", "", "", "mask"],
        ["", "", "", "out"],
        name="layer 3/attention",
        domain="ascend",
        head_num=1,
        input_layout="BNSD",
    )
    node.attribute.extend(helper.make_attribute(name, value) for name, value in attrs.items())
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("query", "key")]
    initializers = []
    if mask is None:
        inputs.append(helper.make_tensor_value_info("mask", TensorProto.BOOL, None))
    else:
        initializers.append(helper.make_tensor("mask", TensorProto.BOOL, mask.shape, mask.tobytes(), raw=True))
    out = helper.make_tensor_value_info("out", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "graph", inputs, [out], initializers)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ascend", 1)]
    return helper.make_model(graph, ir_version=8, opset_imports=opsets)


def _session(model: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    register_custom_ops(options)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
