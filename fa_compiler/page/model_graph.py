"""`graph`: a model as a networkx graph whose nodes know the attention that they belong to."""

from __future__ import annotations

from typing import Unpack

import networkx as nx

from fa_compiler.model_files.reading import ModelLike, load
from fa_compiler.page.regions import Regions, shape_texts
from fa_compiler.passes import Options
from fa_compiler.passes.answer.options import FusionKeywords, Target
from fa_compiler.passes.answer.report import Block
from fa_compiler.pipeline.fusing import run
from fa_compiler.pipeline.keywords import takes
from fa_compiler.pipeline.options import python_options


@takes(FusionKeywords, Options)
def graph(
    model: ModelLike, target: Target = Options.target, **options: Unpack[FusionKeywords]
) -> nx.DiGraph:
    """A model as a networkx graph, before the fusion. Nothing is written.

    A node stands for a node of the main graph or of a graph inside it. It is called like its first
    output, or, if a node of another graph has the same name, like this output and a number: "y",
    "y#2". Its attributes:

    - `name`, `op_type`, `domain`: those of the ONNX node.
    - `blocks`: a tuple of `Block`, the attentions that it belongs to. A fused one holds the nodes
      that its operator replaces, a declined one the nodes around its softmax.

    An edge leads from the node that makes a value to one that reads it. Its attribute `values` maps
    the name of each value that the second reads from the first to its shape as text, such as
    "[batch, 12, seq, 64]", or to "" where the shape is unknown. The attribute `report` of the graph
    is the report of `inspect`.

    Args:
        model: a path, bytes, an `onnx.ModelProto`, an `onnx_ir.Model` or an `ONNXProgram` of
            torch.onnx.export.
        target: as in `inspect`.
        **options: the fields of `Options`.

    Raises:
        InputError: the model or an option is at fault.
        InternalError: the result failed our own checks.
    """
    loaded = load(model)
    result, report = run(loaded, python_options(target, **options))
    regions = Regions.of(loaded.proto, result, most=len(loaded.proto.graph.node))
    blocks: dict[int, tuple[Block, ...]] = {}
    for block in report.blocks:
        for node in regions.around(block)[0].nodes:
            blocks[id(node)] = (*blocks.get(id(node), ()), block)
    shapes = shape_texts(loaded.to_ir())
    made = nx.DiGraph(report=report)
    keys: dict[int, str] = {}
    for node in regions.original.nodes:
        first = next(filter(None, node.output), node.op_type)
        key, number = first, 1
        while key in made:
            number += 1
            key = f"{first}#{number}"
        keys[id(node)] = key
        made.add_node(
            key,
            name=node.name,
            op_type=node.op_type,
            domain=node.domain,
            blocks=blocks.get(id(node), ()),
        )
    for node in regions.original.nodes:
        for value in filter(None, node.input):
            maker = regions.original.maker.get(value)
            if maker is None:
                continue
            if not made.has_edge(keys[id(maker)], keys[id(node)]):
                made.add_edge(keys[id(maker)], keys[id(node)], values={})
            made.edges[keys[id(maker)], keys[id(node)]]["values"][value] = shapes.get(value, "")
    return made
