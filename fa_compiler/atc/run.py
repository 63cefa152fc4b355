"""One run of `fa-compiler atc`: check the request, set the sizes, optimise, write the model, add
the other files."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from pathlib import Path
from typing import Unpack

import onnx

from fa_compiler.atc import route_air, route_onnx, route_ranks
from fa_compiler.atc.job import Job, Route, RouteResult, check_inference
from fa_compiler.atc.request import AtcKeywords, Parallel, Request, request_of
from fa_compiler.atc.script import PRECISIONS, command, script
from fa_compiler.atc.shapes import (
    check_gears,
    check_symbols,
    complete,
    extreme_groups,
    fix,
    gears_of_model,
)
from fa_compiler.atc.single import SCRIPT as SINGLE_OPS
from fa_compiler.atc.single import write_all
from fa_compiler.atc.sizes import atc_text
from fa_compiler.errors import InputError
from fa_compiler.model_files.destination import path_of
from fa_compiler.model_files.folder import REPORT, check_target, new_folder
from fa_compiler.model_files.reading import ModelLike, load, refuse_sharded
from fa_compiler.op_registry.errors import UnknownProduct, suggestion
from fa_compiler.op_registry.products import PRODUCTS, product
from fa_compiler.op_registry.soc import SocVersion
from fa_compiler.passes import Options, Report
from fa_compiler.passes.answer.report import Progress
from fa_compiler.pipeline.fusing import copy_of
from fa_compiler.pipeline.fusing import run as optimise
from fa_compiler.pipeline.keywords import names_of_python, takes
from fa_compiler.pipeline.options import make_options
from fa_compiler.version import __version__

SCRIPT = "atc.sh"
AIR, NPU = "air", "npu"
"""The route that uses operators of ATC's own parser."""
SCHEMA = 1

ROUTES: dict[str, Route] = {
    AIR: route_air.build,
    "onnx": route_onnx.build,
    NPU: route_onnx.build_npu,
}
"""The routes from an optimised model to ATC, by the value of --route; the first is the default.
**Add a route**: one function, one row."""


@takes(AtcKeywords, Options, Request, Parallel)
def compile_for_atc(
    model: ModelLike,
    output: str | os.PathLike[str],
    soc_version: str,
    **options: Unpack[AtcKeywords],
) -> Report:
    """Fuse the attention of a model for an Ascend product, and write a folder that ATC compiles.

    Args:
        model: a path, bytes, an `onnx.ModelProto`, an `onnx_ir.Model` or an `ONNXProgram` of
            torch.onnx.export.
        output: a new or empty folder.
        soc_version: the product as ATC names it, such as "Ascend910B2".
        **options: the fields of `Request`.

    Raises:
        InputError: the request is impossible, or the model or the folder is at fault; nothing was
            written.
        InternalError: the result failed our own checks; nothing was written.
    """
    with names_of_python(Options, Request, Parallel):
        report, _ = run(model, path_of(output), request_of(soc_version, **options))
    return report


def run(
    model: ModelLike, output: Path, request: Request, progress: Progress | None = None
) -> tuple[Report, RouteResult]:
    """Write the folder for a model. It appears only if everything succeeded.

    Raises:
        InputError: the request is impossible, or the model or the folder is at fault; nothing was
            written.
        InternalError: the result failed our own checks; nothing was written.
    """
    check_request(request)
    check_target(output)
    parallel = request.parallel
    options = make_options(
        "ascend",
        soc_version=request.soc.name,
        cann=request.cann,
        assume=request.assume,
        only=request.only,
        join_weights=request.join_weights,
    )
    options = dataclasses.replace(
        options, parser_plugins=request.route == NPU, divided=parallel is not None
    )
    loaded = load(model)
    refuse_sharded(loaded.proto, loaded.name)
    _check_types(loaded.proto, request.soc, loaded.name)
    check_gears(request.gears, request.sizes, 256 if request.soc.has_hifloat8 else 100)
    fixed = fix(loaded.proto, request.sizes, loaded.name)
    sizes = complete(fixed, request.sizes, request.gears, loaded.name, may_be_open=parallel is None)
    # the ranks' graphs get their sizes after the sequence was found by the names of its sizes
    if parallel is None:
        loaded = dataclasses.replace(loaded, proto=fixed)
    gears = gears_of_model(request.gears, request.sizes, sizes)
    check_symbols(fixed, sizes, gears)
    request = dataclasses.replace(request, sizes=sizes, gears=gears)
    if parallel is not None:
        route_ranks.check_sizes(request)
    with new_folder(output) as folder:
        proto, report = optimise(loaded, options, progress)
        job = Job(request, loaded, copy_of(loaded) if proto is None else proto, report, folder)
        for group in extreme_groups(sizes, gears) if gears else ():
            check_inference(job, group)
        built = (ROUTES[request.route] if parallel is None else route_ranks.build)(job)
        words = command(request, built)
        what = built.model if parallel is None else "the models of the ranks"
        title = f"Compiles {what} for {request.soc.name}: an offline model (.om) appears in this folder."
        _script(folder / SCRIPT, script(title, [words], built.before))
        if request.single_op:
            write_all(built, folder, request)
        text = json.dumps(_report(job, built, words), indent=2, ensure_ascii=False)
        (folder / REPORT).write_text(text + "\n", encoding="utf-8", newline="\n")
        if loaded.weights is not None:
            loaded.weights.check()
    return report, built


def next_steps(output: Path, built: RouteResult) -> list[str]:
    """What the user does next with a folder that was written, as lines."""
    last = "where CANN is installed, run"
    alone = []
    if (output / SINGLE_OPS).exists():
        alone.append(f"to compile each fused operator alone, run ./{SINGLE_OPS}")
    if not built.before and not alone:
        return [f"next: {last} {shlex.quote((output / SCRIPT).as_posix())}"]
    steps = [*built.before, f"{last} ./{SCRIPT}", *alone]
    return [f"next, in {output}:", *(f"  {number}. {step}" for number, step in enumerate(steps, 1))]


def check_request(request: Request) -> None:
    """Raise InputError for a request that no model can satisfy."""
    if request.route not in ROUTES:
        raise InputError(f"unknown route {request.route!r}{suggestion(request.route, ROUTES)}")
    soc, precision = request.soc, request.precision
    try:
        product(soc.name)
    except UnknownProduct:
        families = ", ".join(f"{entry.name} ({entry.title})" for entry in PRODUCTS)
        raise InputError(
            f"no attention operators are known for {soc.name}; known families are {families}"
        ) from None
    if precision not in PRECISIONS:
        raise InputError(
            f"unknown precision {precision!r}; ATC's --precision_mode_v2 takes {', '.join(PRECISIONS)}"
        )
    if precision == "mixed_bfloat16" and not soc.has_bfloat16:
        raise InputError(
            f"{soc.name} has no bfloat16, which --precision {precision} needs; use origin or mixed_float16"
        )
    if precision in ("cube_hif8", "mixed_hif8") and not soc.has_hifloat8:
        raise InputError(
            f"{soc.name} has no HiFloat8, which --precision {precision} needs; use origin or fp16"
        )
    if request.parallel is not None:
        route_ranks.check(request, request.parallel)


def _check_types(proto: onnx.ModelProto, soc: SocVersion, name: str) -> None:
    if soc.has_bfloat16:
        return
    for tensor in (
        *proto.graph.initializer,
        *(value.type.tensor_type for value in proto.graph.input),
    ):
        number = tensor.data_type if isinstance(tensor, onnx.TensorProto) else tensor.elem_type
        if number == onnx.TensorProto.BFLOAT16:
            raise InputError(
                f"{name} holds bfloat16, which {soc.name} does not have; convert the model to float16"
            )


def _report(job: Job, built: RouteResult, words: list[str]) -> dict[str, object]:
    request = job.request
    return {
        "schema": SCHEMA,
        "fa_compiler": __version__,
        "model": job.loaded.name,
        "route": request.route,
        "soc_version": request.soc.name,
        "cann": request.cann or "newest",
        "precision": request.precision,
        "command": words,
        "files": [],
        "inputs": [
            {
                "name": entry.name,
                "type": entry.dtype,
                "shape": atc_text({entry.name: entry.sizes}).rpartition(":")[2],
            }
            for entry in built.inputs
        ],
        **built.details,
        "before": list(built.before),
        "notes": list(built.notes),
        "fusion": job.report.to_json(),
    }


def _script(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")
    path.chmod(0o755)
