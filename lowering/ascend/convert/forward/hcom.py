"""The operators that talk to other ranks (op_registry/hcom.py): a node already has the form of its
REG_OP.

`to_ge` puts them into one order by control edges.
"""

from __future__ import annotations

from collections.abc import Sequence

from fa_compiler.lowering.ascend.convert.emit import Tensor
from fa_compiler.lowering.ascend.convert.errors import CannotMapError
from fa_compiler.lowering.ascend.convert.forward.onnx_call import OnnxCall, handles
from fa_compiler.op_registry import DOMAIN, dtypes, hcom
from fa_compiler.passes.ir.nodes import attribute_values


@handles(*hcom.OPERATORS, domain=DOMAIN)
def _message(call: OnnxCall) -> Sequence[Tensor]:
    attrs = attribute_values(call.node)
    if "dtype" in attrs:
        dtype = dtypes.from_onnx(int(attrs["dtype"]))
        if dtype is None:
            raise CannotMapError(f"GE has no type for number {attrs['dtype']} of ONNX")
        attrs["dtype"] = dtype
    outs = [call.out(index) for index in range(len(call.node.outputs))]
    return call.emitter.ops(call.node.op_type, *call.inputs, outs=outs, **attrs)
