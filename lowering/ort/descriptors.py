"""Writes csrc/descriptors.inc: the typed operator descriptors that the custom-op library registers.

ONNX Runtime finds a custom operator's kernel by the types of its inputs, so every legal combination is a
descriptor of its own; the registry knows them. The result is kept in the tree (a build needs no Python package
but the build tools) and a test tells when it is out of date:

    python -m fa_compiler.lowering.ort.descriptors
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from fa_compiler.lowering import OPERATORS
from fa_compiler.lowering.ort.list_descriptors import ROWS, Row, row_of
from fa_compiler.op_registry import Kind, OpSpec, OutputSpec, extensions, get, variants

PATH = Path(__file__).parent / "csrc" / "descriptors.inc"

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

_REORDERED = ("opdef_2026_reordered",)

# The products whose registered combinations are the widest, the first of which they are known; those of FP8 types have
# no CPU kernel.
_PRODUCTS = ("ascend910_95", "ascend910b")

_HALFS = ("DT_FLOAT16", "DT_BF16")


def combinations(spec: OpSpec) -> tuple[dict[str, str], ...]:
    """Legal types of every input and output, by name, as far as the CPU kernels take them."""
    products = [found for soc in _PRODUCTS if (found := spec.product(soc)) is not None]
    product = next((found for found in products if found.combinations()), None)
    if product is None:
        raise ValueError(f"{spec.name}: the registry has no type combinations of {', '.join(_PRODUCTS)}")
    tensors = (*spec.inputs, *spec.outputs)
    alone = {tensor.name: tensor.dtypes[0] for tensor in tensors if product.types_of(tensor.name) is None}
    rows = [{**alone, **row} for row in product.combinations()]
    if extensions.takes_float(spec.name):
        single = {name: "DT_FLOAT" if dtype in _HALFS else dtype for name, dtype in rows[0].items()}
        rows += [*_with_float_weights(spec, rows), single]
    return tuple(row for row in rows if all(dtype in _ELEMENTS for dtype in row.values()))


def _with_float_weights(spec: OpSpec, rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """The rows again, with FLOAT for the weights of the index heads where the prototype has it beside half queries."""
    names = [tensor.name for tensor in (*spec.inputs, *spec.outputs) if {"DT_FLOAT", *_HALFS} <= set(tensor.dtypes)]
    return [{**row, **dict.fromkeys(names, "DT_FLOAT")} for row in rows] if names else []


def rows_of(spec: OpSpec, outputs: tuple[OutputSpec, ...], places: int) -> tuple[Row, ...]:
    """What the operator is registered with: `places` inputs, those the variant does not have absent, and `outputs`."""
    if spec.name in ROWS:
        return ROWS[spec.name]()
    return tuple(
        row_of(
            tuple(_ELEMENTS[row[tensor.name]] for tensor in spec.inputs),
            places,
            *(_ELEMENTS[row.get(tensor.name, tensor.dtypes[0])] for tensor in outputs),
        )
        for row in combinations(spec)
    )


def registered(op_type: str) -> tuple[OpSpec, ...]:
    """The newest variant of the operator, and those that have its inputs in another order.

    ONNX Runtime tells them apart by their types and wants all of one name to have as many inputs and outputs, the same
    of them required.
    """
    newest = get(op_type)
    return (newest, *(found for found in variants(op_type) if found.variant in _REORDERED))


def render() -> str:
    """The text of csrc/descriptors.inc."""
    lines = [
        "// Written by lowering/ort/descriptors.py from the operator registry; do not edit.",
        "// clang-format off",
    ]
    for spec in (spec for op_type in OPERATORS for spec in registered(op_type)):
        same = registered(spec.name)
        name = _snake(spec.name) + ("" if spec is same[0] else f"_{spec.variant}")
        lines += ["", f"namespace {name} {{", f'inline constexpr const char* kName = "{spec.name}";']
        for what, tensors in (("Input", spec.inputs), ("Output", spec.outputs)):
            names = ", ".join(f'"{tensor.name}"' for tensor in tensors)
            lines += [f"inline constexpr const char* k{what}s[] = {{{names}}};", f"enum {what} : size_t {{"]
            lines += [f"  {what.lower()}_{tensor.name}," for tensor in tensors] + ["};"]
        required = min(sum(tensor.kind is not Kind.OPTIONAL for tensor in each.inputs) for each in same)
        outputs = max((each.outputs for each in same), key=len)
        rows = rows_of(spec, outputs, max(len(each.inputs) for each in same))
        lines.append(f"inline constexpr size_t kRequiredInputs = {required};")
        lines.append(f"inline constexpr size_t kInputCount = {len(rows[0].inputs)};")
        lines.append(f"inline constexpr size_t kOutputCount = {len(rows[0].outputs)};")
        lines.append("inline constexpr Types kTypes[] = {")
        for row in rows:
            lines.append(f"  {{{', '.join(f'{{{_elements(part)}}}' for part in row)}}},")
        lines += ["};", f"}}  // namespace {name}"]
    return "\n".join(lines) + "\n"


def _elements(part: tuple[str, ...]) -> str:
    return ", ".join(f"E::{element}" for element in part)


def _snake(name: str) -> str:
    return re.sub("(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def main() -> int:
    """Writes the file in the checkout this module lies in."""
    PATH.write_text(render())
    print(PATH)
    return 0


if __name__ == "__main__":
    sys.exit(main())
