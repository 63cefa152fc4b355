"""Checks a node against everything the registry knows of its operator and its target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fa_compiler.op_registry import extensions
from fa_compiler.op_registry.constraints import MODULES
from fa_compiler.op_registry.constraints.core import INVALID, NULLPTR, CheckedNode, Fault, Stage, text, without_empty
from fa_compiler.op_registry.errors import NodeError, suggestion
from fa_compiler.op_registry.geometry import differ
from fa_compiler.op_registry.infer import can_infer, infer
from fa_compiler.op_registry.node import NodeView, TensorInfo, attr_value, extra_attrs
from fa_compiler.op_registry.products import Product, product
from fa_compiler.op_registry.registry import get, later_attrs
from fa_compiler.op_registry.spec import Kind, OpSpec, ProductSpec

GENERIC = "G0"
"""The rule every operator has: required inputs and attributes are there, names, types and product are
known."""


@dataclass(frozen=True)
class Violation:
    """A constraint a node breaks.

    `constraint` is its number ("FA.11", or "G0" for the rule of all operators), `code` the aclnn status
    (161001 a required parameter is missing, 161002 all else), `stage` where Ascend would notice, `message`
    a sentence that names the tensor, what was found and what was expected, `tensor` that tensor or
    attribute. `extension` is the id under which the CPU kernel takes it nevertheless; a target that allows
    extensions then accepts the node.
    """

    constraint: str
    code: int
    message: str
    tensor: str
    extension: str | None = None
    stage: Stage = "aclnn"

    def __str__(self) -> str:
        return f"{self.constraint} ({self.code}): {self.message}"


def verify(node: NodeView, target: str = "ort", cann: str | None = None) -> list[Violation]:
    """Every constraint the node breaks, in the order of their numbers.

    `target` is "ort" or a product or SoC version ("A2", "Ascend910B2", "950"); `cann` chooses the variant
    of the prototype. What an extension allows is reported in both cases, with the extension's id: for "ort"
    it is for the record, for a product it is a violation. Only what is certain is reported, so a node with
    unknown or symbolic sizes may break constraints that are not found. Raises UnknownOp, UnknownVariant,
    UnknownProduct.
    """
    spec = get(node.op_type, cann)
    chip = None if target == "ort" else product(target)
    dynamic = [entry.name for entry in spec.inputs if entry.kind is Kind.DYNAMIC]
    lists = {name: _listed(node.inputs[name]) for name in dynamic if node.inputs.get(name)}
    tensors = {name: info for name, info in node.inputs.items() if isinstance(info, TensorInfo) and name not in dynamic}
    faults = list(_names_and_attrs(spec, node, chip))
    attrs, bad = _attributes(spec, node.attrs)
    module = MODULES.get(node.op_type)
    own = module.OWN_TYPES if module is not None else ()
    faults += bad
    faults += _types(spec, node, own)
    found = [_violation(GENERIC, fault) for fault in faults]
    # With an attribute missing or of a wrong type there is nothing to read the numbered rules by.
    if module is not None and all(fault.extension for fault in bad):
        call = CheckedNode(spec, tensors, node.outputs, later_attrs(spec) | attrs, chip, lists)
        if module.rules.drops_empty:
            call = without_empty(call)
        numbered = [
            _violation(f"{module.rules.prefix}.{number}", fault)
            for number, rule in sorted(module.rules.table.items())
            for fault in rule(call)
        ]
        found += numbered
    if not found:
        found += [_violation(GENERIC, fault) for fault in _outputs(node, {**tensors, **lists}, cann)]
    if not found and chip is not None:
        found += [_violation(GENERIC, fault) for fault in _product_types(spec, node, chip)]
    return found


def extensions_used(node: NodeView) -> tuple[str, ...]:
    """Ids of the extensions the node uses, in the order of the table."""
    used = {violation.extension for violation in verify(node)}
    return tuple(entry.id for entry in extensions.EXTENSIONS if entry.id in used)


def _violation(constraint: str, fault: Fault) -> Violation:
    return Violation(constraint, fault.code, fault.message, fault.tensor, fault.extension, fault.stage)


def _names_and_attrs(spec: OpSpec, node: NodeView, chip: Product | None) -> Iterator[Fault]:
    """The product has the operator; inputs and outputs have known names; required inputs are there."""
    if chip is not None and _registered(spec, chip) is None:
        yield Fault(spec.name, f"{spec.name} is not available on {chip.title}", "aclnn")
    for name in node.inputs:
        if name not in spec.input_names:
            hint = suggestion(name, spec.input_names)
            yield Fault(name, f"{spec.name} ({spec.variant}) has no input {name!r}{hint}", "aclnn")
    for name in node.outputs:
        if name not in spec.output_names:
            hint = suggestion(name, spec.output_names)
            yield Fault(name, f"{spec.name} ({spec.variant}) has no output {name!r}{hint}", "aclnn")
    for entry in spec.inputs:
        if entry.kind is not Kind.OPTIONAL and not node.inputs.get(entry.name):
            yield Fault(entry.name, f"the required input {entry.name} is absent", "aclnn", NULLPTR)
        elif entry.kind is not Kind.DYNAMIC and isinstance(node.inputs.get(entry.name), list):
            yield Fault(entry.name, f"{entry.name} is a list of tensors, expected one tensor", "aclnn")
        count = f"{entry.name}_count"
        if entry.kind is Kind.DYNAMIC and node.attrs.get(count) is not None and node.inputs.get(entry.name):
            found = len(_listed(node.inputs[entry.name]))
            if node.attrs[count] != found:
                yield Fault(count, f"{count} is {node.attrs[count]}, expected {found}, the tensors of {entry.name}")


def _attributes(spec: OpSpec, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[Fault]]:
    """Every attribute with its value or default, and what is wrong with those given."""
    values: dict[str, Any] = {}
    faults: list[Fault] = []
    extra = extra_attrs(spec)
    optional = extensions.attributes(spec.name)
    for name in given:
        if name not in spec.attr_names and name not in extra:
            hint = suggestion(name, (*spec.attr_names, *extra))
            faults.append(Fault(name, f"{spec.name} ({spec.variant}) has no attribute {name!r}{hint}", "aclnn"))
    for entry in (*spec.attrs, *extra.values()):
        value = given.get(entry.name)
        if value is None:
            if entry.required:
                message = f"the required attribute {entry.name} is absent"
                faults.append(Fault(entry.name, message, "aclnn", NULLPTR))
            values[entry.name] = entry.value_if_absent
            continue
        try:
            values[entry.name] = attr_value(spec.name, entry, value)
        except NodeError as error:
            faults.append(Fault(entry.name, str(error), "aclnn"))
            continue
        if entry.name in optional:
            faults += _extension_attr(optional[entry.name], values[entry.name])
    return values, faults


def _extension_attr(entry: extensions.Extension, value: Any) -> Iterator[Fault]:
    name = str(entry.attr)
    if entry.kind == "String" and value not in entry.values:
        allowed = ", ".join(map(repr, entry.values))
        yield Fault(name, f"{name} is {value!r}, expected one of {allowed}", "aclnn")
    else:
        yield Fault(name, f"{name} is an attribute of the CPU kernel only", "aclnn", INVALID, entry.id)


def _types(spec: OpSpec, node: NodeView, own: tuple[str, ...]) -> Iterator[Fault]:
    """Types that no product and no header has. `own` are the inputs that a numbered rule looks after."""
    for name, tensor in _each(node):
        if name in own or name not in (*spec.input_names, *spec.output_names) or not tensor.dtype:
            continue
        legal = spec.legal_types(name)
        if legal and tensor.dtype not in legal:
            yield Fault(name, f"{name} is {tensor.dtype}, expected {' or '.join(legal)}", "aclnn")


def _outputs(node: NodeView, tensors: Mapping[str, Any], cann: str | None) -> Iterator[Fault]:
    """What is stated of the outputs agrees with what follows from the inputs."""
    if not can_infer(node.op_type):
        return
    inferred = infer(node.op_type, tensors, node.attrs, cann)
    for name, stated in node.outputs.items():
        right = inferred[name]
        if stated.dtype and right.dtype and stated.dtype != right.dtype:
            yield Fault(name, f"{name} is {stated.dtype}, expected {right.dtype}", "aclnn")
        if stated.shape is None or right.shape is None:
            continue
        if len(stated.shape) != len(right.shape) or any(map(differ, stated.shape, right.shape)):
            yield Fault(name, f"{name} has the shape {text(stated.shape)}, expected {text(right.shape)}", "aclnn")


def _product_types(spec: OpSpec, node: NodeView, chip: Product) -> Iterator[Fault]:
    """The combination of types is one that is registered for the product."""
    registered = _registered(spec, chip)
    if registered is None:
        return
    present = {name: tensor.dtype for name, tensor in _each(node) if tensor.dtype and name not in registered.unchecked}
    for name, dtype in present.items():
        legal = registered.types_of(name)
        if legal and dtype not in legal:
            yield Fault(name, f"{name} is {dtype}, expected {' or '.join(legal)} on {chip.title}", "aclnn")
            return
    rows = registered.combinations()
    if rows and not any(all(row.get(name, dtype) == dtype for name, dtype in present.items()) for row in rows):
        names = [name for name in present if name in rows[0]]
        listed = ", ".join(f"{name} {present[name]}" for name in names)
        yield Fault(names[0], f"{listed} is no combination of types that {chip.title} has", "aclnn")


def _registered(spec: OpSpec, chip: Product) -> ProductSpec | None:
    specs = (spec, get(spec.name))
    return next((found for each in specs for soc in chip.socs if (found := each.product(soc)) is not None), None)


def _listed(info: TensorInfo | list[TensorInfo]) -> list[TensorInfo]:
    return [info] if isinstance(info, TensorInfo) else info


def _each(node: NodeView) -> Iterator[tuple[str, TensorInfo]]:
    for name, info in (*node.inputs.items(), *node.outputs.items()):
        for tensor in info if isinstance(info, list) else [info]:
            yield name, tensor
