"""The macros of REG_OP as Python, so that the facts of an operator read like its header.

An operator's file under `ops/` writes each variant of the prototype as a chain of macros, ended by
`OP_END_FACTORY_REG()`. A later variant starts from an earlier one with `then`:

    V1 = (
        REG_OP("MyOp", "first_public", source="where the facts come from", cann="8.0")
        .INPUT("x", "DT_FLOAT16, DT_FLOAT")
        .OPTIONAL_INPUT("mask", "DT_BOOL")
        .OUTPUT("y", "DT_FLOAT16, DT_FLOAT")
        .REQUIRED_ATTR("head_num", "Int")
        .ATTR("scale_value", "Float", 1.0)
    )
    V2 = V1.then("opdef_2025_12", source="...", cann="8.5").OPTIONAL_INPUT("sink", "DT_FLOAT")
    OPERATOR = Operator(variants=(V1.OP_END_FACTORY_REG(), V2.OP_END_FACTORY_REG()), ...)

`operator.py` says what else the file holds.
"""

# ruff: noqa: N801, N802  # the names are those of the C++ macros
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from fa_compiler.op_registry.dtypes import lookup
from fa_compiler.op_registry.reg_op import format_default
from fa_compiler.op_registry.spec import (
    AttrSpec,
    AttrValue,
    InputSpec,
    Kind,
    OpSpec,
    OutputSpec,
    ProductSpec,
    TensorSpec,
    types_in,
)

_Tensor = TypeVar("_Tensor", bound=TensorSpec)


@dataclass(frozen=True)
class REG_OP:
    """One variant under construction. Every macro returns a new object. `types` are GE names
    separated by commas.

    New inputs, outputs and attributes are added at the end, as in the headers. A macro that names
    an existing one replaces it in place; the variant in which it first appeared (`since`) is kept.
    """

    spec: OpSpec

    def __init__(
        self,
        name: str,
        variant: str,
        *,
        source: str,
        cann: str | None = None,
        note: str | None = None,
    ) -> None:
        spec = OpSpec(
            name, variant=variant, cann=cann, sources=tuple(source.split("; ")), note=note
        )
        object.__setattr__(self, "spec", spec)

    def then(
        self, variant: str, *, source: str, cann: str | None = None, note: str | None = None
    ) -> REG_OP:
        """The next variant. It begins with the inputs, outputs and attributes of this one, but
        without its products."""
        started = REG_OP(self.spec.name, variant, source=source, cann=cann, note=note).spec
        return self._with(
            replace(
                self.spec,
                variant=variant,
                cann=cann,
                sources=started.sources,
                note=note,
                products=(),
            )
        )

    def INPUT(self, name: str, types: str) -> REG_OP:
        """A required input."""
        return self._input(name, Kind.REQUIRED, types, None)

    def OPTIONAL_INPUT(self, name: str, types: str, *, value_depend: str | None = None) -> REG_OP:
        """An input that may be absent. `value_depend="optional"` says that its values are read at
        compile time if they are constant."""
        return self._input(name, Kind.OPTIONAL, types, value_depend)

    def DYNAMIC_INPUT(self, name: str, types: str) -> REG_OP:
        """An input of any number of tensors."""
        return self._input(name, Kind.DYNAMIC, types, None)

    def OUTPUT(self, name: str, types: str) -> REG_OP:
        """A required output."""
        return self._output(name, Kind.REQUIRED, types)

    def OPTIONAL_OUTPUT(self, name: str, types: str) -> REG_OP:
        """An output that may be absent."""
        return self._output(name, Kind.OPTIONAL, types)

    def REQUIRED_ATTR(self, name: str, type: str, *, note: str | None = None) -> REG_OP:
        """An attribute without a default."""
        return self._attr(AttrSpec(name, type, required=True, since=self.spec.variant, note=note))

    def ATTR(
        self,
        name: str,
        type: str,
        default: AttrValue,
        *,
        definition_default: AttrValue | None = None,
        note: str | None = None,
    ) -> REG_OP:
        """An attribute with its default. AttrSpec explains `definition_default`."""
        written = format_default(type, default)
        return self._attr(
            AttrSpec(
                name, type, False, default, written, definition_default, self.spec.variant, note
            )
        )

    def DROP(self, *names: str) -> REG_OP:
        """Removes the inputs, outputs and attributes of these names. Raises ValueError if a name
        does not exist."""
        spec = self.spec
        known = {*spec.input_names, *spec.output_names, *spec.attr_names}
        if not known.issuperset(names):
            raise ValueError(f"{spec.name}: nothing to drop under {sorted(set(names) - known)}")
        return self._with(
            replace(
                spec,
                inputs=tuple(entry for entry in spec.inputs if entry.name not in names),
                outputs=tuple(entry for entry in spec.outputs if entry.name not in names),
                attrs=tuple(entry for entry in spec.attrs if entry.name not in names),
            )
        )

    def INPUT_ORDER(self, names: str) -> REG_OP:
        """The same inputs in another order. `names` lists all of them, separated by blanks."""
        order = names.split()
        if sorted(order) != sorted(self.spec.input_names):
            raise ValueError(f"{self.spec.name}: {names!r} does not name each input once")
        return self._with(replace(self.spec, inputs=tuple(self.spec.input(name) for name in order)))

    def PRODUCT(
        self,
        socs: str,
        table: str | None = None,
        *,
        types: Mapping[str, str] | None = None,
        unchecked: str = "",
        note: str | None = None,
    ) -> REG_OP:
        """What the operator definition registers for products (`socs`, separated by blanks).

        `table` holds the legal combinations of dtypes. Its first line names the columns: a column
        is one tensor, or several tensors of equal type joined by "=". Each further line is one
        combination, with types written without "DT_". `types` gives the types of single tensors if
        the combinations are not known. `unchecked` names the tensors whose registered types are
        known to be wrong.
        """
        columns: tuple[tuple[str, ...], ...] = ()
        rows: tuple[tuple[str, ...], ...] = ()
        if table is not None:
            head, *body = (line.split() for line in table.strip().splitlines())
            columns = tuple(tuple(column.split("=")) for column in head)
            rows = tuple(tuple(lookup(f"DT_{word}").ge for word in line) for line in body)
            if any(len(row) != len(columns) for row in rows):
                raise ValueError(
                    f"{self.spec.name}: a row of the table for {socs} has the wrong length"
                )
        restated = tuple((name, types_in(listed)) for name, listed in (types or {}).items())
        product = ProductSpec(
            tuple(socs.split()), columns, rows, restated, tuple(unchecked.split()), note
        )
        for name in (*(name for column in columns for name in column), *(types or {})):
            if name not in self.spec.input_names:
                self.spec.output(name)
        return self._with(replace(self.spec, products=(*self.spec.products, product)))

    def OP_END_FACTORY_REG(self) -> OpSpec:
        """The finished variant."""
        return self.spec

    def _input(self, name: str, kind: Kind, types: str, value_depend: str | None) -> REG_OP:
        entry = InputSpec(
            name, kind, _written(types), types_in(types), value_depend, self.spec.variant
        )
        return self._with(replace(self.spec, inputs=_add_or_replace(self.spec.inputs, entry)))

    def _output(self, name: str, kind: Kind, types: str) -> REG_OP:
        entry = OutputSpec(name, kind, _written(types), types_in(types), None, self.spec.variant)
        return self._with(replace(self.spec, outputs=_add_or_replace(self.spec.outputs, entry)))

    def _attr(self, entry: AttrSpec) -> REG_OP:
        old = next((attr for attr in self.spec.attrs if attr.name == entry.name), None)
        if old is None:
            return self._with(replace(self.spec, attrs=(*self.spec.attrs, entry)))
        entry = replace(entry, since=old.since)
        attrs = tuple(entry if attr is old else attr for attr in self.spec.attrs)
        return self._with(replace(self.spec, attrs=attrs))

    def _with(self, spec: OpSpec) -> REG_OP:
        draft = object.__new__(REG_OP)
        object.__setattr__(draft, "spec", spec)
        return draft


def _written(types: str) -> str:
    for name in types.split(","):
        lookup(name.strip())
    return f"TensorType({{{types}}})"


def _add_or_replace(entries: tuple[_Tensor, ...], entry: _Tensor) -> tuple[_Tensor, ...]:
    old = next((known for known in entries if known.name == entry.name), None)
    if old is None:
        return (*entries, entry)
    entry = replace(entry, since=old.since, value_depend=entry.value_depend or old.value_depend)
    return tuple(entry if known is old else known for known in entries)
