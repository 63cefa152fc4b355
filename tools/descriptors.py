"""Writes lowering/ort/csrc/descriptors.inc, which describes the operators to the custom-op library.

The file has a namespace for each operator that has a CPU kernel. It holds

- the names of the inputs and outputs;
- the typed descriptors that the library registers;
- the attributes with their defaults (`attr::scale_value`);
- the numbers of the constraints, by the names of their rules (`rule::heads`).

ONNX Runtime finds a custom operator's kernel by the types of its inputs, so each legal combination of types has its own
descriptor. The file is in the repository, so that a build needs no Python packages except the build tools. A test fails
if the file is out of date. This command writes it:

    python -m tools.descriptors
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fa_compiler.op_registry import Kind, Operator, OpSpec, OutputSpec, names, operator
from fa_compiler.op_registry.attributes import extra_attrs
from fa_compiler.op_registry.cpu_kernel import TypeRow, type_row
from fa_compiler.op_registry.registry import takes_float

PATH = Path(__file__).parents[1] / "lowering" / "ort" / "csrc" / "descriptors.inc"

# GE type -> ort::Element of the types the kernels compute with.
_ELEMENTS = {
    "DT_FLOAT": "float32",
    "DT_FLOAT16": "float16",
    "DT_BF16": "bfloat16",
    "DT_BOOL": "boolean",
    "DT_UINT8": "uint8",
    "DT_INT32": "int32",
    "DT_INT64": "int64",
}

# The products with the widest combinations of types. Those of the first product that has any are registered, except
# combinations with FP8 types, which have no CPU kernel.
_PRODUCTS = ("ascend910_95", "ascend910b", "ascend950")

_HALFS = ("DT_FLOAT16", "DT_BF16")


def combinations(spec: OpSpec) -> tuple[dict[str, str], ...]:
    """The legal types of every input and output, by name. Raises ValueError if the registry has none.

    Combinations with types that the CPU kernels do not take are left out.
    """
    products = [found for soc in _PRODUCTS if (found := spec.product(soc)) is not None]
    product = next((found for found in products if found.combinations()), None)
    if product is None:
        raise ValueError(f"{spec.name}: the registry has no type combinations of {', '.join(_PRODUCTS)}")
    tensors = (*spec.inputs, *spec.outputs)
    only_types = {tensor.name: tensor.dtypes[0] for tensor in tensors if product.types_of(tensor.name) is None}
    rows = [{**only_types, **row} for row in product.combinations()]
    if takes_float(spec.name):
        single = {name: "DT_FLOAT" if dtype in _HALFS else dtype for name, dtype in rows[0].items()}
        rows += [*_with_float_weights(spec, rows), single]
    return tuple(row for row in rows if all(dtype in _ELEMENTS for dtype in row.values()))


def _with_float_weights(spec: OpSpec, rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """The rows with FLOAT for the weights of the index heads, if the prototype allows it with half queries."""
    names = [tensor.name for tensor in (*spec.inputs, *spec.outputs) if {"DT_FLOAT", *_HALFS} <= set(tensor.dtypes)]
    return [{**row, **dict.fromkeys(names, "DT_FLOAT")} for row in rows] if names else []


def rows_of(spec: OpSpec, outputs: tuple[OutputSpec, ...], input_count: int) -> tuple[TypeRow, ...]:
    """The type combinations that the operator is registered with.

    Each has `input_count` inputs and the given outputs. Inputs that the variant does not have are absent.
    """
    kernel = operator(spec.name).kernel
    if kernel is not None and kernel.type_rows is not None:
        return kernel.type_rows()
    return tuple(
        type_row(
            tuple(_ELEMENTS[row[tensor.name]] for tensor in spec.inputs),
            input_count,
            *(_ELEMENTS[row.get(tensor.name, tensor.dtypes[0])] for tensor in outputs),
        )
        for row in combinations(spec)
    )


def registered(record: Operator) -> tuple[OpSpec, ...]:
    """The variants of an operator that the library registers: the newest one, then those with another order of inputs.

    ONNX Runtime distinguishes them by their types. All operators of one name must have the same number of inputs, of
    outputs, and of required ones among them.
    """
    *_, newest = record.variants
    reordered = () if record.kernel is None else record.kernel.reordered
    return (newest, *(found for found in record.variants if found.variant in reordered))


def render() -> str:
    """The text of csrc/descriptors.inc."""
    lines = [
        "// Written by tools/descriptors.py from the operator registry; do not edit.",
        "// clang-format off",
        "#pragma once",
    ]
    spaces = []
    for record in map(operator, names()):
        if record.kernel is None:
            continue
        for spec in registered(record):
            spaces.append(snake(spec.name) + ("" if spec is registered(record)[0] else f"_{spec.variant}"))
            body = [
                *_tensors(spec),
                *_types(record, spec),
                *_attributes(spec),
                *_rules(record),
                "MakeKernel make_kernel;",
            ]
            lines += ["", f"namespace {spaces[-1]} {{", *body, f"}}  // namespace {spaces[-1]}"]
    lines += ["", "#define FA_EACH_OPERATOR(visit) \\", *(f"  visit({space}) \\" for space in spaces), ""]
    return "\n".join(lines) + "\n"


def _tensors(spec: OpSpec) -> list[str]:
    lines = [f'inline constexpr const char* kName = "{spec.name}";']
    for what, tensors in (("Input", spec.inputs), ("Output", spec.outputs)):
        listed = ", ".join(f'"{tensor.name}"' for tensor in tensors)
        lines += [f"inline constexpr const char* k{what}s[] = {{{listed}}};", f"enum {what} : size_t {{"]
        lines += [f"  {what.lower()}_{tensor.name}," for tensor in tensors] + ["};"]
    return lines


def _types(record: Operator, spec: OpSpec) -> list[str]:
    variants = registered(record)
    required = min(sum(tensor.kind is not Kind.OPTIONAL for tensor in variant.inputs) for variant in variants)
    outputs = max((variant.outputs for variant in variants), key=len)
    rows = rows_of(spec, outputs, max(len(variant.inputs) for variant in variants))
    output = None if record.kernel is None else record.kernel.required_output
    return [
        f"inline constexpr size_t kRequiredInputs = {required};",
        f"inline constexpr size_t kRequiredOutput = {'kNoOutput' if output is None else f'output_{output}'};",
        f"inline constexpr size_t kInputCount = {len(rows[0].inputs)};",
        f"inline constexpr size_t kOutputCount = {len(rows[0].outputs)};",
        "inline constexpr Types kTypes[] = {",
        *(f"  {{{', '.join(f'{{{_elements(part)}}}' for part in row)}}}," for row in rows),
        "};",
    ]


def _attributes(spec: OpSpec) -> list[str]:
    """Every attribute with its default. A required attribute has none."""
    lines = ["namespace attr {"]
    for entry in (*spec.attrs, *extra_attrs(spec).values()):
        cpp, nothing, literal = _ATTRIBUTES[entry.type]
        value = f"{nothing}, true" if entry.required else literal(entry.value_if_absent)
        lines.append(f'inline constexpr Attribute<{cpp}> {entry.name}{{"{entry.name}", {value}}};')
    return [*lines, "}"]


def _rules(record: Operator) -> list[str]:
    """The number of each constraint, by the name of its rule."""
    prefix, table = record.rules.prefix, sorted(record.rules.table.items())
    constants = (f'inline constexpr Rule {rule.name}{{"{prefix}", {number}}};' for number, rule in table)
    return ["namespace rule {", *constants, "}"]


def _float(value: Any) -> str:
    if math.isfinite(value):
        return f"{value!r}f"
    return "-__builtin_inff()" if value < 0 else "__builtin_inff()"


# For each type of attribute: its type in C++, a value for required attributes, and the function that writes a default.
_ATTRIBUTES: Mapping[str, tuple[str, str, Callable[[Any], str]]] = {
    "Int": ("int64_t", "0", str),
    "Float": ("float", "0.0f", _float),
    "Bool": ("bool", "false", lambda value: "true" if value else "false"),
    "String": ("const char*", '""', lambda value: f'"{value}"'),
}


def _elements(part: tuple[str, ...]) -> str:
    return ", ".join(f"E::{element}" for element in part)


def snake(name: str) -> str:
    """The name of an operator's namespace and of its files: attention_update for AttentionUpdate."""
    return re.sub("(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def main() -> int:
    """Write the file into the checkout that contains this module."""
    PATH.write_text(render(), encoding="utf-8", newline="\n")
    print(PATH)
    return 0


if __name__ == "__main__":
    sys.exit(main())
