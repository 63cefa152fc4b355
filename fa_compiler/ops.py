"""Runs single operators eagerly on the CPU kernels.

    out = fa_compiler.ops.run(
        "FlashAttentionScore",
        {"query": q, "key": k, "value": v},
        {"head_num": 12, "input_layout": "BNSD", "scale_value": 0.125},
        outputs=["attention_out"],
    )["attention_out"]

`reference.run` does the same in float64.
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
    """softmax_max or softmax_sum in the order that FlashAttentionScoreGrad takes for the same
    softmax_in_layout.

    `statistics` is the tensor for aclnnFlashAttentionUnpaddingScoreGradV4 or V5. In TND,
    "same_as_input" has two meanings: aclnn takes [T,N,8] and transposes it, but the operator takes
    [N,T,8]. The meaning of "" is the same for both: the blocks [N,S_b,8] of all batches back to
    back, declared as [T,N,8]. In the other layouts both take [B,N,S,8].

    Raises:
        ValueError: softmax_in_layout is neither "" nor "same_as_input", or the shape is not
            [T,N,8].
    """
    if softmax_in_layout not in ("", "same_as_input"):
        raise ValueError(
            f"softmax_in_layout is {softmax_in_layout!r}, expected '' or 'same_as_input'"
        )
    if input_layout != "TND" or not softmax_in_layout:
        return statistics
    if statistics.ndim != 3:
        raise ValueError(f"the statistics have the shape {statistics.shape}, expected [T,N,8]")
    return np.ascontiguousarray(statistics.transpose(1, 0, 2))
