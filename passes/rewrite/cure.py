"""What the user can change where an Ascend product refuses a fused node."""

from __future__ import annotations

from dataclasses import replace

from fa_compiler.op_registry import Diagnostic, NodeView, TensorInfo, product, verify
from fa_compiler.op_registry.products import PRODUCTS

FIRST_GENERATION = "Ascend910B"


def cure(node: NodeView, target: str, cann: str | None, broken: Diagnostic) -> str | None:
    """The type or the products with which the node keeps the constraint that it breaks on `target`;
    None if there are none. They are found by trial."""
    if target == "ort":
        return None
    if _is_float32(node, broken.tensor):
        left = {
            (found.constraint, found.tensor) for found in verify(_in_float16(node), target, cann)
        }
        if (broken.constraint, broken.tensor) not in left:
            return "convert the model to float16"
    takers = [
        entry.name
        for entry in PRODUCTS
        if entry != product(target) and not verify(node, entry.name, cann)
    ]
    if not takers:
        return None
    *others, last = takers
    named = f"{', '.join(others)} and {last} take" if others else f"{last} takes"
    hint = f"{named} it: give one of their SoC versions with --soc-version"
    if target == FIRST_GENERATION:
        hint += f"; {target} without a digit is a chip of the first generation, and A2 is Ascend910B1 to Ascend910B4"
    return hint


def _is_float32(node: NodeView, name: str) -> bool:
    tensor = node.inputs.get(name)
    return isinstance(tensor, TensorInfo) and tensor.dtype == "DT_FLOAT"


def _in_float16(node: NodeView) -> NodeView:
    halved = {
        name: replace(tensor, dtype="DT_FLOAT16")
        if isinstance(tensor, TensorInfo) and tensor.dtype == "DT_FLOAT"
        else tensor
        for name, tensor in node.inputs.items()
    }
    return replace(node, inputs=halved, outputs={})
