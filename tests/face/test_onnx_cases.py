"""ONNX's own test cases of Attention and FlexAttention, through each target that ONNX Runtime runs on the CPU.

Each case is there as the operator and as the function body that ONNX gives for it (`_expanded`). It is converted, and
gives the numbers that ONNX expects, or it is declined for the reason that the table below expects of its feature.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import TensorProto

import fa_compiler
from fa_compiler.passes.answer.options import Target
from tests.passes.running import run
from tests.widening import widened

TARGETS: Mapping[str, tuple[Target, str | None]] = {
    "ort": ("ort", None),
    "onnx": ("onnx", None),
    "onnx for ONNX Runtime": ("onnx", "ort-cpu"),
    "contrib": ("contrib", "ort-cpu"),
}
READ = {
    r"qk_matmul_softmax|mode3|window_gqa_rank4_mask": "probabilities_are_output",
    r"qk_matmul": "scores_are_output",
    r"double": "dtype",
}
"""What no operator of a target gives beside its result, or takes."""
OPERATOR = r"^attention(?!\w*_expanded)"
OPEN_MASK = r"^(?!\w*(bool|nonpad|causal_with))\w*(past_and_present|attn_mask|padded_kv|neginf|ext_cache)\w*_expanded"
"""A float mask is an input of the model: it may hold the lowest number in a whole row, which ONNX Runtime's Attention
takes for a row without keys."""
DECLINED: Mapping[str, Mapping[str, str]] = {
    "ort": {**READ, r"4d_gqa_with_past_and_present_fp16$": "mask_value"},
    "onnx": {OPERATOR: "already_fused", **READ, OPEN_MASK: "empty_rows"},
    "onnx for ONNX Runtime": {
        OPERATOR: "already_fused",
        **READ,
        OPEN_MASK: "empty_rows",
        r"flexattention|window": "runtime",  # opset 25 and later: no kernel
    },
    "contrib": {
        **READ,
        r"4d_gqa_with_past_and_present_fp16$": "mask_value",
        r"softcap": "runtime",  # other numbers of keys than of queries
        r"(with_past_and_present_fp16|(padded_kv|attn_mask_causal)_bf16|float16_mask)_expanded": "empty_rows",
    },
}
"""For each target the reason why cases of such names are declined. The first pattern that is found counts."""


@functools.cache
def cases() -> dict[str, Any]:
    """The test cases by their names, without the prefix "test_". onnx makes those of an operator when its module is
    imported: those of all operators take five seconds."""
    from onnx.backend.test.case.node import _NodeTestCases, attention, flexattention  # noqa: F401

    found = {case.name.removeprefix("test_"): case for case in _NodeTestCases}
    return {name: case for name, case in found.items() if re.match("(flex)?attention", name)}


@pytest.mark.parametrize("kind", TARGETS)
def test_cases(kind: str) -> None:
    """All cases in one test: a process makes all to have one, which takes a second."""
    found = {name: _fault(name, case, kind) for name, case in cases().items()}
    assert not {name: fault for name, fault in found.items() if fault is not None}
    assert len(found) >= 200


def _fault(name: str, case: Any, kind: str) -> str | None:
    """What is wrong with a case that is converted for the target `kind`."""
    target, runtime = TARGETS[kind]
    expected = next((code for pattern, code in DECLINED[kind].items() if re.search(pattern, name)), "fused")
    result = fa_compiler.optimize(case.model, target=target, runtime=runtime)
    (block,) = result.report.blocks
    found = "fused" if block.status == "fused" else str(block.code)
    if found != expected:
        return f"{found} instead of {expected}: {block.reason}"
    return _difference(case, result.model, target, runtime) if found == "fused" else None


def _difference(case: Any, fused: onnx.ModelProto, target: Target, runtime: str | None) -> str | None:
    """How the result of a converted case differs from what ONNX expects. ONNX Runtime's CPU kernels have no
    bfloat16: of such a model the twin in float32 is converted."""
    model = case.model
    if any(each.type.tensor_type.elem_type == TensorProto.BFLOAT16 for each in model.graph.input):
        model = widened(model, TensorProto.BFLOAT16)
        fused = fa_compiler.optimize(model, target=target, runtime=runtime).model
    onnx.checker.check_model(fused)
    for inputs, outputs in case.data_sets:
        arrays = [np.asarray(each) for each in inputs]
        wide = [each.astype(np.float32) if each.dtype.name == "bfloat16" else each for each in arrays]
        feeds = {value.name: array for value, array in zip(model.graph.input, wide, strict=True)}
        for place, (got, wanted) in enumerate(zip(run(fused, feeds), outputs, strict=True)):
            if not _near(np.asarray(got), np.asarray(wanted)):
                return f"output {place} differs"
    return None


def _near(got: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> bool:
    """Do they agree but for some roundings of the expected type, of 2**-9 each in bfloat16 and 2**-12 in float16?"""
    tolerance = {"bfloat16": 2.0**-6, "float16": 2.0**-8}.get(wanted.dtype.name, 1e-5)
    left, right = got.astype(np.float64), wanted.astype(np.float64)
    return left.shape == right.shape and np.allclose(left, right, rtol=tolerance, atol=tolerance, equal_nan=True)
