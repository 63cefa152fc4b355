"""An `.air` file as text: one line for each operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from fa_compiler.lowering.ascend.graph import Attr, Graph, Model, Op, Opaque, TensorDesc, Weight

_LONGEST = 48
"""The most characters of an attribute's value."""


def summary(model: Model) -> str:
    """One line with the number of operators of each type and the size of the weights."""
    types = Counter(op.type for graph in model.graphs for op in graph.ops)
    attrs = [attr.value for graph in model.graphs for op in graph.ops for attr in op.attrs.values()]
    weights = sum(value.size for value in attrs if isinstance(value, Weight))
    listed = ", ".join(
        f"{count} {name}"
        for name, count in sorted(types.items(), key=lambda item: (-item[1], item[0]))
    )
    graphs = "1 graph" if len(model.graphs) == 1 else f"{len(model.graphs)} graphs"
    return f"{model.name}: {graphs}, {weights} bytes of constants; {listed}"


def lines(graph: Graph) -> Iterator[str]:
    """One line for each operator: "name = Type(input=source, ...) {attribute=value, ...} ->
    output=type[shape]"."""
    for op in graph.ops:
        line = f"{op.name} = {op.type}({_inputs(op)})"
        if attrs := _attrs(op):
            line += f" {{{attrs}}}"
        if outputs := _outputs(op):
            line += f" -> {outputs}"
        yield line


def tensor(desc: TensorDesc) -> str:
    """A descriptor without its name, such as "float16[1, 12, ?, 64]"."""
    sizes = "unknown rank"
    if desc.shape is not None:
        sizes = ", ".join("?" if size < 0 else str(size) for size in desc.shape)
    bounds = ""
    if desc.ranges is not None and any(low != high for low, high in desc.ranges):
        bounds = " in " + ", ".join(
            f"{low}..{'' if high < 0 else high}" for low, high in desc.ranges
        )
    return f"{desc.dtype.removeprefix('DT_').lower()}[{sizes}]{bounds}"


def _inputs(op: Op) -> str:
    parts = []
    for number, source in enumerate(op.inputs):
        name = op.input_descs[number].name if number < len(op.input_descs) else ""
        if source is not None:
            end = f"{source.op}:{source.index}" if source.index else source.op
            parts.append(f"{name}={end}" if name else end)
    return ", ".join([*parts, *(f"after {name}" for name in op.controls)])


def _outputs(op: Op) -> str:
    return ", ".join(
        f"{desc.name}={tensor(desc)}" if desc.name else tensor(desc) for desc in op.output_descs
    )


def _attrs(op: Op) -> str:
    graphs = [f"{slot}={name}" for slot, name in op.subgraphs.items()]
    return ", ".join(
        [*(f"{name}={_value(attr)}" for name, attr in sorted(op.attrs.items())), *graphs]
    )


def _value(attr: Attr) -> str:
    if isinstance(attr.value, Weight):
        return f"{tensor(TensorDesc('', attr.value.dtype, attr.value.shape))}"
    if isinstance(attr.value, Opaque):
        return f"({attr.kind})"
    if isinstance(attr.value, float):
        return f"{attr.value:.7g}"
    text = list(attr.value) if isinstance(attr.value, tuple) else attr.value
    shown = str(text)
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 3]}..."
