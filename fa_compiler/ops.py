"""One operator at a time, eagerly, on the CPU kernel.

out = fa_compiler.ops.run(
    "FlashAttentionScore",
    {"query": q, "key": k, "value": v},
    {"head_num": 12, "input_layout": "BNSD", "scale_value": 0.125},
    outputs=["attention_out"],
)["attention_out"]
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fa_compiler.lowering.ort.eager import KernelError, run

__all__ = ["KernelError", "run", "statistics_from_aclnn"]


def statistics_from_aclnn(
    statistics: npt.NDArray[Any], softmax_in_layout: str, input_layout: str = "TND"
) -> npt.NDArray[Any]:
    """softmax_max or softmax_sum for FlashAttentionScoreGrad, as it has to be for the same softmax_in_layout of the
    operator, from what aclnnFlashAttentionUnpaddingScoreGradV4 or V5 takes.

    The two mean different things by "same_as_input" in TND: aclnn takes a true [T,N,8] and transposes it, the operator
    takes [N,T,8]. By "" both mean the blocks [N,S_b,8] of all batches behind one another, declared as [T,N,8], and
    other layouts have [B,N,S,8] in any case.
    """
    if softmax_in_layout not in ("", "same_as_input"):
        raise ValueError(f"softmax_in_layout is {softmax_in_layout!r}, expected '' or 'same_as_input'")
    if input_layout != "TND" or not softmax_in_layout:
        return statistics
    if statistics.ndim != 3:
        raise ValueError(f"the statistics have the shape {statistics.shape}, expected [T,N,8]")
    return np.ascontiguousarray(statistics.transpose(1, 0, 2))
