"""What the kernel does not take is refused by name: the node, the input or attribute, what was found and expected."""

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

from .problems import OP, TRIANGLE, Form

FORM = Form(heads=4, kv_heads=2, queries=6, keys=7, size=8)
ONE = np.ones(1, np.float32)


def refused(inputs: dict[str, Any], **attrs: Any) -> str:
    """The error text of the form's own inputs with these replaced (None: left out)."""
    own = FORM.inputs(np.random.default_rng(0))
    with pytest.raises(ops.KernelError) as error:
        ops.run(OP, own | inputs, FORM.all_attrs | attrs, ["attention_out"])
    text = str(error.value)
    assert text.startswith("node 'FlashAttentionScore' (FlashAttentionScore): ")
    return text.partition("): ")[2]


# Valid for the operator, but not computed by this kernel yet.
@pytest.mark.parametrize(
    ("inputs", "attrs", "text"),
    [
        ({"sink": np.ones(4, np.float32)}, {}, "the input sink is not supported"),
        ({"query_rope": ONE, "key_rope": ONE}, {}, "the input query_rope is not supported"),
        ({"d_scale_v": ONE}, {}, "the input d_scale_v is not supported"),
        ({"p_scale": ONE}, {}, "the input p_scale is not supported"),
        ({"drop_mask": np.ones(42, np.uint8)}, {"keep_prob": 0.9}, "dropout (keep_prob 0.9"),
        ({}, {"keep_prob": 0.5}, "dropout (keep_prob 0.5"),
        ({"real_shift": np.ones(4, np.float32)}, {"pse_type": 2}, "pse_type 2 is not supported"),
        ({"real_shift": np.ones(4, np.float32)}, {"pse_type": 3}, "pse_type 3 is not supported"),
        *(
            ({"atten_mask": TRIANGLE}, {"sparse_mode": mode}, f"sparse_mode {mode} is not supported")
            for mode in (5, 6, 7, 8)
        ),
    ],
)
def test_unsupported_features(inputs: dict[str, Any], attrs: dict[str, Any], text: str) -> None:
    assert refused(inputs, **attrs).startswith(text)


@pytest.mark.parametrize(
    ("attrs", "text"),
    [
        ({"head_num": 0}, "head_num is 0, expected the number of query heads"),
        ({"input_layout": "BNDS"}, 'input_layout is "BNDS", expected one of "BSH", "SBH", "BSND", "BNSD", "TND"'),
        ({"sparse_mode": 9}, "sparse_mode is 9, expected 0 to 8"),
        ({"sparse_mode": -1}, "sparse_mode is -1, expected 0 to 8"),
        ({"pse_type": 4}, "pse_type is 4, expected 0 to 3"),
        ({"keep_prob": 0.0}, "keep_prob is 0.000000, expected more than 0 and at most 1"),
        ({"keep_prob": float("nan")}, "keep_prob is nan"),
        ({"softmax_out_layout": "TND"}, 'softmax_out_layout is "TND", expected one of "", "same_as_input"'),
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
        ({"query": zeros(1, 4, 6, 8), "value": zeros(3, 2, 7, 8)},
         "input value has shape [3,2,7,8], expected the batch 2 of key, or 1"),
        ({"query": zeros(1, 4, 6, 8), "atten_mask": np.zeros((3, 1, 6, 7), np.bool_)},
         "input atten_mask has shape [3,1,6,7], expected [2,4,6,7]"),
        ({"key": zeros(2, 2, 7, 9)}, "input key has shape [2,2,7,9], expected the query's head size 8"),
        ({"key": zeros(2, 3, 7, 8), "value": zeros(2, 3, 7, 8)}, "input key has shape [2,3,7,8], expected a number"),
        ({"value": zeros(2, 2, 8, 8)}, "input value has shape [2,2,8,8], expected the heads and length"),
        ({"atten_mask": np.zeros((6, 8), np.bool_)},
         "input atten_mask has shape [6,8], expected [2,4,6,7] or [6,7], any of these dimensions may be 1"),
        ({"atten_mask": np.zeros((2, 6, 7), np.bool_)}, "input atten_mask has shape [2,6,7], expected [2,4,6,7]"),
        ({"atten_mask": np.zeros((2, 2, 6, 7), np.bool_)}, "input atten_mask has shape [2,2,6,7], expected [2,4,6,7]"),
        ({"real_shift": zeros(6, 7)}, "input real_shift has shape [6,7], expected [2,4,6,7]"),
        ({"real_shift": zeros(2, 4, 5, 7)}, "input real_shift has shape [2,4,5,7], expected [2,4,6,7]"),
        ({"actual_seq_qlen": np.array([6])}, "input actual_seq_qlen has a meaning for input_layout TND only"),
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
def test_packed_sequences(inputs: dict[str, Any], text: str | None) -> None:
    own = Form("TND", heads=4, kv_heads=2, queries=(2, 4), keys=(3, 5)).inputs(np.random.default_rng(0))
    if text is None:
        ops.run(OP, own | inputs, {"head_num": 4, "input_layout": "TND"}, ["attention_out"])
    else:
        assert refused(own | inputs, input_layout="TND").startswith(text)


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
    with pytest.raises(Exception, match=r"node 'layer 3/attention' \(FlashAttentionScore\): dropout"):
        _session(model)


def test_a_session_survives_a_refused_call() -> None:
    session = _session(_model(None))
    good = {"query": zeros(1, 1, 4, 8), "key": zeros(1, 1, 4, 8), "mask": np.zeros((4, 4), np.bool_)}
    with pytest.raises(Exception, match="node 'layer 3/attention'"):
        session.run(None, good | {"mask": np.zeros((3, 3), np.bool_)})
    assert session.run(None, good)[0].shape == (1, 1, 4, 8)


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
    want = ops.run(OP, {"query": query, "key": key, "value": key, "atten_mask": feeds["mask"]}, attrs)
    np.testing.assert_array_equal(got, want["attention_out"])


def test_unknown_kernel_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA_COMPILER_ISA", "mmx")
    with pytest.raises(ops.KernelError, match="FA_COMPILER_ISA=mmx is unknown; this library has .*baseline, reference"):
        ops.run(OP, FORM.inputs(np.random.default_rng(0)), FORM.all_attrs)


def test_names_and_types_of_the_eager_call() -> None:
    inputs = FORM.inputs(np.random.default_rng(0))
    with pytest.raises(UnknownOp, match="FlashAttention"):
        ops.run("FlashAttention", inputs, FORM.all_attrs)
    with pytest.raises(ops.KernelError, match="RingAttentionUpdate has no CPU kernel; there is one for Flash"):
        ops.run("RingAttentionUpdate", {}, {})
    with pytest.raises(NodeError, match="has no input 'mask'"):
        ops.run(OP, inputs | {"mask": ONE}, FORM.all_attrs)
    with pytest.raises(NodeError, match="has no output 'out'"):
        ops.run(OP, inputs, FORM.all_attrs, ["out"])
    with pytest.raises(NodeError, match="needs the attribute head_num"):
        ops.run(OP, inputs, {"input_layout": "BNSD"})
    with pytest.raises(NodeError, match="needs the input key"):
        ops.run(OP, {"query": inputs["query"]}, FORM.all_attrs)
    with pytest.raises(ops.KernelError, match="double"):
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
