"""The operators of the domain "ascend": a node already has the form of its REG_OP."""

from __future__ import annotations

from collections.abc import Sequence

from fa_compiler.lowering.ascend.convert.emit import Input, Tensor, Type
from fa_compiler.lowering.ascend.convert.errors import CannotMapError
from fa_compiler.lowering.ascend.convert.forward.onnx_call import HANDLERS, OnnxCall
from fa_compiler.lowering.ascend.graph import ge_shape
from fa_compiler.op_registry import DOMAIN, dtypes, full_attrs, get, names
from fa_compiler.op_registry.errors import RegistryError
from fa_compiler.op_registry.infer import can_infer, infer
from fa_compiler.op_registry.node import TensorInfo, bind_inputs
from fa_compiler.passes.ir.nodes import attribute_values
from fa_compiler.passes.rewrite.node_view import node_view


def _fused(call: OnnxCall) -> Sequence[Tensor]:
    """The inputs in REG_OP order, and every attribute. An input that is read at compile time is a
    constant."""
    spec = get(call.node.op_type)
    given = attribute_values(call.node)
    try:
        bound = bind_inputs(spec, list(call.inputs), given)
        attrs = full_attrs(spec, given)
    except RegistryError as error:
        raise CannotMapError(str(error)) from None
    extra = [name for name in attrs if name not in spec.attr_names and not name.endswith("_count")]
    if extra:
        raise CannotMapError(
            f"the attribute {extra[0]} is for ONNX Runtime only", 'optimise with target "ascend"'
        )
    for entry in spec.inputs:
        value = bound[entry.name]
        if entry.value_depend is not None and isinstance(value, Tensor):
            bound[entry.name] = _constant(call, value)
    inputs: list[Input] = [bound[entry.name] for entry in spec.inputs]
    full = {name: attrs[name] for name in spec.attr_names}
    return call.emitter.ops(spec.name, *inputs, outs=_outputs(call), **full)[
        : len(call.node.outputs)
    ]


def _constant(call: OnnxCall, tensor: Tensor) -> Tensor:
    """An input that the operator reads at compile time if it can: a constant, if its value is
    known."""
    array = call.array(next(place for place, given in enumerate(call.inputs) if given is tensor))
    return tensor if array is None else call.emitter.const(array, tensor.dtype)


def _outputs(call: OnnxCall) -> list[Type]:
    """The types of all outputs of the prototype, also of unread ones: GE has a descriptor for
    each."""
    spec = get(call.node.op_type)
    known = [
        call.out(index) if value.name else None for index, value in enumerate(call.node.outputs)
    ]
    inferred: dict[str, TensorInfo] = {}
    if can_infer(spec.name):
        view = node_view(call.node, call.info)
        inferred = infer(spec.name, view.inputs, view.attrs)
    types: list[Type] = []
    for index, name in enumerate(spec.output_names):
        found = inferred.get(name)
        if found is not None and found.dtype:
            types.append(Type(dtypes.canonical(found.dtype), ge_shape(found.shape)))
        elif index < len(known) and (declared := known[index]) is not None:
            types.append(declared)
        else:
            raise CannotMapError(f"the type and shape of its output {name} are not known")
    return types


HANDLERS.update({(DOMAIN, op_type): _fused for op_type in names()})
