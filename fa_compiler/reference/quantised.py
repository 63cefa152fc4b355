"""Numbers of quantised calls: scales, products of integers, and INT8 results."""

from __future__ import annotations

import numpy as np

from fa_compiler.reference.call import Array, Call, Floats

FLOATS = ("float16", "bfloat16", "float32", "float64")


def number(call: Call, name: str) -> float:
    """The only number of a tensor; a UINT64 holds the bits of a float32 in its lower half."""
    tensor = call.tensor(name)
    if tensor.size != 1:
        raise call.error(name, f"shape {list(tensor.shape)} is not [1]")
    if tensor.dtype.name not in ("float32", "float64", "uint64"):
        raise call.error(name, f"dtype {tensor.dtype} is not float32 or uint64")
    if tensor.dtype == np.uint64:
        return float((tensor.reshape(1) & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.float32)[0])
    return float(tensor.reshape(-1)[0])


class Integers:
    """The three scales of an INT8 query, by the names that the operator has for them."""

    def __init__(self, call: Call, names: tuple[str, str, str]) -> None:
        self.dequant_scale1, self.quant_scale1, self.dequant_scale2 = (number(call, name) for name in names)

    def rounded(self, weights: Floats) -> Floats:
        """exp(S - max) as the INT8 that are multiplied with the values."""
        result: Floats = np.clip(np.rint(weights * self.quant_scale1), -128, 127)
        return result


def channels(call: Call, name: str, heads: int, width: int) -> Array | None:
    """quant_scale2 or quant_offset2 as [1,1] or [N1,D] in float64; None where it is absent."""
    tensor = call.optional(name)
    if tensor is None:
        return None
    if tensor.dtype.name not in FLOATS:
        raise call.error(name, f"dtype {tensor.dtype} is not one of {', '.join(FLOATS)}")
    if tensor.size not in (1, heads * width):
        raise call.error(name, f"has {tensor.size} numbers, expected 1 or {heads * width}")
    return tensor.astype(np.float64).reshape((1, 1) if tensor.size == 1 else (heads, width))


def saturated(results: Floats) -> Floats:
    """Rounded to INT8, ties to even; what is not a number becomes -128, as ONNX Runtime's QuantizeLinear has it."""
    return np.clip(np.rint(np.where(np.isnan(results), -128, results)), -128, 127)
