"""FlashAttentionScoreGrad as ONNX Runtime meets it: what is refused, threads, memory, types."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from fa_compiler.lowering.ort import register_custom_ops
from fa_compiler.op_registry import dtypes, get
from tests.systems import PEAK_MEMORY
from tools import descriptors

from . import refusals
from .gradients import OP, backward, check
from .problems import TRIANGLE, Form, Inputs, mask

ROOT = Path(__file__).resolve().parents[2]
FORM = Form(heads=4, kv_heads=2, queries=6, keys=7, size=8)
PACKED = Form("TND", heads=4, kv_heads=2, queries=(6, 2), keys=(7, 3), size=8)
ONE = np.ones(1, np.float32)


def refused(form: Form, inputs: dict[str, Any], **attrs: Any) -> str:
    """The error text of the form's own problem with these inputs replaced (None: left out)."""
    rng = np.random.default_rng(0)
    given, known = backward(form.inputs(rng), form.all_attrs, rng)
    _, text = refusals.refused(OP, given | inputs, known | attrs)
    assert text.startswith("node 'FlashAttentionScoreGrad' (FlashAttentionScoreGrad): ")
    return text.partition("): ")[2]


@pytest.mark.parametrize(
    ("inputs", "attrs", "text"),
    [
        ({}, {"input_layout": "BNDS"}, 'input_layout is "BNDS", expected one of'),
        ({}, {"head_num": 3}, "input query has shape [2,4,6,8], expected 3 heads as head_num says, not 4 (FAG.3)"),
        ({"value": np.ones((2, 2, 9, 8), np.float32)}, {}, "input value has shape [2,2,9,8], expected the heads and"),
        ({"key": np.ones((1, 2, 7, 8), np.float32)}, {},
         "input key has shape [1,2,7,8], expected the batch 2 of query (FAG.6)"),
        ({}, {"keep_prob": 0.5},
         "keep_prob is 0.500000 without the input drop_mask, which only 950 draws itself (FAG.7)"),
        ({"drop_mask": ONE.astype(np.uint8)}, {"keep_prob": 0.5},
         "input drop_mask has 1 bytes, expected at least 42, a bit for each score (FAG.7)"),
        ({"atten_mask": TRIANGLE}, {"sparse_mode": 9}, "sparse_mode is 9, expected 0 to 8 (FAG.8)"),
        ({"atten_mask": TRIANGLE}, {"sparse_mode": 7},
         "sparse_mode is 7, expected 0 to 6 for input_layout BNSD (FAG.8)"),
        ({"atten_mask": TRIANGLE.T.copy()}, {"sparse_mode": 2},
         "input atten_mask of sparse_mode 2 differs in row 0 from the expected 1 above the diagonal"),
        ({"atten_mask": TRIANGLE[None]}, {"sparse_mode": 2},
         "input atten_mask has shape [1,2048,2048], expected [2048,2048] (FAG.8)"),
        ({}, {"cpu_empty_rows": "unmasked"},
         'cpu_empty_rows is "unmasked", expected one of "", "zero", "mean", "nan" (FAG.8)'),
        ({}, {"pse_type": 2}, "pse_type is 2 without the input pse_shift, expected 1 (FAG.9)"),
        ({"pse_shift": np.ones((3, 1, 6, 7), np.float32)}, {},
         "input pse_shift has shape [3,1,6,7], expected [2,4,6,7], any of these dimensions may be 1 (FAG.18)"),
        ({"query_rope": ONE}, {}, "input key_rope is absent beside query_rope, expected both or none (FAG.10)"),
        ({"softmax_max": None}, {}, "input softmax_max is absent, expected that of the forward pass (FAG.11)"),
        ({"softmax_sum": np.ones((2, 4, 6, 1), np.float32)}, {},
         "input softmax_sum has shape [2,4,6,1], expected [2,4,6,8] (FAG.11)"),
        ({}, {"softmax_in_layout": "TND"}, 'softmax_in_layout is "TND", expected one of "", "same_as_input" (FAG.12)'),
        ({"attention_in": None}, {}, "input attention_in is absent, expected that of the forward pass (FAG.13)"),
        ({"dy": np.ones((2, 4, 6, 9), np.float32)}, {}, "input dy has shape [2,4,6,9], expected [2,4,6,8] (FAG.13)"),
        ({"sink": ONE}, {}, "input sink has shape [1], expected [4], one for each query head (FAG.15)"),
        ({"atten_mask": np.zeros((3072, 2048), np.bool_)}, {"sparse_mode": 6},
         "input prefix is needed for sparse_mode 6 (FAG.17)"),
        ({"d_scale_dy": ONE}, {}, "the input d_scale_dy (of FP8 types) is not supported by the CPU kernel"),
    ],
)  # fmt: skip
def test_refusals(inputs: dict[str, Any], attrs: dict[str, Any], text: str) -> None:
    assert refused(FORM, inputs, **attrs).startswith(text)


def test_refusals_of_packed_sequences() -> None:
    assert refused(PACKED, {"actual_seq_qlen": None}).startswith(
        "input actual_seq_qlen is needed for input_layout TND (FAG.14)"
    )
    assert refused(PACKED, {}, softmax_in_layout="same_as_input").startswith(
        "input softmax_max has shape [8,4,8], expected [4,8,8] (FAG.11)"
    )
    short = {"actual_seq_qlen": np.array([6, 7])}
    assert refused(PACKED, short, softmax_in_layout="same_as_input").startswith(
        'input query has 8 tokens, expected the 7 of actual_seq_qlen with softmax_in_layout "same_as_input" (FAG.11)'
    )
    shift = {"pse_shift": np.ones((4 * (6 * 7 + 2 * 3), 1), np.float32)}
    assert "(compressed), or 40 or 192 elements on dimension 0 (FAG.18)" in refused(PACKED, shift, pse_type=0)


@pytest.mark.parametrize(
    "row",
    descriptors.combinations(get(OP)),
    ids=lambda row: "-".join(row[name].removeprefix("DT_").lower() for name in ("query", "pse_shift", "atten_mask")),
)
def test_every_type_combination(row: dict[str, str]) -> None:
    rng = np.random.default_rng(5)
    form = Form(dtype=dtypes.to_numpy(row["query"]).name, attrs={"pse_type": 0})
    inputs = form.inputs(rng) | {
        "real_shift": rng.standard_normal((1, 2, 33, 29)).astype(dtypes.to_numpy(row["pse_shift"])),
        "atten_mask": mask(rng, (33, 29)).astype(dtypes.to_numpy(row["atten_mask"])),
    }
    check(*backward(inputs, form.all_attrs, rng))


def _session(form: Form, given: Inputs, attrs: dict[str, Any], threads: int) -> ort.InferenceSession:
    spec = get(OP)
    names = [tensor.name if tensor.name in given else "" for tensor in spec.inputs]
    outputs = ["dq", "dk", "dv", "", "", "", "dsink"]
    node = helper.make_node(OP, names, outputs, name="gradient", domain="ascend", **attrs)
    kind = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.bool_): TensorProto.BOOL}
    graph = helper.make_graph(
        [node],
        "graph",
        [helper.make_tensor_value_info(name, kind[array.dtype], None) for name, array in given.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs if name],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ascend", 1)]
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    register_custom_ops(options)
    model = helper.make_model(graph, ir_version=8, opset_imports=opsets)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "queries", "keys"), [(1, 1, 1300, 2200), (3, 3, 300, 700), (40, 20, 130, 700)]
)
def test_the_same_bits_for_any_number_of_threads(heads: int, kv_heads: int, queries: int, keys: int) -> None:
    """Few key heads, which threads share, and many, which they do not; several chunks of rows, and spans of two blocks.
    Where a key is not finite, products are added up in another way."""
    rng = np.random.default_rng(10)
    form = Form(batch=1, heads=heads, kv_heads=kv_heads, queries=queries, keys=keys, attrs={"sparse_mode": 3})
    inputs = form.inputs(rng) | {"atten_mask": TRIANGLE, "sink": np.ones(heads, np.float32)}
    given, attrs = backward(inputs, form.all_attrs, rng)
    given["key"][..., -1, :] = np.inf  # seen by the last row
    alone = _session(form, given, attrs, 1).run(None, given)
    for threads in (2, 5):
        session = _session(form, given, attrs, threads)
        for _ in range(2):
            for got, want in zip(session.run(None, given), alone, strict=True):
                np.testing.assert_array_equal(got, want)


@PEAK_MEMORY
def test_memory_does_not_grow_with_the_square_of_the_length() -> None:
    """At 8192 x 8192 the scores of two heads alone would take 512 MiB. In a process of its own: peak memory only
    ever rises."""
    code = """
import resource
import numpy as np
from fa_compiler import ops

def run(length):
    x = np.ones((1, 2, length, 16), np.float32)
    statistic = np.ones((1, 2, length, 8), np.float32)
    inputs = dict(query=x, key=x, value=x, dy=x, attention_in=x, softmax_max=statistic, softmax_sum=statistic)
    ops.run("FlashAttentionScoreGrad", inputs, {"head_num": 2, "input_layout": "BNSD"}, ["dq", "dk", "dv"])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

run(64)
before = run(64)
print((run(8192) - before) // 1024)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment, cwd=ROOT
    )
    # The tensors (ten of 1 MiB), sums of keys and rows (4 MiB) and the workers' memory (2 MiB each), some times over.
    assert int(result.stdout) < 96
