"""What a rule sees of a node, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar, overload

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.symbolic import Dim, cap_of, consts, integer
from fa_compiler.passes.ir.nodes import all_known, without_none

T = TypeVar("T")
Shape: TypeAlias = tuple[Dim, ...]
Content: TypeAlias = np.ndarray[Any, np.dtype[Any]]
"""The elements of a small tensor: an object array of `Dim` for integers and booleans (0 or 1), or a
plain array in the tensor's own dtype for floating point."""

LIMIT = 64
"""The most elements of a tensor whose content is followed."""


_DTYPES = frozenset(int(dtype) for dtype in ir.DataType) - {int(ir.DataType.UNDEFINED)}


class UnresolvedError(Exception):
    """A rule met an attribute whose value is not known (a function's attribute without a
    caller)."""


@dataclass(frozen=True, slots=True)
class Fact:
    """What is known of one value. A field that is None is unknown. `parts` are the shapes of a
    sequence's elements."""

    shape: Shape | None = None
    dtype: ir.DataType | None = None
    content: Content | None = None
    parts: tuple[Shape, ...] | None = None


UNKNOWN = Fact()


class Known(Protocol):
    """What is known of values: shapes, types and small contents. Of an absent input nothing is
    known."""

    def shape(self, value: ir.Value | None) -> Shape | None: ...

    def sizes(self, value: ir.Value | None) -> Shape: ...

    def dtype(self, value: ir.Value | None) -> ir.DataType | None: ...

    def content(self, value: ir.Value | None) -> tuple[Dim, ...] | Dim | None: ...

    def integer(self, value: ir.Value | None) -> Dim | None: ...

    def scalar(self, value: ir.Value | None) -> float | None: ...


class Context:
    """A node with the facts of its inputs."""

    def __init__(
        self, node: ir.Node, facts: Sequence[Fact | None], opset: int, attrs: Mapping[str, ir.Attr]
    ) -> None:
        self.node = node
        self.facts = facts
        self.opset = opset
        self._bound = attrs

    def has(self, index: int) -> bool:
        """Whether input `index` is present."""
        return index < len(self.facts) and self.facts[index] is not None

    def fact(self, index: int) -> Fact:
        """The fact of input `index`; unknown when absent."""
        fact = self.facts[index] if index < len(self.facts) else None
        return UNKNOWN if fact is None else fact

    def shape(self, index: int, rank: int | None = None) -> Shape | None:
        """The shape of input `index`. With a rank, None for a shape of another rank."""
        shape = self.fact(index).shape
        return shape if rank in (None, rank_of(shape)) else None

    def dtype(self, index: int) -> ir.DataType | None:
        """The dtype of input `index`."""
        return self.fact(index).dtype

    def dtype_or(self, index: int, default: ir.DataType | None) -> ir.DataType | None:
        """The dtype of input `index`, or another one where it is absent."""
        return self.dtype(index) if self.has(index) else default

    def content(self, index: int) -> Content | None:
        """The content of input `index`."""
        return self.fact(index).content

    def dims(self, index: int) -> list[Dim] | None:
        """The integers of input `index`, a 0-D or 1-D tensor; None when they are not followed."""
        content = self.content(index)
        if content is None or content.dtype != object:
            return None
        return list(content.reshape(-1))

    def ints(self, index: int) -> list[int] | None:
        """The integers of input `index` when all of them are the same in every run, else None."""
        dims = self.dims(index)
        if dims is None:
            return None
        return all_known(consts(dims))

    def vector(self, index: int) -> list[Dim] | None:
        """The integers of a 1-D input `index`; fresh ones, of any sign, when only their number is
        known."""
        dims, length = self.dims(index), listed_length(self.shape(index))
        if dims is not None or length is None:
            return dims
        return [Dim.fresh(None) for _ in range(length)]

    def attr(self, name: str) -> Any:
        """The value of attribute `name`, None when absent. Raises UnresolvedError for an unbound
        reference."""
        attribute = self.node.attributes.get(name)
        if attribute is None:
            return None
        if attribute.is_ref():
            attribute = self._bound.get(attribute.ref_attr_name or "")
            if attribute is None or attribute.is_ref():
                raise UnresolvedError(name)
        return attribute.value

    def int_attr(self, name: str, default: int) -> int:
        """The value of an integer attribute, or its default."""
        value = self.attr(name)
        return default if value is None else int(value)

    def ints_attr(self, name: str) -> list[int] | None:
        """An attribute that is a list of integers, None when absent."""
        value = self.attr(name)
        if value is None:
            return None
        return [int(item) for item in value]

    def dtype_attr(self, name: str, default: ir.DataType | None = None) -> ir.DataType | None:
        """An attribute that is the number of a data type, or its default; None when no type has the
        number."""
        number = self.attr(name)
        if number is None:
            return default
        if int(number) not in _DTYPES:
            return None
        return ir.DataType(int(number))

    def axis_attr(self, rank: int | None, default: int = 0) -> int | None:
        """The attribute `axis` of a tensor of this rank, counted from the front; None when it is
        out of range, or the rank is unknown."""
        return axis_in(self.int_attr("axis", default), rank)

    def listed(self, attr: str, index: int, since: int) -> tuple[bool, list[Dim] | None]:
        """(present, values) of sizes: attribute `attr` before opset `since`, then input `index`."""
        if self.opset >= since:
            return self.has(index), self.vector(index)
        values = self.ints_attr(attr)
        return values is not None, None if values is None else list(map(Dim, values))

    def axes(self, attr: str, index: int, since: int) -> tuple[bool, list[int] | None]:
        """(present, values) of integers: attribute `attr` before opset `since`, then input
        `index`."""
        if self.opset >= since:
            return self.has(index), self.ints(index)
        values = self.ints_attr(attr)
        return values is not None, values


Rule: TypeAlias = Callable[[Context], Fact | Sequence[Fact]]
ShapeRule: TypeAlias = Callable[[Context, Shape], Shape | None]
RULES: dict[tuple[str, str], Rule] = {}


def rule(*names: str, domain: str = "") -> Callable[[Rule], Rule]:
    """Register a rule for the named operators."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[(domain, name)] = function
        return function

    return register


def shape_rule(
    *names: str, domain: str = "", rank: int | None = None
) -> Callable[[ShapeRule], ShapeRule]:
    """Register a rule for the shape of a result that has the type of the first input, made of the
    shape of that input. Where this is not known, or has another rank than is asked for, nothing is
    known of the result's."""

    def register(function: ShapeRule) -> ShapeRule:
        def result(ctx: Context) -> Fact:
            shape = ctx.shape(0, rank)
            return Fact(None if shape is None else function(ctx, shape), ctx.dtype(0))

        rule(*names, domain=domain)(result)
        return function

    return register


@overload
def fresh(count: int) -> Shape: ...


@overload
def fresh(count: int | None) -> Shape | None: ...


def fresh(count: int | None) -> Shape | None:
    """A shape of known rank with unknown dims; None where the rank is unknown, too."""
    if count is None:
        return None
    return tuple(Dim.fresh() for _ in range(count))


def or_fresh(dim: Dim | None) -> Dim:
    """The dim, or an unknown one."""
    return Dim.fresh() if dim is None else dim


def shape_of_rank(rank: int, shape: Shape | None) -> Shape:
    """The shape, if it has this rank; else an unknown one that has."""
    return shape if shape is not None and len(shape) == rank else fresh(rank)


def listed_length(shape: Shape | None) -> int | None:
    """How many numbers a vector of this shape lists; None where that is unknown or too large, or it
    is no vector."""
    length = None if shape is None or len(shape) != 1 else shape[0].const
    return None if length is None or length > LIMIT else length


def as_axis_size(dim: Dim) -> Dim:
    """`dim` as an axis length: kept if it cannot be negative, else unknown."""
    return dim if dim.is_at_least(0) else Dim.fresh()


def rank_of(shape: Shape | None) -> int | None:
    """The rank."""
    if shape is None:
        return None
    return len(shape)


def axis_in(axis: int | None, rank: int | None) -> int | None:
    """`axis` counted from the front, None when it is out of range, or the axis or the rank is
    unknown."""
    if axis is None or rank is None or not -rank <= axis < rank:
        return None
    return axis % rank


def with_dims(shape: Shape, axis: int, *dims: Dim) -> Shape:
    """The shape with these dims in place of that of an axis."""
    return (*shape[:axis], *dims, *shape[axis + 1 :])


def shape_of_groups(shape: Shape | None, axis: int) -> Shape | None:
    """The shape of one number for all elements from an axis on; None where it is unknown."""
    first = axis_in(axis, rank_of(shape))
    if shape is None or first is None:
        return None
    return (*shape[:first], *[Dim(1)] * (len(shape) - first))


def axes_in(axes: Iterable[int], rank: int) -> list[int] | None:
    """The axes counted from the front, sorted; None when one is out of range or named twice."""
    places = [axis_in(axis, rank) for axis in axes]
    known = set(without_none(places))
    if len(known) != len(places):
        return None
    return sorted(known)


def dim_array(value: object) -> Content:
    """`value` (a Dim, an int or nested lists of them) as an object array of Dim."""
    array = np.asarray(value, dtype=object)
    return np.asarray(_AS_DIM(array), dtype=object)


def as_dim(value: object) -> Dim:
    """A Dim, or an integer as one."""
    return value if isinstance(value, Dim) else integer(int(value))  # type: ignore[call-overload]


_AS_DIM = np.frompyfunc(as_dim, 1, 1)


def integers_of(content: Content) -> Content | None:
    """The integers of a content as numbers; None where one of them is not the same in every run."""
    numbers = all_known(consts(content.reshape(-1)))
    return None if numbers is None else np.array(numbers, dtype=object).reshape(content.shape)


def content_fact(content: Content, dtype: ir.DataType | None) -> Fact:
    """The fact of a value whose content is known."""
    shape = tuple(map(integer, content.shape))
    return Fact(shape, dtype, content if content.size <= LIMIT else None)


def fact_of(content: Content | None, shape: Shape | None, dtype: ir.DataType | None) -> Fact:
    """The fact of a value: by its content where this is known, else by its shape."""
    return Fact(shape, dtype) if content is None else content_fact(content, dtype)


def broadcast(*shapes: Shape | None) -> Shape | None:
    """The shape of operands broadcast together (numpy's rule), for runs in which they can be."""
    known = without_none(shapes)
    if len(known) < len(shapes) or not known:
        return None
    result = list(known[0])
    caps: list[tuple[Dim, int]] = []
    for shape in known[1:]:
        wide, narrow = sorted((result, list(shape)), key=len, reverse=True)
        offset = len(wide) - len(narrow)
        for index, dim in enumerate(narrow):
            left = wide[offset + index]
            for dims in ((left, dim), (dim, left)):
                cap = cap_of(*dims)
                if cap is not None:
                    caps.append((dims[1], cap))
            wide[offset + index] = Dim.broadcast(left, dim)
        result = wide
    for dim, cap in caps:
        result = [_uncap(item, dim, cap) for item in result]
    return tuple(result)


def _uncap(item: Dim, dim: Dim, cap: int) -> Dim:
    """`item` simplified by dim <= cap: min(u, 0) is u where u <= dim - cap.

    Sound for the result of an operation that fails unless dim <= cap. A broadcast atom is
    simplified inside, since its operands are sizes of this very operation.
    """
    atom = item.single_atom
    if atom is not None and atom.op == "broadcast":
        total = Dim(1)
        for part in atom.args:
            total = Dim.broadcast(total, _uncap(part, dim, cap))
        return total
    for atom in item.atoms:
        if atom.op == "min0" and (dim - cap - atom.args[0]).is_at_least(0):
            item = item.substitute({atom: atom.args[0]})
    return item
