"""A GE graph in memory: the content of an `.air` file without its encoding.

`convert` makes it of an ONNX model; `air` writes and reads it. Nothing is checked here: the graph
of an invalid file is invalid, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from fa_compiler.op_registry.node import Dim
from fa_compiler.op_registry.spec import AttrValue

UNKNOWN = -1
"""The size of a dimension that is not known before the model runs."""

UNDEFINED = "DT_UNDEFINED"
"""The type of the placeholder of an absent optional input."""


@dataclass(frozen=True)
class TensorDesc:
    """The declaration of a tensor at one end of an edge.

    `name` is the prototype's name, such as "query", or "key0" for the first tensor of a dynamic
    input "key". `dtype` is a GE name. `shape` has UNKNOWN for dynamic sizes, and is None for an
    unknown rank. `ranges` are the inclusive bounds of every size of a Data, if given; -1 means no
    upper bound. `layout` is "ND", or "" for an absent input.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] | None = ()
    layout: str = "ND"
    ranges: tuple[tuple[int, int], ...] | None = None

    @property
    def is_absent(self) -> bool:
        """Whether this is the placeholder of an absent optional input."""
        return self.dtype == UNDEFINED and self.layout in ("", "FORMAT_RESERVED")


def known_sizes(shape: tuple[int, ...] | None) -> tuple[int | None, ...] | None:
    """A shape with None for a dynamic size."""
    if shape is None:
        return None
    return tuple(None if size < 0 else size for size in shape)


def ge_shape(sizes: Sequence[Dim] | None) -> tuple[int, ...] | None:
    """The inverse: a shape with UNKNOWN for a size that is no number."""
    if sizes is None:
        return None
    return tuple(size if isinstance(size, int) else UNKNOWN for size in sizes)


def absent(name: str) -> TensorDesc:
    """The placeholder of an absent optional input."""
    return TensorDesc(name, UNDEFINED, (), "")


@dataclass(frozen=True)
class Output:
    """One output of one operator: the start of an edge."""

    op: str
    index: int = 0


@dataclass(frozen=True)
class Weight:
    """The value of a constant. `load` returns its little-endian bytes in C order; `size` is their
    number."""

    dtype: str
    shape: tuple[int, ...]
    size: int
    load: Callable[[], bytes] = field(repr=False, compare=False)


@dataclass(frozen=True)
class Opaque:
    """A value of a kind that is copied without being read (NamedAttrs, Bytes, a graph): its bytes
    in the file."""

    data: bytes = field(repr=False)


@dataclass(frozen=True)
class Attr:
    """An attribute: its REG_OP type, such as "Int", "ListInt" or "Tensor", and its value. The value
    of a Tensor is a Weight, that of a Type is a GE name."""

    kind: str
    value: AttrValue | Weight | Opaque


@dataclass
class Op:
    """One operator. `inputs` and `input_descs` have the same indices; an input that is not
    connected is None.

    `controls` are the operators that must run before this one. `subgraphs` are the names of its
    graphs by the prototype's names, such as "then_branch", in the order of the prototype.
    """

    name: str
    type: str
    inputs: list[Output | None] = field(default_factory=list)
    input_descs: list[TensorDesc] = field(default_factory=list)
    output_descs: list[TensorDesc] = field(default_factory=list)
    attrs: dict[str, Attr] = field(default_factory=dict)
    controls: list[str] = field(default_factory=list)
    subgraphs: dict[str, str] = field(default_factory=dict)

    @property
    def sources(self) -> list[str]:
        """The operators that must run before this one."""
        return [*(source.op for source in self.inputs if source is not None), *self.controls]


@dataclass
class Graph:
    """Operators in the order of computation. The outputs are the inputs of the only NetOutput."""

    name: str
    ops: list[Op] = field(default_factory=list)

    def of_type(self, op_type: str) -> Iterator[Op]:
        """The operators of a type, in order."""
        return (op for op in self.ops if op.type == op_type)

    def ordered(self) -> list[Op]:
        """The operators in an order in which they can run, by data and by control edges: a file may
        have any order. Raises ValueError for a loop."""
        import networkx as nx  # the import takes a tenth of a second; many commands do not need it

        ops = {op.name: op for op in self.ops}
        after = nx.DiGraph()
        after.add_nodes_from(ops)
        after.add_edges_from(
            (source, op.name) for op in self.ops for source in op.sources if source in ops
        )
        try:
            return [ops[name] for name in nx.topological_sort(after)]
        except nx.NetworkXUnfeasible:
            raise ValueError(
                f"operator '{nx.find_cycle(after)[0][0]}' reads its own result"
            ) from None

    @property
    def subgraphs(self) -> list[str]:
        """The names of the graphs that its operators have."""
        return [name for op in self.ops for name in op.subgraphs.values()]


@dataclass
class Model:
    """A model: the first graph is the root, the others are subgraphs of operators such as If, by
    name."""

    name: str
    graphs: list[Graph] = field(default_factory=list)

    @property
    def root(self) -> Graph:
        """The root graph."""
        return self.graphs[0]
