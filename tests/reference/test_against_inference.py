"""The shapes and dtypes the reference returns are those op_registry infers."""

import ml_dtypes
import numpy as np
import pytest

from fa_compiler import reference
from fa_compiler.op_registry import TensorInfo, dtypes, infer

from .naive import cumulative, to_layout


def info(tensor):
    return TensorInfo(dtypes.from_numpy(tensor.dtype), tensor.shape)


def check(op_type, inputs, attrs):
    results = reference.run(op_type, inputs, attrs)
    expected = infer(op_type, {name: info(tensor) for name, tensor in inputs.items()}, attrs)
    assert {name: info(tensor) for name, tensor in results.items()} == expected
    return results


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("layout", ["BSH", "SBH", "BSND", "BNSD", "TND"])
@pytest.mark.parametrize("optional", [False, True])
def test_shapes_and_dtypes(layout, dtype, optional):
    """B=2, N1=4, N2=2, S1=3, S2=5, D=6, Dv=4; with rope of 2, a sink and a bias, or without."""
    shapes = {"query": (4, 3, 6), "key": (2, 5, 6), "value": (2, 5, 4)}
    if optional:
        shapes |= {"query_rope": (4, 3, 2), "key_rope": (2, 5, 2)}
    inputs = {name: to_layout(np.ones((2, *shape), dtype), layout) for name, shape in shapes.items()}
    if optional:
        inputs["sink"] = np.zeros(4, np.float32)
        # Slopes want as many queries as keys, but in TND.
        inputs["real_shift"] = np.zeros(4, np.float32) if layout == "TND" else np.zeros((2, 4, 3, 5), dtype)
    if layout == "TND":
        inputs |= {"actual_seq_qlen": cumulative(3, 3), "actual_seq_kvlen": cumulative(5, 5)}
    attrs = {"head_num": 4, "input_layout": layout, "pse_type": 2 if optional and layout == "TND" else 1}
    results = check("FlashAttentionScore", inputs, attrs)
    inputs |= {name: results[name] for name in ("softmax_max", "softmax_sum")}
    inputs |= {"attention_in": results["attention_out"], "dy": results["attention_out"]}
    if optional:
        inputs["pse_shift"] = inputs.pop("real_shift")
    check("FlashAttentionScoreGrad", inputs, attrs)
