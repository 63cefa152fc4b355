"""What a page draws of a run: each kind of block, with boxes for its nodes before and after.

Blocks of one kind have the same outcome and the same drawing but for names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import onnx
import onnx_ir as ir

from fa_compiler.lowering.drawing import Arrow, Box
from fa_compiler.lowering.onnx_file import to_graph_operators
from fa_compiler.model_files.foreign_types import without_types
from fa_compiler.model_files.reading import LoadedModel
from fa_compiler.page.regions import Region, Regions, data_inputs, is_fused, shape_texts, spec_of
from fa_compiler.passes import Block, Report
from fa_compiler.passes.answer.report import Code

READ_OUTSIDE = (Code.SCORES_ARE_OUTPUT, Code.PROBABILITIES_ARE_OUTPUT)
"""The codes of attentions in whose way an output of the model may stand."""
LONGEST_VALUE = 80
"""Letters of an attribute that are told."""


@dataclass(frozen=True)
class Drawing:
    """The boxes and arrows of one side of a kind of block, and the number of nodes. `cut` says that
    some are left out."""

    title: str
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    nodes: int
    cut: bool


@dataclass(frozen=True)
class Kind:
    """Blocks that are alike, and the drawings of the first one, before and after. There is nothing
    to draw after where nothing was changed."""

    blocks: tuple[Block, ...]
    drawings: tuple[Drawing, ...]

    @property
    def first(self) -> Block:
        """The block that stands for all."""
        return self.blocks[0]

    @property
    def classes(self) -> set[str]:
        """The classes of all boxes and arrows."""
        boxes = (box.kind for drawing in self.drawings for box in drawing.boxes)
        arrows = (arrow.kind for drawing in self.drawings for arrow in drawing.arrows)
        return {word for kind in (*boxes, *arrows) for word in kind.split()}


@dataclass(frozen=True)
class Drawn:
    """A run, ready to be shown: the report, the model before and after, and its kinds of blocks in
    the order of the first of each. `result` is None if the model was not changed."""

    report: Report
    original: onnx.ModelProto
    result: onnx.ModelProto | None
    kinds: tuple[Kind, ...]

    @staticmethod
    def of(report: Report, loaded: LoadedModel, result: onnx.ModelProto | None) -> Drawn:
        """Those of a run.

        Args:
            report: what became of each block.
            loaded: the model before.
            result: the model after, as `pipeline.run` returns it; None if it was not changed.
        """
        original = to_graph_operators(loaded.proto)
        result = None if result is None else to_graph_operators(result)
        shapes = shape_texts(loaded.to_ir())
        if result is not None:
            shapes |= shape_texts(
                ir.from_proto(without_types(result, loaded.foreign) if loaded.foreign else result)
            )
        pencil = _Pencil(shapes, frozenset(value.name for value in original.graph.output))
        kinds = _kinds(report, Regions.of(original, result), pencil)
        return Drawn(report, original, result, tuple(kinds))


def _kinds(report: Report, regions: Regions, pencil: _Pencil) -> Iterator[Kind]:
    """The blocks by kind, in the order of the first of each."""
    found: dict[tuple[object, ...], list[tuple[Block, Region, Region]]] = {}
    for block in report.blocks:
        before, after = regions.around(block)
        reason = re.sub(r"'[^']*'", "", block.reason or "")
        outcome = (
            block.status,
            block.kind,
            block.op,
            block.layout,
            block.mask,
            block.heads,
            block.extensions,
        )
        missed = tuple(entry.kind for entry in block.missed)
        key = (
            *outcome,
            block.assumed,
            block.code,
            reason,
            block.hint,
            missed,
            _form(before),
            _form(after),
        )
        found.setdefault(key, []).append((block, before, after))
    for alike in found.values():
        block, before, after = alike[0]
        sides = (
            [("before", before), ("after", after)] if after.nodes else [("in the model", before)]
        )
        drawings = (pencil.drawing(title, region, block) for title, region in sides if region.nodes)
        yield Kind(tuple(each[0] for each in alike), tuple(drawings))


def _form(region: Region) -> tuple[int, ...]:
    """Numbers that are equal for regions that differ in names and in the order of their nodes
    alone."""
    form: dict[str, int] = {}
    numbers = []
    for node in region.nodes:
        numbers.append(hash((node.op_type, tuple(form.get(name, 0) for name in node.input))))
        form.update(
            {name: hash((numbers[-1], place)) for place, name in enumerate(node.output) if name}
        )
    return tuple(sorted(numbers))


@dataclass(frozen=True)
class _Pencil:
    """Draws regions. It knows the shapes of values as text, and the outputs of the model."""

    shapes: Mapping[str, str]
    outputs: frozenset[str]

    def drawing(self, title: str, region: Region, block: Block) -> Drawing:
        """The boxes of the nodes, of the values that come from outside and of the model's outputs,
        and what flows between them."""
        sketch = _Sketch(self, region.roles, block)
        for node in region.nodes:
            sketch.add(node)
        sketch.end()
        return Drawing(
            title, tuple(sketch.boxes), tuple(sketch.arrows), len(region.nodes), region.cut
        )

    def value(self, key: str, title: str, name: str, kind: str) -> Box:
        """The box of a value."""
        shape = self.shapes.get(name, "")
        return Box(key, title, _told(name, shape), f"{name} {shape}", f"value {kind}")

    def node(self, key: str, node: onnx.NodeProto, kind: str) -> Box:
        """The box of a node."""
        shapes = dict.fromkeys(
            shape for name in node.output if (shape := self.shapes.get(name, ""))
        )
        lines = (*_told(node.name, ", ".join(shapes)), *_attributes(node))
        return Box(key, node.op_type, lines, self._hint(node), kind)

    def _hint(self, node: onnx.NodeProto) -> str:
        lines = [f"{node.op_type} {node.name}".strip()]
        lines += [f"{attribute.name} = {_text(attribute)}" for attribute in node.attribute]
        values = (("input", node.input), ("output", node.output))
        lines += [
            f"{kind} {name} {self.shapes.get(name, '')}"
            for kind, names in values
            for name in names
            if name
        ]
        return "\n".join(lines)


class _Sketch:
    """The drawing of a block's region, to which its nodes are added in their order. `flows` has the
    role of each value, and `maker` the box that it comes from."""

    def __init__(self, pencil: _Pencil, roles: Mapping[str, str], block: Block) -> None:
        self.boxes: list[Box] = []
        self.arrows: list[Arrow] = []
        self._pencil, self._roles, self._block = pencil, roles, block
        self._flows = dict(roles)
        self._maker: dict[str, str] = {}

    def add(self, node: onnx.NodeProto) -> None:
        """Add a node, the values from outside that it reads, and the outputs of the model that it
        gives."""
        key = f"n{len(self.boxes)}"
        given = list(dict.fromkeys(data_inputs(node)))
        role = _role({self._flows[name] for name in given if name in self._flows})
        for name in given:
            self._add_input(key, name)
        leaves = [name for name in node.output if name in self._pencil.outputs]
        culprit = self._culprit(node, bool(leaves))
        self.boxes.append(
            self._pencil.node(key, node, " ".join(self._classes(node, role, culprit)))
        )
        for name in leaves:
            kind = "culprit" if culprit == "output" else "role-other"
            self.boxes.append(self._pencil.value(f"v{len(self.boxes)}", "model output", name, kind))
            self.arrows.append(Arrow(key, self.boxes[-1].key, "role-other"))
        for name in filter(None, node.output):
            self._maker[name] = key
            if role:
                self._flows.setdefault(name, role)

    def end(self) -> None:
        """The page opens the drawing at the last node, if the anchor of the block is not in it."""
        if not any("focus" in box.kind.split() for box in self.boxes):
            last = max(
                place for place, box in enumerate(self.boxes) if "value" not in box.kind.split()
            )
            self.boxes[last] = replace(self.boxes[last], kind=f"{self.boxes[last].kind} focus")

    def _add_input(self, key: str, name: str) -> None:
        """Draw what flows from a value to the box with this key. A value from outside without a
        role is not drawn."""
        role = self._flows.get(name, "other")
        if name not in self._maker and name in self._roles:
            self._maker[name] = f"v{len(self.boxes)}"
            title = "input" if role == "other" else role
            self.boxes.append(self._pencil.value(self._maker[name], title, name, _class(role)))
        if name in self._maker:
            self.arrows.append(Arrow(self._maker[name], key, _class(role)))

    def _culprit(self, node: onnx.NodeProto, leaves: bool) -> str | None:
        """What stands in the way of the fusion here: the node, or the output of the model that it
        gives, if one is."""
        if self._block.status != "declined" or self._block.culprit not in (node.name, *node.output):
            return None
        return "output" if leaves and self._block.code in READ_OUTSIDE else "node"

    def _classes(self, node: onnx.NodeProto, role: str, culprit: str | None) -> Iterator[str]:
        """The style classes of a node. The page opens a drawing at the softmax before, and at the
        fused node after."""
        yield "fused" if is_fused(node) else _class(role or "other")
        if culprit == "node":
            yield "culprit"
        if node.name == self._block.node or self._block.anchor in (node.name, *node.output):
            yield "focus"


def _told(name: str, shape: str) -> tuple[str, ...]:
    """The lines of a box: the name and the shape, where they are known. A number has no dimensions
    to tell."""
    return tuple(filter(None, (name, "one number" if shape == "[]" else shape)))


def _class(role: str) -> str:
    """The style class of a role. Several roles together have none of their colours."""
    return "role-other" if ", " in role else f"role-{role}"


def _role(reached: set[str]) -> str:
    """The role of a node: the only one of its inputs, or "other" for several; "" if they have
    none."""
    if len(reached) == 1:
        return reached.pop()
    return "other" if reached else ""


def _attributes(node: onnx.NodeProto) -> Iterator[str]:
    """The attributes of a fused node that say more than their default."""
    if not is_fused(node):
        return
    spec = spec_of(node)
    defaults = {} if spec is None else {attr.name: _shown(attr.default) for attr in spec.attrs}
    for attribute in node.attribute:
        text = _text(attribute)
        if text != defaults.get(attribute.name):
            yield f"{attribute.name} = {text}"


def _text(attribute: onnx.AttributeProto) -> str:
    """The value of an attribute for people."""
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, (onnx.GraphProto, onnx.TensorProto, onnx.SparseTensorProto)):
        return str(onnx.AttributeProto.AttributeType.Name(attribute.type)).lower()
    text = _shown(value)
    return text if len(text) < LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."


def _shown(value: object) -> str:
    """A value as text."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return f"{value:.6g}" if isinstance(value, float) else str(value)
