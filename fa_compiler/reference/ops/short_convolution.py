"""ShortConvolution: a convolution of each channel with the last K tokens.

    out[t] = activation(bias + sum over j < K of weight[j] in[t - (K - 1) + j])

Tokens before the first one are those of past_state, or 0. silu(x) is x / (1 + e^-x).
"""

from __future__ import annotations

import numpy as np

from fa_compiler.reference.call import OpCall, Output, operator


@operator("ShortConvolution")
def short_convolution(call: OpCall) -> dict[str, Output]:
    """output of the shape of input, present_state [B,C,K-1]: the last K-1 columns of past_state and
    input together."""
    given, weight = call.tensor("input"), call.tensor("weight").astype(np.float64)[:, 0]
    bias, past = call.optional("bias"), call.optional("past_state")
    columns = given.astype(np.float64)
    if call.attrs["channels_last"]:
        columns = columns.swapaxes(1, 2)
    batch, channels, tokens = columns.shape
    width = weight.shape[1]
    before = np.zeros((batch, channels, width - 1)) if past is None else past.astype(np.float64)
    joined = np.concatenate([before, columns], axis=2)
    output = np.zeros_like(columns)
    for j in range(width):
        output += weight[:, j, None] * joined[:, :, j : j + tokens]
    if bias is not None:
        output += bias.astype(np.float64)[:, None]
    if call.attrs["activation"] == "silu":
        with np.errstate(over="ignore", invalid="ignore"):
            output = output / (1.0 + np.exp(-output))
    if call.attrs["channels_last"]:
        output = output.swapaxes(1, 2)
    return {
        "output": Output(output, given.dtype),
        "present_state": Output(joined[:, :, tokens:], given.dtype),
    }
