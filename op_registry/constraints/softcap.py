"""The attribute cpu_softcap of the CPU kernels (EXT-SOFTCAP), which several operators have."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fa_compiler.op_registry.constraints.core import CheckedNode
from fa_compiler.op_registry.diagnostic import Diagnostic

SMALLEST_SOFTCAP, LARGEST_SOFTCAP = 1e-6, 1e6


def softcap(call: CheckedNode, bias: str | None = None) -> Iterator[Diagnostic]:
    """cpu_softcap is 0 or in the range in which the kernels compute it exactly enough. Beside it,
    the input `bias` is added after the scale, because it is added after the cap.

    Attributes are float32: a number too small for it is 0. The kernels multiply by scale_value /
    cpu_softcap, which has to be a normal float32, or 0.
    """
    with np.errstate(over="ignore"):
        cap = float(np.float32(call.attrs.get("cpu_softcap", 0.0)))
        scale = float(np.float32(call.attr("scale_value")))
    if cap == 0.0:
        return
    if not np.float32(SMALLEST_SOFTCAP) <= cap <= np.float32(LARGEST_SOFTCAP):
        message = f"cpu_softcap is {cap:g}, expected 0 or a number from {SMALLEST_SOFTCAP:g} to {LARGEST_SOFTCAP:g}"
        yield Diagnostic("cpu_softcap", message)
        return
    smallest, largest = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
    if scale != 0.0 and not smallest <= abs(scale) / cap <= largest:
        message = f"scale_value is {scale:g} beside a cpu_softcap of {cap:g}, expected a quotient that float32 can hold"
        yield Diagnostic("scale_value", message)
    if bias is not None and call[bias] is not None and call.attr("pse_type") == 1:
        message = (
            f"pse_type is 1 beside cpu_softcap, expected 0, 2 or 3: {bias} is added after the cap"
        )
        yield Diagnostic("pse_type", message)
