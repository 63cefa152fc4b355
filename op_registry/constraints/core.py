"""What the numbered constraints are written with: the call being checked, a fault, a table of rules.

Only what is certain is a fault: sizes that are symbols or unknown, and contents that are not constant, are
given the benefit of the doubt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from fa_compiler.op_registry.extensions import EXTENSIONS
from fa_compiler.op_registry.geometry import Geometry, Shape, measure
from fa_compiler.op_registry.node import Dim, TensorInfo
from fa_compiler.op_registry.products import Product
from fa_compiler.op_registry.spec import Kind, OpSpec

NULLPTR = 161001
"""ACLNN_ERR_PARAM_NULLPTR: a required input, output or attribute is missing."""

INVALID = 161002
"""ACLNN_ERR_PARAM_INVALID: anything else that a check of the parameters refuses. The checks of the operator's
tiling and the limits stated only in documents have it too, as the aclnn documents file them."""

Stage = Literal["aclnn", "tiling", "document"]
"""Where a constraint is checked on Ascend: in the aclnn interface, while the operator is compiled or tiled,
or nowhere (it is stated in documents only)."""


@dataclass(frozen=True)
class Fault:
    """A constraint that does not hold. `tensor` is the input, output or attribute it is about; `extension`
    the id under which the CPU kernel takes it nevertheless."""

    tensor: str
    message: str
    stage: Stage = "tiling"
    code: int = INVALID
    extension: str | None = None


Rule = Callable[["CheckedNode"], Iterator[Fault]]


class Rules:
    """The constraints of one operator, by number. `Rules("FA")` decorates functions: `@rules(3)`. With `drops_empty` an
    optional input that is an empty tensor is absent to the operator."""

    def __init__(self, prefix: str, drops_empty: bool = False) -> None:
        self.prefix = prefix
        self.drops_empty = drops_empty
        self.table: dict[int, Rule] = {}

    def __call__(self, number: int) -> Callable[[Rule], Rule]:
        def register(rule: Rule) -> Rule:
            self.table[number] = rule
            return rule

        return register


@dataclass(frozen=True)
class CheckedNode:
    """A node under check. `tensors` are its inputs by name, absent ones missing; `attrs` has every
    attribute, the defaults filled in; `product` is None for ONNX Runtime; `lists` are the dynamic inputs."""

    spec: OpSpec
    tensors: Mapping[str, TensorInfo]
    outputs: Mapping[str, TensorInfo]
    attrs: Mapping[str, Any]
    product: Product | None
    lists: Mapping[str, Sequence[TensorInfo]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> TensorInfo | None:
        """The input of that name, or None if it is absent."""
        return self.tensors.get(name)

    def attr(self, name: str) -> Any:
        """An attribute's value."""
        return self.attrs[name]

    @cached_property
    def geometry(self) -> Geometry:
        """The sizes of the call."""
        head_num = self.attr("head_num")
        return measure(
            self.attr("input_layout"),
            head_num if head_num > 0 else None,
            self["query"],
            self["key"],
            self["value"],
            self["actual_seq_qlen"],
            self["actual_seq_kvlen"],
            repeats=self.extension("EXT-BATCH-BROADCAST") is not None,
            roomy=self.extension("EXT-KEY-LENGTH") is not None,
        )

    def extension(self, id: str) -> str | None:
        """The id if the operator has that extension, else None."""
        return next((entry.id for entry in EXTENSIONS if entry.id == id and self.spec.name in entry.ops), None)

    def rank(self, name: str) -> int | None:
        """Rank of an input, or None if it is absent or unknown."""
        tensor = self[name]
        return None if tensor is None or tensor.shape is None else len(tensor.shape)

    def dtype(self, name: str) -> str | None:
        """Type of an input, or None if it is absent or unknown."""
        tensor = self[name]
        return None if tensor is None else tensor.dtype or None

    def content(self, name: str) -> list[int] | None:
        """The integers of a constant input as a flat list, or None."""
        tensor = self[name]
        if tensor is None or tensor.value is None:
            return None
        return [int(number) for number in tensor.value.reshape(-1)]


def without_empty(call: CheckedNode) -> CheckedNode:
    """How the operators of inference read a call: an optional input that is an empty tensor is absent."""
    optional = {entry.name for entry in call.spec.inputs if entry.kind is Kind.OPTIONAL}
    tensors = {name: info for name, info in call.tensors.items() if name not in optional or 0 not in (info.shape or ())}
    return replace(call, tensors=tensors)


def text(shape: Shape | None) -> str:
    """A shape as messages show it: [B,1,S1,8], ? for what is unknown."""
    if shape is None:
        return "of unknown rank"
    return f"[{','.join(map(size_text, shape))}]"


def size_text(size: Dim) -> str:
    """A dimension as messages show it."""
    return "?" if size is None else str(size)


def number(value: float) -> str:
    """A number as messages show it."""
    return f"{value:,}".replace(",", " ") if isinstance(value, int) else repr(value)
