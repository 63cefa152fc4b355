"""A GE graph in memory: what an `.air` file says, without its encoding.

`convert` makes it from an ONNX model and makes an ONNX model from it; `air` writes and reads it. Nothing here checks
anything: a graph read from a broken file is as broken as the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from fa_compiler.op_registry.spec import AttrValue

UNKNOWN = -1
"""A dimension that is not known before the model runs."""

UNDEFINED = "DT_UNDEFINED"
"""The type of the placeholder that stands for an absent optional input."""


@dataclass(frozen=True)
class TensorDesc:
    """What is declared of a tensor at one end of an edge.

    `name` is the prototype's ("query"; "key0" for the first tensor of a dynamic input "key"), `dtype` a GE name,
    `shape` None where the rank is unknown, with UNKNOWN for open dimensions; `ranges` are the inclusive bounds of every
    dimension of a Data operator, where given (-1: no upper bound). `layout` is "ND", or "" for an absent input.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] | None = ()
    layout: str = "ND"
    ranges: tuple[tuple[int, int], ...] | None = None

    @property
    def is_absent(self) -> bool:
        """Is this the placeholder of an optional input that nothing is connected to?"""
        return self.dtype == UNDEFINED and self.layout in ("", "FORMAT_RESERVED")


def absent(name: str) -> TensorDesc:
    """The placeholder of an optional input that nothing is connected to."""
    return TensorDesc(name, UNDEFINED, (), "")


@dataclass(frozen=True)
class Output:
    """One output of one operator: what an edge begins at."""

    op: str
    index: int = 0


@dataclass(frozen=True)
class Weight:
    """The value of a constant: `load` gives its little-endian bytes in C order, `size` says how many there are."""

    dtype: str
    shape: tuple[int, ...]
    size: int
    load: Callable[[], bytes] = field(repr=False, compare=False)


@dataclass(frozen=True)
class Opaque:
    """A value of a kind that is only carried along (NamedAttrs, Bytes, a graph): its bytes in the file."""

    data: bytes = field(repr=False)


@dataclass(frozen=True)
class Attr:
    """An attribute: its REG_OP type ("Int", "ListInt", "Tensor"...) and value; a Tensor's value is a Weight, a Type's a
    GE name."""

    kind: str
    value: AttrValue | Weight | Opaque


@dataclass
class Op:
    """One operator. `inputs` and `input_descs` are index-aligned: None is an input that nothing is connected to.

    `controls` are operators that must run before; `subgraphs` the names of its graphs, by the prototype's name for
    them ("then_branch"), in prototype order.
    """

    name: str
    type: str
    inputs: list[Output | None] = field(default_factory=list)
    input_descs: list[TensorDesc] = field(default_factory=list)
    output_descs: list[TensorDesc] = field(default_factory=list)
    attrs: dict[str, Attr] = field(default_factory=dict)
    controls: list[str] = field(default_factory=list)
    subgraphs: dict[str, str] = field(default_factory=dict)


@dataclass
class Graph:
    """Operators in order of computation. The outputs are the inputs of the one NetOutput."""

    name: str
    ops: list[Op] = field(default_factory=list)

    def of_type(self, op_type: str) -> Iterator[Op]:
        """The operators of that type, in order."""
        return (op for op in self.ops if op.type == op_type)


@dataclass
class Model:
    """A model: the first graph is the root, the others are subgraphs of operators such as If, by name."""

    name: str
    graphs: list[Graph] = field(default_factory=list)

    @property
    def root(self) -> Graph:
        """The graph that runs."""
        return self.graphs[0]
