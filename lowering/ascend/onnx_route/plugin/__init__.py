"""The source of an ATC ONNX plugin that maps nodes of the domain `ascend` one to one to GE's
operators.

ATC has these operators, but its parser knows no ONNX node for most of them. A plugin is compiled
with the CANN toolkit that will load it. `files` generates its source from the registry, for exactly
the operators of a model.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources

from fa_compiler.op_registry import DOMAIN, VERSION, AttrSpec, Kind, OpSpec, get
from fa_compiler.op_registry.errors import RegistryError

SOURCE, BUILD, GUIDE = "ascend_onnx_plugin.cc", "CMakeLists.txt", "README.md"
SETTABLE = ("Int", "Float", "Bool", "String")
"""The types of attributes that a plugin sets. How the parser writes lists into its text is not
known."""


def files(operators: Iterable[str], cann: str | None = None) -> dict[str, str]:
    """The content of the plugin's files by name, for these operators in a CANN version (None: the
    newest).

    Raises:
        RegistryError: an operator or version is unknown, or an attribute has a type that a plugin
            cannot set.
    """
    specs = [get(name, cann) for name in sorted(set(operators))]
    tables = "\n\n".join(map(_operator, specs))
    origins = ", ".join(map(_origin, specs))
    fields = {"@OPERATORS@": tables, "@ORIGINS@": origins}
    return {name: _filled(f"{name}.in", fields) for name in (SOURCE, BUILD, GUIDE)}


def _filled(template: str, fields: dict[str, str]) -> str:
    text = resources.files(__package__).joinpath(template).read_text(encoding="utf-8")
    for mark, value in fields.items():
        text = text.replace(mark, value)
    return text


def _operator(spec: OpSpec) -> str:
    """The tables of the template for a prototype, and its registration."""
    attrs = "".join(f"    {_attr(spec, entry)},\n" for entry in spec.attrs)
    inputs = ",\n".join(
        f'    {{"{entry.name}", {_bool(entry.kind is Kind.DYNAMIC)}}}' for entry in spec.inputs
    )
    return _OPERATOR.format(name=spec.name, attrs=attrs, inputs=inputs, origin=_origin(spec))


def _origin(spec: OpSpec) -> str:
    """The key by which the parser finds the plugin."""
    return f"{DOMAIN}::{VERSION}::{spec.name}"


_OPERATOR = """\
const std::vector<AttrRule> k{name}Attrs = {{
{attrs}}};
const std::vector<InputRule> k{name}Inputs = {{
{inputs},
}};

Status Parse{name}(const ge::Operator& source, ge::Operator& target) {{
  return ParseNode(source, target, k{name}Attrs, k{name}Inputs);
}}

REGISTER_CUSTOM_OP("{name}")
    .FrameworkType(ONNX)
    .OriginOpType("{origin}")
    .ParseParamsByOperatorFn(Parse{name})
    .ImplyType(ImplyType::TVM);"""


def _attr(spec: OpSpec, entry: AttrSpec) -> str:
    kind, number, real, text = entry.type, "0", "0.0f", ""
    value = entry.value_if_absent
    if kind not in SETTABLE:
        raise RegistryError(
            f"{spec.name}: the plugin has no way to set {entry.name}, of type {kind}"
        )
    if value is not None:
        if kind == "Float":
            real = f"{float(value)!r}f" if isinstance(value, (int, float)) else real
        elif kind == "String":
            text = str(value)
        else:
            number = str(int(value)) if isinstance(value, (int, float)) else number
            number += "LL" if kind == "Int" else ""
    return f'{{"{entry.name}", Kind::k{kind}, {_bool(entry.required)}, {number}, {real}, "{text}"}}'


def _bool(value: bool) -> str:
    return "true" if value else "false"
