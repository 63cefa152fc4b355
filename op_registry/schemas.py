"""ONNX schemas of the operators, so that ONNX's checker and shape inference know the fused nodes.

An ONNX schema cannot express an operator with a dynamic input. The schema of such an operator names
the inputs before the dynamic one and declares the rest as one variadic input of any types, which
`verify` then checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import onnx
import onnx.defs
from onnx.defs import OpSchema

from fa_compiler.op_registry import documentation, dtypes
from fa_compiler.op_registry.attributes import extra_attrs
from fa_compiler.op_registry.errors import RegistryError
from fa_compiler.op_registry.infer import infer
from fa_compiler.op_registry.node import Dim, TensorInfo, bind_inputs
from fa_compiler.op_registry.registry import (
    DOMAIN,
    FILE_DOMAIN,
    FILE_OPS,
    GRAPH_OP,
    VERSION,
    get,
    names,
    takes_float,
)
from fa_compiler.op_registry.spec import AttrSpec, Kind, OpSpec, OutputSpec

_ATTR_TYPES = {
    "Int": OpSchema.AttrType.INT,
    "Float": OpSchema.AttrType.FLOAT,
    "Bool": OpSchema.AttrType.INT,
    "String": OpSchema.AttrType.STRING,
    "ListInt": OpSchema.AttrType.INTS,
}


CAN_INFER = tuple(int(part) for part in onnx.__version__.split(".")[:2]) >= (1, 20)
"""Whether the installed onnx supports shape inference written in Python: 1.17 and 1.18 drop its
results, and 1.19 waits for the interpreter lock forever. Without it, outputs have the types and
shapes that their value_info states."""


def register() -> None:
    """Registers the schemas with onnx, with shape inference if `CAN_INFER`. Further calls do
    nothing.

    Raises RegistryError if another package has registered one of the operators under this domain
    differently.
    """
    every = [(name, build_schema(get(name))) for name in names()]
    in_files = build_schema(get(GRAPH_OP), FILE_DOMAIN)
    every += [(GRAPH_OP, _renamed(in_files, name)) for name in FILE_OPS]
    for op, schema in every:
        name, domain = schema.name, schema.domain
        if onnx.defs.has(name, domain):
            _check_same(onnx.defs.get_schema(name, VERSION, domain), schema)
            continue
        if CAN_INFER:
            schema.set_type_and_shape_inference_function(partial(_infer, op, domain))
        onnx.defs.register_schema(schema)


def build_schema(spec: OpSpec, domain: str = DOMAIN) -> OpSchema:
    """The schema of a prototype, under its own name. It is not registered and has no shape
    inference.

    That of FILE_DOMAIN has attention_out as its only output.
    """
    constraints: dict[str, tuple[str, list[str], str]] = {}

    def type_of(name: str, legal: tuple[str, ...]) -> str:
        if takes_float(spec.name) and {"DT_FLOAT16", "DT_BF16"} <= set(legal):
            legal = tuple(dict.fromkeys((*legal, "DT_FLOAT")))
        variable = f"T_{name}"
        constraints[variable] = (variable, _type_strings(legal), f"types of {name}")
        return variable

    inputs: list[OpSchema.FormalParameter] = []
    for entry in spec.inputs:
        if entry.kind is Kind.DYNAMIC:
            constraints["T_tail"] = (
                "T_tail",
                _type_strings(tuple(t.ge for t in dtypes.TABLE)),
                "any type",
            )
            description = ", ".join(spec.input_names[len(inputs) :])
            inputs.append(
                _formal("tail", "T_tail", description, _Options.Variadic, homogeneous=False)
            )
            break
        kind = _Options.Single if entry.kind is Kind.REQUIRED else _Options.Optional
        inputs.append(
            _formal(
                entry.name,
                type_of(entry.name, spec.legal_types(entry.name)),
                documentation.of_input(spec, entry),
                kind,
            )
        )
    outputs = [
        _formal(
            entry.name,
            type_of(f"out_{entry.name}", spec.legal_types(entry.name)),
            documentation.of_output(spec, entry),
            _Options.Optional,
        )
        for entry in _outputs(spec, domain)
    ]
    return OpSchema(
        spec.name,
        domain,
        VERSION,
        doc=documentation.of_operator(spec),
        inputs=inputs,
        outputs=outputs,
        type_constraints=list(constraints.values()),
        attributes=[
            _attribute(spec, entry) for entry in (*spec.attrs, *extra_attrs(spec).values())
        ],
    )


def _renamed(schema: OpSchema, name: str) -> OpSchema:
    """The same schema under another name. This takes a tenth of the time that building it takes."""
    types = [
        (constraint.type_param_str, constraint.allowed_type_strs, constraint.description)
        for constraint in schema.type_constraints
    ]
    return OpSchema(
        name,
        schema.domain,
        schema.since_version,
        doc=schema.doc or "",
        inputs=schema.inputs,
        outputs=schema.outputs,
        type_constraints=types,
        attributes=list(schema.attributes.values()),
    )


def _outputs(spec: OpSpec, domain: str) -> tuple[OutputSpec, ...]:
    return spec.outputs if domain == DOMAIN else (spec.output("attention_out"),)


_Options = OpSchema.FormalParameterOption


def _formal(
    name: str,
    type: str,
    description: str,
    option: OpSchema.FormalParameterOption,
    homogeneous: bool = True,
) -> OpSchema.FormalParameter:
    return OpSchema.FormalParameter(
        name, type, description, param_option=option, is_homogeneous=homogeneous, min_arity=1
    )


def _attribute(spec: OpSpec, entry: AttrSpec) -> OpSchema.Attribute:
    text = documentation.of_attribute(spec, entry)
    if entry.required:
        return OpSchema.Attribute(entry.name, _ATTR_TYPES[entry.type], text)
    value: Any = entry.value_if_absent
    default = onnx.helper.make_attribute(entry.name, int(value) if entry.type == "Bool" else value)
    return OpSchema.Attribute(entry.name, default, text)


def _type_strings(legal: tuple[str, ...]) -> list[str]:
    """ONNX type strings of GE types. Types that the installed version of onnx does not have are
    left out."""
    known = {number for _, number in onnx.TensorProto.DataType.items()}
    rows = (dtypes.lookup(name) for name in legal)
    return [f"tensor({row.onnx_name})" for row in rows if row.onnx in known]


def _check_same(found: OpSchema, ours: OpSchema) -> None:
    def facts(schema: OpSchema) -> object:
        parameters = [(p.name, p.option) for p in (*schema.inputs, *schema.outputs)]
        return parameters, sorted(schema.attributes)

    if facts(found) != facts(ours):
        name = f"{ours.name} in the ONNX domain {ours.domain!r}"
        raise RegistryError(f"another package has registered {name} differently")


def _infer(op_type: str, domain: str, context: Any) -> None:
    """Shape inference as onnx calls it. A type or shape that cannot be inferred stays open;
    `verify` reports what is wrong."""
    spec = get(op_type)
    types = [context.get_input_type(i) for i in range(context.get_num_inputs())]
    try:
        bound = bind_inputs(spec, [_tensor_info(found) for found in types])
        inputs = {name: info for name, info in bound.items() if isinstance(info, TensorInfo)}
        inferred = infer(op_type, inputs, dict(_attributes(spec, context)))
    except RegistryError:
        return
    outputs = _outputs(spec, domain)[: context.get_num_outputs()]
    for index, name in enumerate(entry.name for entry in outputs):
        number = dtypes.to_onnx(inferred[name].dtype) if inferred[name].dtype else None
        if number is not None:
            context.set_output_type(index, _type_proto(number, inferred[name].shape))


def _attributes(spec: OpSpec, context: Any) -> Iterator[tuple[str, Any]]:
    for name in spec.attr_names:
        proto = context.get_attribute(name)
        if proto is not None:
            yield name, onnx.helper.get_attribute_value(proto)


def _tensor_info(proto: onnx.TypeProto | None) -> TensorInfo | None:
    if proto is None or not proto.HasField("tensor_type"):
        return None
    tensor = proto.tensor_type
    shape: tuple[Dim, ...] | None = None
    if tensor.HasField("shape"):
        shape = tuple(_dim(dim) for dim in tensor.shape.dim)
    return TensorInfo(dtypes.from_onnx(tensor.elem_type) or "", shape)


def _dim(dim: onnx.TensorShapeProto.Dimension) -> Dim:
    if dim.HasField("dim_value"):
        return int(dim.dim_value)
    return dim.dim_param or None


def _type_proto(number: int, shape: tuple[Dim, ...] | None) -> onnx.TypeProto:
    return onnx.helper.make_tensor_type_proto(number, shape)
