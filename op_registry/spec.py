"""The model of one operator prototype: what REG_OP says, and what else the registry knows.

`OpSpec`, `InputSpec`, `OutputSpec` and `AttrSpec` are frozen. The text form of a prototype is
REG_OP (`reg_op.py`). The variants of an operator are written with the macros of `macros.py`, in the
operator's file under `ops/`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from fa_compiler.op_registry.dtypes import canonical
from fa_compiler.op_registry.errors import NodeError, suggestion

AttrValue = int | float | bool | str | tuple["AttrValue", ...]
"""The value of an attribute. Lists are tuples."""


class Kind(StrEnum):
    """How often a tensor of a prototype may occur: exactly once, at most once, or any number of
    times."""

    REQUIRED = "required"
    OPTIONAL = "optional"
    DYNAMIC = "dynamic"


ATTR_TYPES = (
    "Int",
    "Float",
    "Bool",
    "String",
    "Type",
    "Tensor",
    "ListInt",
    "ListFloat",
    "ListBool",
    "ListString",
    "ListType",
    "ListTensor",
    "ListListInt",
    "ListListFloat",
    "NamedAttrs",
    "ListNamedAttrs",
    "Bytes",
)
"""The attribute types REG_OP knows."""


@dataclass(frozen=True)
class TensorSpec:
    """An input or output. `written` is its type expression as the prototype spells it. `dtypes` are
    the GE names that the expression stands for, in canonical spelling; they are empty if it is an
    alias such as TensorType::ALL().

    `value_depend` says that the operator reads the VALUES of the input on the host while it is
    compiled ("optional": if they are constant). `since` is the variant in which the tensor first
    appears.
    """

    name: str
    kind: Kind
    written: str
    dtypes: tuple[str, ...] = ()
    value_depend: str | None = None
    since: str | None = None


class InputSpec(TensorSpec):
    """An input of a prototype."""


class OutputSpec(TensorSpec):
    """An output of a prototype."""


@dataclass(frozen=True)
class AttrSpec:
    """An attribute. `default` is the default value in REG_OP, `written` its text there. Both are
    None if the attribute is required.

    `definition_default` is the value of an absent attribute if the operator's own definition
    disagrees with the header (IncreFlashAttention's num_key_value_heads: 1 in REG_OP, 0 in the
    operator definition), otherwise None. `note` says what is special.
    """

    name: str
    type: str
    required: bool
    default: AttrValue | None = None
    written: str | None = None
    definition_default: AttrValue | None = None
    since: str | None = None
    note: str | None = None

    @property
    def value_if_absent(self) -> AttrValue | None:
        """The value to write when the user gives none; None if the attribute is required."""
        return self.default if self.definition_default is None else self.definition_default


@dataclass(frozen=True)
class GraphSpec:
    """A subgraph slot (`.GRAPH(name)`, `.DYNAMIC_GRAPH(name)`)."""

    name: str
    dynamic: bool = False


@dataclass(frozen=True)
class ProductSpec:
    """What the operator definition registers for the products `socs`, which are named as there
    ("ascend910b").

    `columns` and `rows` list the legal combinations of dtypes: each column is one or more tensors
    that always have the same type. A tensor in no column has the types that `dtypes` gives, or else
    those of the prototype; `dtypes` is used if the source gives the types but not the combinations.
    `unchecked` names tensors whose registered types are known to be wrong. `note` says what is
    special.
    """

    socs: tuple[str, ...]
    columns: tuple[tuple[str, ...], ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    dtypes: tuple[tuple[str, tuple[str, ...]], ...] = ()
    unchecked: tuple[str, ...] = ()
    note: str | None = None

    def types_of(self, name: str) -> tuple[str, ...] | None:
        """The types that tensor `name` may have on these products, or None if they are not
        restricted here."""
        for position, tensors in enumerate(self.columns):
            if name in tensors:
                return tuple(dict.fromkeys(row[position] for row in self.rows))
        return dict(self.dtypes).get(name)

    def combinations(self) -> tuple[dict[str, str], ...]:
        """The rows as mappings from tensor name to GE type. Tensors in no column are left out."""
        return tuple(
            {name: dtype for names, dtype in zip(self.columns, row, strict=True) for name in names}
            for row in self.rows
        )


@dataclass(frozen=True)
class OpSpec:
    """One variant of one operator prototype.

    `variant` names it within the operator's history. `cann` is the first CANN release known to have
    it, or None if no source says. `sources` says where the facts come from, `note` what is special.
    """

    name: str
    inputs: tuple[InputSpec, ...] = ()
    outputs: tuple[OutputSpec, ...] = ()
    attrs: tuple[AttrSpec, ...] = ()
    datatypes: tuple[tuple[str, str], ...] = ()
    graphs: tuple[GraphSpec, ...] = ()
    variant: str = ""
    cann: str | None = None
    sources: tuple[str, ...] = ()
    note: str | None = None
    products: tuple[ProductSpec, ...] = ()

    @cached_property
    def _inputs(self) -> Mapping[str, InputSpec]:
        return {entry.name: entry for entry in self.inputs}

    @cached_property
    def _outputs(self) -> Mapping[str, OutputSpec]:
        return {entry.name: entry for entry in self.outputs}

    @cached_property
    def _attrs(self) -> Mapping[str, AttrSpec]:
        return {entry.name: entry for entry in self.attrs}

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the inputs in REG_OP order."""
        return tuple(self._inputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the outputs in REG_OP order."""
        return tuple(self._outputs)

    @property
    def attr_names(self) -> tuple[str, ...]:
        """Names of the attributes in REG_OP order."""
        return tuple(self._attrs)

    def input(self, name: str) -> InputSpec:
        """The input of that name. Raises NodeError if there is none."""
        if name not in self._inputs:
            raise NodeError(f"{self.name} has no input {name!r}{suggestion(name, self._inputs)}")
        return self._inputs[name]

    def output(self, name: str) -> OutputSpec:
        """The output of that name. Raises NodeError if there is none."""
        if name not in self._outputs:
            raise NodeError(f"{self.name} has no output {name!r}{suggestion(name, self._outputs)}")
        return self._outputs[name]

    def attr(self, name: str) -> AttrSpec:
        """The attribute of that name. Raises NodeError if there is none."""
        if name not in self._attrs:
            raise NodeError(f"{self.name} has no attribute {name!r}{suggestion(name, self._attrs)}")
        return self._attrs[name]

    def legal_types(self, name: str) -> tuple[str, ...]:
        """Every type that input or output `name` has in the prototype or on any product. The types
        of the prototype come first."""
        tensor = self._inputs.get(name) or self.output(name)
        more = (product.types_of(name) or () for product in self.products)
        return tuple(dict.fromkeys((*tensor.dtypes, *(dtype for types in more for dtype in types))))

    def product(self, soc: str) -> ProductSpec | None:
        """What is registered for the product named `soc` ("ascend910b"), or None."""
        return next((entry for entry in self.products if soc in entry.socs), None)

    def prototype(self) -> OpSpec:
        """The part of the spec that REG_OP text states, without the registry's own facts."""
        return OpSpec(
            self.name,
            tuple(replace(entry, value_depend=None, since=None) for entry in self.inputs),
            tuple(replace(entry, value_depend=None, since=None) for entry in self.outputs),
            tuple(
                replace(entry, definition_default=None, since=None, note=None)
                for entry in self.attrs
            ),
            self.datatypes,
            self.graphs,
        )


def types_in(written: str) -> tuple[str, ...]:
    """The GE names listed in a type expression: "TensorType({DT_FLOAT32, DT_BOOL})" gives DT_FLOAT
    and DT_BOOL."""
    return tuple(dict.fromkeys(canonical(word) for word in re.findall(r"\bDT_\w+", written)))
