"""Checks a node against everything that the registry knows about its operator and its target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from fa_compiler.op_registry.attributes import extra_attrs, known_attrs
from fa_compiler.op_registry.constraints.core import CheckedNode, Rules, text, without_empty
from fa_compiler.op_registry.diagnostic import INVALID, NULLPTR, Diagnostic
from fa_compiler.op_registry.errors import NodeError, suggestion
from fa_compiler.op_registry.extensions import EXTENSIONS, Extension
from fa_compiler.op_registry.geometry import differ
from fa_compiler.op_registry.infer import infer
from fa_compiler.op_registry.node import NodeView, TensorInfo, attr_value
from fa_compiler.op_registry.products import Product, product
from fa_compiler.op_registry.registry import extensions_of, get, later_attrs, operator
from fa_compiler.op_registry.spec import InputSpec, Kind, OpSpec, ProductSpec


def verify(node: NodeView, target: str = "ort", cann: str | None = None) -> list[Diagnostic]:
    """Every constraint that the node breaks: first the checks of every operator, then the rules in
    the order of their numbers.

    `target` is "ort" or a product or SoC version ("A2", "Ascend910B2", "950"). `cann` chooses the
    variant of the prototype. A constraint that an extension relaxes is reported on every target,
    with the id of the extension: "ort" takes such a node, a product refuses it. Only certain
    violations are reported, so a node with unknown or symbolic sizes may break constraints that are
    not found. Raises UnknownOp, UnknownVariant, UnknownProduct.
    """
    spec = get(node.op_type, cann)
    chip = None if target == "ort" else product(target)
    tensors, lists = _inputs(spec, node)
    rules = operator(node.op_type).rules
    attrs, attr_diagnostics = _attributes(spec, node.attrs)
    found = [
        *_names_and_counts(spec, node, chip),
        *attr_diagnostics,
        *_types(spec, node, rules.typed),
    ]
    # The numbered rules read attributes, so they do not run if an attribute is missing or invalid.
    if all(diagnostic.extension for diagnostic in attr_diagnostics):
        extensions = tuple(entry.id for entry in extensions_of(node.op_type))
        call = CheckedNode(
            spec, tensors, node.outputs, later_attrs(spec) | attrs, chip, lists, extensions
        )
        found += _numbered(rules, without_empty(call) if rules.drops_empty else call)
    if not found:
        found += _outputs(node, {**tensors, **lists}, cann)
    if not found and chip is not None:
        found += _product_types(spec, node, chip)
    return found


def _inputs(
    spec: OpSpec, node: NodeView
) -> tuple[dict[str, TensorInfo], dict[str, list[TensorInfo]]]:
    """The inputs of one tensor, and the lists of the dynamic inputs."""
    dynamic = [entry.name for entry in spec.inputs if entry.kind is Kind.DYNAMIC]
    lists = {name: _listed(node.inputs[name]) for name in dynamic if node.inputs.get(name)}
    tensors = {
        name: info
        for name, info in node.inputs.items()
        if isinstance(info, TensorInfo) and name not in dynamic
    }
    return tensors, lists


def _numbered(rules: Rules, call: CheckedNode) -> Iterator[Diagnostic]:
    """What the numbered rules report, in the order of their numbers."""
    for number, rule in sorted(rules.table.items()):
        for diagnostic in rule.check(call):
            yield replace(diagnostic, constraint=f"{rules.prefix}.{number}")


def extensions_used(node: NodeView) -> tuple[str, ...]:
    """Ids of the extensions the node uses, in the order of the table."""
    used = {diagnostic.extension for diagnostic in verify(node)}
    return tuple(entry.id for entry in EXTENSIONS if entry.id in used)


def _names_and_counts(spec: OpSpec, node: NodeView, chip: Product | None) -> Iterator[Diagnostic]:
    """The product has the operator, inputs and outputs have known names, required inputs are
    present, and the counts of dynamic inputs are right."""
    if chip is not None and _registered(spec, chip) is None:
        yield Diagnostic(spec.name, f"{spec.name} is not available on {chip.title}", "aclnn")
    for what, given, known in (
        ("input", node.inputs, spec.input_names),
        ("output", node.outputs, spec.output_names),
    ):
        for name in given:
            if name not in known:
                hint = suggestion(name, known)
                yield Diagnostic(
                    name, f"{spec.name} ({spec.variant}) has no {what} {name!r}{hint}", "aclnn"
                )
    for entry in spec.inputs:
        yield from _given_input(node, entry)


def _given_input(node: NodeView, entry: InputSpec) -> Iterator[Diagnostic]:
    """An input is given if it has to be. It is one tensor, or, if it is dynamic, as many as its
    count says."""
    name, given = entry.name, node.inputs.get(entry.name)
    if entry.kind is not Kind.OPTIONAL and not given:
        yield Diagnostic(name, f"the required input {name} is absent", "aclnn", NULLPTR)
    elif entry.kind is not Kind.DYNAMIC:
        if isinstance(given, list):
            yield Diagnostic(name, f"{name} is a list of tensors, expected one tensor", "aclnn")
    elif given:
        count, found = node.attrs.get(f"{name}_count"), len(_listed(given))
        if count not in (None, found):
            yield Diagnostic(
                f"{name}_count", f"{name}_count is {count}, expected {found}, the tensors of {name}"
            )


def _attributes(spec: OpSpec, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[Diagnostic]]:
    """Every attribute with its value or default, and the diagnostics of missing, unknown and
    invalid ones."""
    values: dict[str, Any] = {}
    found: list[Diagnostic] = []
    extra = extra_attrs(spec)
    optional = {entry.attr: entry for entry in extensions_of(spec.name) if entry.attr is not None}
    for name in given:
        if name not in spec.attr_names and name not in extra:
            told = (
                f"{spec.name} ({spec.variant}) has no attribute {name!r}{known_attrs(spec, name)}"
            )
            found.append(Diagnostic(name, told, "aclnn"))
    for entry in (*spec.attrs, *extra.values()):
        value = given.get(entry.name)
        if value is None:
            if entry.required:
                message = f"the required attribute {entry.name} is absent"
                found.append(Diagnostic(entry.name, message, "aclnn", NULLPTR))
            values[entry.name] = entry.value_if_absent
            continue
        try:
            values[entry.name] = attr_value(spec.name, entry, value)
        except NodeError as error:
            found.append(Diagnostic(entry.name, str(error), "aclnn"))
            continue
        if entry.name in optional:
            found += _extension_attr(optional[entry.name], values[entry.name])
    return values, found


def _extension_attr(entry: Extension, value: Any) -> Iterator[Diagnostic]:
    name = str(entry.attr)
    if entry.kind == "String" and value not in entry.values:
        allowed = ", ".join(map(repr, entry.values))
        yield Diagnostic(name, f"{name} is {value!r}, expected one of {allowed}", "aclnn")
    else:
        yield Diagnostic(
            name, f"{name} is an attribute of the CPU kernel only", "aclnn", INVALID, entry.id
        )


def _types(spec: OpSpec, node: NodeView, own: tuple[str, ...]) -> Iterator[Diagnostic]:
    """Each tensor has a type of the prototype or of a product. `own` are the tensors whose type a
    numbered rule checks."""
    for name, tensor in _all_tensors(node):
        if name in own or name not in (*spec.input_names, *spec.output_names) or not tensor.dtype:
            continue
        legal = spec.legal_types(name)
        if legal and tensor.dtype not in legal:
            yield Diagnostic(
                name, f"{name} is {tensor.dtype}, expected {' or '.join(legal)}", "aclnn"
            )


def _outputs(node: NodeView, tensors: Mapping[str, Any], cann: str | None) -> Iterator[Diagnostic]:
    """The stated types and shapes of the outputs agree with those inferred from the inputs."""
    inferred = infer(node.op_type, tensors, node.attrs, cann)
    for name, stated in node.outputs.items():
        right = inferred[name]
        if stated.dtype and right.dtype and stated.dtype != right.dtype:
            yield Diagnostic(name, f"{name} is {stated.dtype}, expected {right.dtype}", "aclnn")
        if stated.shape is None or right.shape is None:
            continue
        if len(stated.shape) != len(right.shape) or any(map(differ, stated.shape, right.shape)):
            yield Diagnostic(
                name,
                f"{name} has the shape {text(stated.shape)}, expected {text(right.shape)}",
                "aclnn",
            )


def _product_types(spec: OpSpec, node: NodeView, chip: Product) -> Iterator[Diagnostic]:
    """The combination of types is registered for the product."""
    registered = _registered(spec, chip)
    if registered is None:
        return
    present = {
        name: tensor.dtype
        for name, tensor in _all_tensors(node)
        if tensor.dtype and name not in registered.unchecked
    }
    for name, dtype in present.items():
        legal = registered.types_of(name)
        if legal and dtype not in legal:
            yield Diagnostic(
                name, f"{name} is {dtype}, expected {' or '.join(legal)} on {chip.title}", "aclnn"
            )
            return
    rows = registered.combinations()
    if rows and not any(
        all(row.get(name, dtype) == dtype for name, dtype in present.items()) for row in rows
    ):
        names = [name for name in present if name in rows[0]]
        listed = ", ".join(f"{name} {present[name]}" for name in names)
        yield Diagnostic(
            names[0], f"{listed} is no combination of types that {chip.title} has", "aclnn"
        )


def _registered(spec: OpSpec, chip: Product) -> ProductSpec | None:
    specs = (spec, get(spec.name))
    products = (candidate.product(soc) for candidate in specs for soc in chip.socs)
    return next((registered for registered in products if registered is not None), None)


def _listed(info: TensorInfo | list[TensorInfo]) -> list[TensorInfo]:
    return [info] if isinstance(info, TensorInfo) else info


def _all_tensors(node: NodeView) -> Iterator[tuple[str, TensorInfo]]:
    for name, info in (*node.inputs.items(), *node.outputs.items()):
        for tensor in info if isinstance(info, list) else [info]:
            yield name, tensor
