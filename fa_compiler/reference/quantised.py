"""The arithmetic of quantised calls: scales, products of integers, and INT8 results."""

from __future__ import annotations

import numpy as np

from fa_compiler.reference.call import Array, Floats, OpCall

FLOATS = ("float16", "bfloat16", "float32", "float64")


def number(call: OpCall, name: str) -> float:
    """The only number of a tensor. A UINT64 holds the bits of a float32 in its lower half.

    Raises:
        ReferenceInputError: the tensor does not have the shape [1], or is neither float32 nor
            uint64.
    """
    tensor = call.tensor(name)
    if tensor.size != 1:
        raise call.error(name, f"shape {list(tensor.shape)} is not [1]")
    if tensor.dtype.name not in ("float32", "float64", "uint64"):
        raise call.error(name, f"dtype {tensor.dtype} is not float32 or uint64")
    if tensor.dtype == np.uint64:
        return float(
            (tensor.reshape(1) & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.float32)[0]
        )
    return float(tensor.reshape(-1)[0])


class Integers:
    """The three scales of an INT8 query; `names` are the inputs that hold them."""

    def __init__(self, call: OpCall, names: tuple[str, str, str]) -> None:
        self.dequant_scale1, self.quant_scale1, self.dequant_scale2 = (
            number(call, name) for name in names
        )

    def rounded(self, weights: Floats) -> Floats:
        """The INT8 numbers that are multiplied with the values, from exp(S - max)."""
        result: Floats = np.clip(np.rint(weights * self.quant_scale1), -128, 127)
        return result


def channels(call: OpCall, name: str, heads: int, width: int) -> Array | None:
    """quant_scale2 or quant_offset2 as [1,1] or [N1,D] in float64; None if it is absent."""
    tensor = call.optional(name)
    if tensor is None:
        return None
    if tensor.dtype.name not in FLOATS:
        raise call.error(name, f"dtype {tensor.dtype} is not one of {', '.join(FLOATS)}")
    if tensor.size not in (1, heads * width):
        raise call.error(name, f"has {tensor.size} numbers, expected 1 or {heads * width}")
    return tensor.astype(np.float64).reshape((1, 1) if tensor.size == 1 else (heads, width))


def saturated(results: Floats) -> Floats:
    """The results rounded to INT8 with ties to even. NaN becomes -128, as in ONNX Runtime's
    QuantizeLinear."""
    return np.clip(np.rint(np.where(np.isnan(results), -128, results)), -128, 127)
