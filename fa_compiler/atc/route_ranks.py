"""`--sequence-parallel`: one `.air` for each rank, and the two files with which ATC compiles them
together.

The fields of these files are those that the documents of ATC and DataFlow describe (CANN 8.0 to
8.5). They name one node with a device for each rank. Only the user knows the address and port of
the node, and which devices it has.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from fa_compiler import op_registry
from fa_compiler.atc.job import Job, RouteResult
from fa_compiler.atc.request import Parallel, Request
from fa_compiler.atc.route_air import convert, inputs_of, operators_of
from fa_compiler.checks.operators import registry_nodes
from fa_compiler.errors import InputError
from fa_compiler.lowering.ascend.graph import Model
from fa_compiler.op_registry.errors import UnknownVariant
from fa_compiler.op_registry.products import product
from fa_compiler.parallel.sharding import check_request, report_json, told
from fa_compiler.passes.answer.options import NON_FINITE_SCORES
from fa_compiler.passes.answer.report import Block, Missed
from fa_compiler.passes.parallel.options import ParallelOptions
from fa_compiler.passes.parallel.places import Refusal
from fa_compiler.passes.parallel.rank_attention import JOIN
from fa_compiler.passes.parallel.rank_emitter import Rank
from fa_compiler.passes.parallel.rank_graph import NO_TRAINING, length_of, rank_graph
from fa_compiler.passes.parallel.shard import ShardReport, shard
from fa_compiler.passes.rewrite.node_view import node_view
from fa_compiler.passes.values.shapes import analyse
from fa_compiler.pipeline.fusing import without_collections
from fa_compiler.protos.subgraphs import graph_inputs

FOLDER = "ranks"
OUTPUT = "model.air"
"""What `atc.sh` names its result after; there is no file of this name."""
CLUSTER = "cluster_config.json"
RELATION = "model_relation_config.json"
NODE_TYPE = "ATLAS900"
"""The type of a node, as the documents give it."""
MEMORY = 64 << 30
"""The bytes of a device whose memory is not known: what the documents give for A2."""
IN_ONE_NODE = 8
"""A node may have fewer devices than ranks if there are more than these."""


def check(request: Request, parallel: Parallel) -> None:
    """Raise InputError for a request of several ranks that no model can satisfy."""
    if parallel.ranks == 1:
        raise InputError("--sequence-parallel 1 is one model: leave it out")
    check_request(parallel.ranks, parallel.method, least=2)
    if request.route != "air":
        raise InputError(f"--sequence-parallel goes with --route air, not {request.route}")
    if request.gears:
        raise InputError(
            "--sequence-parallel needs fixed sizes, so it does not go with --dynamic-dims"
        )
    if request.single_op:
        raise InputError(
            "--single-op does not go with --sequence-parallel; write the operators of the model without it"
        )
    if not _has(request.soc.name, op_registry.GRAPH_OP, None):
        raise InputError(
            f"--sequence-parallel needs {op_registry.GRAPH_OP}, which {request.soc.name} does not have"
        )


def check_sizes(request: Request) -> None:
    """Raise InputError for an input with an open size."""
    for name, sizes in request.sizes.items():
        if not all(isinstance(size, int) for size in sizes):
            raise InputError(
                f"--sequence-parallel needs fixed sizes, and {name!r} has an open one; give a number for each size "
                "with --input-shape"
            )


def build(job: Job) -> RouteResult:
    """Write the folder of the ranks' models and the two files.

    Raises:
        InputError: the model cannot be divided, the number of tokens cannot be divided by the
            ranks, a node has no counterpart in GE, or the calls of a rank break a constraint of the
            product.
        InternalError: a written file fails our own checks.
    """
    parallel = job.request.parallel
    assert parallel is not None
    sizes = {
        name: [size for size in shape if isinstance(size, int)]
        for name, shape in job.request.sizes.items()
    }
    no_ring = _no_ring(job.request)
    options = ParallelOptions(
        parallel.ranks, parallel.method, parallel.axes, sizes=sizes, no_ring=no_ring
    )
    (job.folder / FOLDER).mkdir()
    first: Model | None = None
    notes: dict[str, None] = {}
    with without_collections():
        try:
            if job.report.gradients:
                raise Refusal(NO_TRAINING, None)
            model, report = shard(job.model(), options)
            if report.caches:
                raise Refusal(
                    "caches have no form for single ranks; shard writes one for ranks of MPI", None
                )
            length = length_of(report, sizes)
            ranks = [
                Rank(number, report.ranks, report.order, length) for number in range(report.ranks)
            ]
            for rank in ranks:
                own = rank_graph(model, report, rank, sizes, job.request.cann)
                _verify(job, own)
                graph, found = convert(job, own, job.folder / FOLDER / _file(rank))
                first = first or graph
                notes.update(dict.fromkeys(found))
        except Refusal as refusal:
            raise InputError(told(job.loaded, refusal, job.report)) from None
    assert first is not None  # there are two ranks at least
    known = _sizes_by_name(job.loaded.proto, sizes)
    job.report.blocks = [_with_numbers(block, known) for block in job.report.blocks]
    _write(job.folder / CLUSTER, _cluster(job.request, ranks))
    _write(job.folder / RELATION, _relation(ranks))
    details = {
        "operators": operators_of(first),
        "parallel": {**report_json(report), "models": [_described(rank) for rank in ranks]},
    }
    words = (
        "--distributed_cluster_build=1",
        f"--cluster_config={CLUSTER}",
        f"--shard_model_dir={FOLDER}",
        f"--model_relation_config={RELATION}",
    )
    return RouteResult(
        OUTPUT,
        1,
        inputs_of(first),
        details=details,
        notes=[*_lines(report), *notes],
        before=_before(len(ranks)),
        cluster=words,
    )


def _sizes_by_name(proto: onnx.ModelProto, sizes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """The sizes of the dimensions that inputs name."""
    return {
        dim.dim_param: size
        for value in graph_inputs(proto)
        for dim, size in zip(
            value.type.tensor_type.shape.dim, sizes.get(value.name, ()), strict=False
        )
        if dim.dim_param
    }


def _with_numbers(block: Block, known: Mapping[str, int]) -> Block:
    """A block of the report, in which products of known sizes, and sums of them, are numbers. The
    fusion has seen the model with open sizes, by whose names the sequence is found."""
    if not known or not block.missed:
        return block
    name = "|".join(map(re.escape, sorted(known, key=len, reverse=True)))
    terms = re.compile(rf"(?<![\w*'.])(?:\d+\*)?(?:{name})(?:\*(?:{name}))*(?![\w*('.])")

    def number(term: re.Match[str]) -> str:
        return str(math.prod(known.get(factor) or int(factor) for factor in term[0].split("*")))

    def count(part: re.Match[str]) -> str:
        text = terms.sub(number, part[0])
        if re.fullmatch(r" *\d+(?: [+-] \d+)+", text) is None:
            return text
        return (
            f" {sum(int(term.replace(' ', '')) for term in re.findall(r'(?:[+-] )?[0-9]+', text))}"
        )

    def told(missed: Missed) -> Missed:
        return replace(
            missed, reason=re.sub(r"[^:;]*(?= (?:bytes|elements) are )", count, missed.reason)
        )

    return replace(block, missed=tuple(map(told, block.missed)))


def _before(ranks: int) -> list[str]:
    fields = "ipaddr, port, node_type, resource_type and device_id"
    steps = [f"edit {CLUSTER}: {fields} are examples, and only you know your own"]
    if ranks > IN_ONE_NODE:
        steps.append(
            f"if your nodes have fewer than {ranks} devices, write an entry of cluster_nodes for each node, and in "
            f"{RELATION} the cluster, the node and the device of each rank (deploy_device_id_list)"
        )
    return steps


def _has(soc: str, op_type: str, cann: str | None) -> bool:
    """Does the CANN version have the operator, and is it registered for the product?"""
    try:
        op_registry.get(op_type, cann)
    except UnknownVariant:
        return False
    spec = op_registry.get(op_type)  # older prototypes do not tell the products
    return any(spec.product(name) is not None for name in product(soc).socs)


def _no_ring(request: Request) -> str:
    """Why no attention may be computed in a ring; "" if it may."""
    soc, cann = request.soc.name, request.cann
    if not _has(soc, JOIN, cann):
        return f"{soc}{f' with CANN {cann}' if cann else ''} has no {JOIN}"
    if NON_FINITE_SCORES in request.assume:
        return f"scores may be infinite, by --assume {NON_FINITE_SCORES}"
    return ""


def _verify(job: Job, model: ir.Model) -> None:
    """Check the operators of a rank against the constraints of the product. They have other sizes
    than those of the whole model, which were checked before."""
    info = analyse(model)
    soc, cann = job.request.soc.name, job.request.cann
    for node in registry_nodes(model):
        for broken in op_registry.verify(node_view(node, info), soc, cann):
            raise InputError(
                f"{job.loaded.name}: on a rank, {node.op_type} {node.name!r} {broken.refusal(soc)}; try another "
                "--method or another number of ranks"
            )


def _file(rank: Rank) -> str:
    return f"rank_{rank.number}.air"


def _described(rank: Rank) -> dict[str, Any]:
    """A rank's model, and the first and the last token of each of its chunks."""
    return {
        "file": f"{FOLDER}/{_file(rank)}",
        "tokens": [[start, stop - 1] for start, stop in rank.chunks],
    }


def _lines(report: ShardReport) -> list[str]:
    methods = Counter(choice.method for choice in report.choices)
    attentions = ", ".join(f"{count} by {method}" for method, count in methods.items()) or "none"
    return [
        f"{report.ranks} ranks, {report.order} order; attentions: {attentions}",
        "report.json tells which tokens a rank has, and which inputs and outputs are in parts",
    ]


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8", newline="\n")


def _cluster(request: Request, ranks: Sequence[Rank]) -> dict[str, Any]:
    """The devices, as --cluster_config takes them: one node with a device for each rank."""
    soc, memory = request.soc.name, request.soc.memory or MEMORY
    devices = [{"item_id": rank.number, "device_id": rank.number} for rank in ranks]
    node = {
        "node_id": 0,
        "node_type": NODE_TYPE,
        "ipaddr": "127.0.0.1",
        "port": 2509,
        "is_local": True,
        "item_list": devices,
    }
    return {
        "cluster": [{"cluster_nodes": [node]}],
        "node_def": [
            {
                "node_type": NODE_TYPE,
                "resource_type": "Aarch",
                "support_links": "[HCCS,PCIE,ROCE]",
                "item_type": soc,
                "inter_item_memory_access_mode": "[NUMA]",
                "item": [{"item_type": soc}],
            }
        ],
        "item_def": [
            {
                "item_type": soc,
                "resource_type": "Ascend",
                "memory": f"[DDR:{memory >> 30}GB]",
                "aic_type": f"[DAVINCI_V100:{request.soc.ai_cores}]",
            }
        ],
    }


def _relation(ranks: Sequence[Rank]) -> dict[str, Any]:
    """Which model runs on which device, and the table of the ranks, as --model_relation_config
    takes them. The group of all ranks follows from the table; groups of some ranks would be named
    here, too."""
    numbers = [(_file(rank), rank.number) for rank in ranks]
    return {
        "deploy_config": [
            {"submodel_name": file, "deploy_device_id_list": f"0:0:{number}"}
            for file, number in numbers
        ],
        "model_name_to_instance_id": [
            {"submodel_name": file, "model_instance_id": number} for file, number in numbers
        ],
        "rank_table": [{"rank_id": number, "model_instance_id": number} for _, number in numbers],
    }
