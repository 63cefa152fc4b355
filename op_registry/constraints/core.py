"""What the numbered constraints of an operator are written with: the node under check and the table
of rules.

A rule yields a `Diagnostic` only if it is certain that the node breaks the constraint. A size that
is a symbol or unknown is assumed to be right, and so is the content of a tensor that is not
constant.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any

from fa_compiler.op_registry.diagnostic import Diagnostic, Stage
from fa_compiler.op_registry.geometry import Geometry, Shape, measure, shapes_differ
from fa_compiler.op_registry.node import Dim, TensorInfo
from fa_compiler.op_registry.products import Product
from fa_compiler.op_registry.spec import Kind, OpSpec

Rule = Callable[["CheckedNode"], Iterator[Diagnostic]]


@dataclass(frozen=True)
class NamedRule:
    """A rule, its name and what it demands. The CPU kernels cite the number of a rule by this
    name."""

    name: str
    check: Rule
    text: str


def _demand(check: Rule) -> str:
    """The first paragraph of a rule's docstring, with the arguments that are bound in place of
    their names."""
    bound = check.keywords if isinstance(check, partial) else {}
    text = (check.func if isinstance(check, partial) else check).__doc__ or ""
    text = " ".join(text.partition("\n\n")[0].split())
    for name, value in bound.items():
        text = text.replace(
            f"`{name}`", " and ".join(value) if isinstance(value, tuple) else str(value)
        )
    return text


class Rules:
    """The constraints of one operator, by number: `Rules("FA")` has FA.1, FA.2 and so on.

    `typed` are the tensors whose type a numbered rule checks; the other tensors must have the types
    of the prototype. With `drops_empty`, the operator treats an optional input that is an empty
    tensor as absent.

    A rule is a function (`@rules(3)`), a check that several operators share (`rules.shared`) or a
    set of values (`rules.values`).
    """

    def __init__(self, prefix: str, typed: tuple[str, ...] = (), drops_empty: bool = False) -> None:
        self.prefix = prefix
        self.typed = typed
        self.drops_empty = drops_empty
        self.table: dict[int, NamedRule] = {}

    def __call__(self, number: int) -> Callable[[Rule], Rule]:
        """Decorates the function that checks constraint `number`. The rule has the function's
        name."""

        def register(rule: Rule) -> Rule:
            self.shared(number, rule.__name__, rule)
            return rule

        return register

    def shared(self, number: int, name: str, check: Rule, text: str = "") -> None:
        """Registers `check` as constraint `number`. `text` is what it demands, by default what the
        docstring of its function says. Raises ValueError if the number or the name is taken, or if
        there is no text."""
        if number in self.table or name in {rule.name for rule in self.table.values()}:
            raise ValueError(f"{self.prefix}.{number} ({name}): the number or the name is taken")
        text = text or _demand(check)
        if not text and sys.flags.optimize > 1:
            text = f"{name}."  # python -OO keeps no docstrings
        if not text:
            raise ValueError(f"{self.prefix}.{number} ({name}): nothing says what it demands")
        self.table[number] = NamedRule(name, check, text)

    def values(
        self,
        number: int,
        attr: str,
        allowed: tuple[int | str, ...],
        stage: Stage = "tiling",
        wanted: str = "",
    ) -> None:
        """Registers constraint `number`: the attribute `attr` has one of the values `allowed`. The
        message lists the values in the words of `wanted`, if given. The rule has the attribute's
        name."""
        text = f"{attr} is {wanted or ' or '.join(str(value) or 'empty' for value in allowed)}."
        self.shared(number, attr, lambda call: one_of(call, attr, allowed, stage, wanted), text)


@dataclass(frozen=True)
class CheckedNode:
    """A node under check. `tensors` are its inputs by name; absent ones are missing. `lists` are
    the dynamic inputs. `attrs` has every attribute, with the defaults filled in. `product` is None
    for ONNX Runtime. `extensions` are the ids of the extensions that the operator's CPU kernel
    has."""

    spec: OpSpec
    tensors: Mapping[str, TensorInfo]
    outputs: Mapping[str, TensorInfo]
    attrs: Mapping[str, Any]
    product: Product | None
    lists: Mapping[str, Sequence[TensorInfo]] = field(default_factory=dict)
    extensions: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> TensorInfo | None:
        """The input of that name, or None if it is absent."""
        return self.tensors.get(name)

    def attr(self, name: str) -> Any:
        """The value of an attribute."""
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
            key_length=self.extension("EXT-KEY-LENGTH") is not None,
        )

    def extension(self, id: str) -> str | None:
        """The id if the operator has that extension, else None."""
        return id if id in self.extensions else None

    def on(self, product: str) -> bool:
        """Whether the node is checked for the product of that name ("950")."""
        return self.product is not None and self.product.name == product

    def shape(self, name: str) -> Shape | None:
        """The shape of an input, or None if the input is absent or its rank unknown."""
        tensor = self[name]
        return None if tensor is None else tensor.shape

    def rank(self, name: str) -> int | None:
        """The rank of an input, or None if the input is absent or its rank unknown."""
        shape = self.shape(name)
        return None if shape is None else len(shape)

    def dtype(self, name: str) -> str | None:
        """The type of an input, or None if the input is absent or its type unknown."""
        tensor = self[name]
        return None if tensor is None else tensor.dtype or None

    def content(self, name: str) -> list[int] | None:
        """The integers of a constant input as a flat list, or None if the input is absent or not
        constant."""
        tensor = self[name]
        if tensor is None or tensor.value is None:
            return None
        return [int(number) for number in tensor.value.reshape(-1)]


def one_of(
    call: CheckedNode,
    attr: str,
    allowed: tuple[int | str, ...],
    stage: Stage = "tiling",
    wanted: str = "",
) -> Iterator[Diagnostic]:
    """The attribute has one of the values `allowed`. The message lists them in the words of
    `wanted`, if given."""
    value = call.attr(attr)
    if value not in allowed:
        *others, last = map(repr, allowed)
        listed = wanted or (f"{', '.join(others)} or {last}" if others else last)
        yield Diagnostic(attr, f"{attr} is {value!r}, expected {listed}", stage)


def one_type(
    call: CheckedNode, names: tuple[str, ...], legal: tuple[str, ...]
) -> Iterator[Diagnostic]:
    """The named inputs and outputs have one type, which is one of `legal`. Yields the first
    fault."""
    stated = {
        name: tensor.dtype
        for name in names
        if (tensor := call[name] or call.outputs.get(name)) is not None
    }
    known = {name: dtype for name, dtype in stated.items() if dtype}
    for name, dtype in known.items():
        first_name, wanted = next(iter(known.items()))
        if dtype not in legal:
            yield Diagnostic(name, f"{name} is {dtype}, expected {' or '.join(legal)}", "aclnn")
            return
        if dtype != wanted:
            yield Diagnostic(name, f"{name} is {dtype}, expected {wanted} as {first_name}", "aclnn")
            return


def fixed_types(call: CheckedNode, types: dict[str, str]) -> Iterator[Diagnostic]:
    """Each named input has the only type that it may have."""
    for name, wanted in types.items():
        dtype = call.dtype(name)
        if dtype and dtype != wanted:
            yield Diagnostic(name, f"{name} is {dtype}, expected {wanted}", "aclnn")


def shape_is(name: str, tensor: TensorInfo | None, expected: Shape) -> Iterator[Diagnostic]:
    """The tensor, if it is given, has the shape `expected`."""
    shape = None if tensor is None else tensor.shape
    if shape is not None and shapes_differ(shape, expected):
        yield Diagnostic(name, f"{name} has the shape {text(shape)}, expected {text(expected)}")


def first(faults: Iterator[Diagnostic]) -> Iterator[Diagnostic]:
    """The first of several faults, which says enough."""
    return islice(faults, 1)


def both_or_none(
    call: CheckedNode, names: tuple[str, str], stage: Stage, code: int
) -> Iterator[Diagnostic]:
    """Both inputs are given, or neither."""
    given = [name for name in names if call[name] is not None]
    if len(given) == 1:
        other = names[1] if given[0] == names[0] else names[0]
        yield Diagnostic(
            other, f"{other} is absent beside {given[0]}, expected both or none", stage, code
        )


def out_of_range(name: str, what: str, found: int, limit: int, stage: Stage) -> Diagnostic:
    """The diagnostic of a size that exceeds its documented limit."""
    message = f"{name} has the {what} {number(found)}, expected at most {number(limit)}"
    return Diagnostic(name, message, stage, extension="EXT-RANGE")


def without_empty(call: CheckedNode) -> CheckedNode:
    """The call as the inference operators read it: an optional input that is an empty tensor is
    absent."""
    optional = {entry.name for entry in call.spec.inputs if entry.kind is Kind.OPTIONAL}
    tensors = {
        name: info
        for name, info in call.tensors.items()
        if name not in optional or 0 not in (info.shape or ())
    }
    return replace(call, tensors=tensors)


def text(shape: Shape | None) -> str:
    """A shape as messages show it: [B,1,S1,8], with ? for an unknown size."""
    if shape is None:
        return "of unknown rank"
    return f"[{','.join(map(size_text, shape))}]"


def size_text(size: Dim) -> str:
    """A dimension as messages show it."""
    return "?" if size is None else str(size)


def number(value: float) -> str:
    """A number as messages show it."""
    return f"{value:,}".replace(",", " ") if isinstance(value, int) else repr(value)
