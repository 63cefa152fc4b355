"""The operators that talk to other ranks: nodes of the domain "ascend" (op_registry/hcom.py).

Their order, which control edges give in GE, is the order of the nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

from fa_compiler.lowering.ascend.convert.backward.ge_call import GeCall, handles, onnx_type
from fa_compiler.op_registry import DOMAIN, hcom


@handles(*hcom.OPERATORS)
def _message(call: GeCall) -> Sequence[str]:
    attrs = {entry.name: call.attr(entry.name) for entry in call.spec.attrs}
    if "dtype" in attrs:
        attrs["dtype"] = onnx_type(attrs["dtype"])
    inputs = [call.x(entry.name) for entry in call.spec.inputs]
    return call.nodes(call.op.type, *inputs, count=len(call.spec.outputs), domain=DOMAIN, **attrs)
