"""Judges one model file: fuses it, compares it with the original in ONNX Runtime, and looks at what its masks keep.

A helper process of report.py: one JSON job (`model`, `inputs`, `fused`, `quantised`) and one JSON verdict on each line.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import fa_compiler
from fa_compiler.comparison.compare import COARSE_TOLERANCE
from fa_compiler.lowering.ort import library_path
from fa_compiler.passes.answer.report import INEXPRESSIBLE
from tools.corpus import compare_inputs, compare_run
from tools.corpus.compare_check import coarsest_type
from tools.processes import serve
from tools.sweep import mask_structure

CONSTANT = 4096
"""A fused file whose constants are larger than the original's by more bytes than this has a mask written out."""


STEP = 5e-2
"""How far the outputs of a quantised model may differ. Another order of summation moves some activations by one step of
their 8 bits (0.4 % of the largest), and each layer adds such moves."""

OTHER_ATTENTION = ("talking heads", "QuantizeLinear on the probabilities", "on 8-bit numbers")
"""Parts of the reasons of declines for which there is no operator: heads that are not independent, and scores or
probabilities that are rounded to 8 bits."""
VOUCHED = ("masks-dominate", "binary-masks", "no-empty-rows", "drop-activation-quantisation")
"""What hints let the user vouch for where something is declined or lost: in files of 16 or 8 bits, and where a mask is
computed from integers that may be others than 0 and 1."""


def judge(job: Mapping[str, Any]) -> dict[str, Any]:
    """The verdict on one model.

    `runs` says whether ONNX Runtime runs the original, `refused` why fa_compiler does not take the model, `error` what
    failed in it. `blocks` holds what is not fused or misses something; `problems` are sentences about wrong results.
    """
    verdict: dict[str, Any] = {"error": "", "refused": "", "problems": [], "blocks": [], "kept": 0, "lost": 0}
    verdict.update(softmaxes=0, fused=0, declined=0, inexpressible=0, lost_at=[], growth=0, constants=0)
    verdict.update(vouched_fused=0, vouched_kept=0)
    feeds = compare_run.load_inputs(job["inputs"])
    verdict["runs"] = original_runs(job, feeds)
    try:
        report = fa_compiler.optimize(job["model"], job["fused"]).report
    except fa_compiler.InputError as error:
        return {**verdict, "refused": str(error)[:400]}
    except Exception as error:  # any failure is a finding
        return {**verdict, "error": f"{type(error).__name__}: {error}"[:400]}
    count(verdict, report)
    if not verdict["runs"]:
        return verdict
    if verdict["fused"]:
        compared(verdict, job)
        original, fused = onnx.load(job["model"]), onnx.load(job["fused"])
        verdict["growth"] = Path(job["fused"]).stat().st_size - Path(job["model"]).stat().st_size
        verdict["constants"] = constant_bytes(fused) - constant_bytes(original)
        structure = mask_structure.structures(fused, feeds)
        verdict["kept"], verdict["lost"] = structure.pop("kept"), structure.pop("lost")
        verdict["lost_at"] = list(structure)
    vouch(verdict, job, feeds)
    return verdict


def vouch(verdict: dict[str, Any], job: Mapping[str, Any], feeds: dict[str, np.ndarray]) -> None:
    """Count what is fused and kept if the user vouches for `VOUCHED`, where that could be more. Nothing is compared:
    dropping the rounding to 8 bits changes results, as the user wants."""
    verdict["vouched_fused"], verdict["vouched_kept"] = verdict["fused"], verdict["kept"]
    if not (verdict["declined"] or verdict["inexpressible"] or verdict["lost"]):
        return
    result = fa_compiler.optimize(job["model"], assume=VOUCHED)
    verdict["vouched_fused"] = result.report.count("fused")
    if verdict["vouched_fused"]:
        verdict["vouched_kept"] = mask_structure.structures(result.model, feeds)["kept"]


def original_runs(job: Mapping[str, Any], feeds: dict[str, np.ndarray]) -> bool:
    """Does ONNX Runtime run the original?"""
    try:
        compare_run.session_run(job["model"], feeds, "off", None)
    except Exception:  # of ONNX Runtime: they share no class
        return False
    return True


def count(verdict: dict[str, Any], report: Any) -> None:
    """Count the blocks of a report, and keep those that are not fused."""
    for block in report.blocks:
        if block.kind in ("backward", "convolution"):
            continue
        verdict["softmaxes"] += 1
        if block.status == "fused":
            verdict["fused"] += 1
        elif block.status == "declined":
            verdict["inexpressible" if is_inexpressible(block) else "declined"] += 1
        if block.status != "fused" or block.missed:
            verdict["blocks"].append(block.to_json())


def is_inexpressible(block: Any) -> bool:
    """Is there no operator that could take a declined attention?"""
    return block.code in INEXPRESSIBLE or any(reason in block.reason for reason in OTHER_ATTENTION)


def compared(verdict: dict[str, Any], job: Mapping[str, Any]) -> None:
    """Compare on the inputs of the export and, as far as the original takes them, on others (compare_inputs.py)."""
    original = onnx.load(job["model"])
    coarsest = coarsest_type(original)
    runs = {"original": job["model"], "optimised": job["fused"], "library": str(library_path()), "coarsest": coarsest}
    step = STEP if job["quantised"] else 0.0
    rounds = [("", job["inputs"], step)]
    for variant, words in enumerate(compare_inputs.VARIANTS):
        place = str(Path(job["fused"]).with_suffix(f".{variant}.npz"))
        feeds = compare_run.load_inputs(job["inputs"])
        np.savez(place, **compare_inputs.vary(original, feeds, variant))
        rounds.append((f"({words}) ", place, max(step, COARSE_TOLERANCE if "masked everywhere" in words else 0.0)))
    for words, inputs, step in rounds:
        answer = compare_run.run({**runs, "inputs": inputs, "lenient": True, "step": step})
        if answer["original_error"] is None:
            verdict["problems"] += [words + problem for problem in answer["problems"]]


def constant_bytes(model: onnx.ModelProto) -> int:
    """The bytes of a model's initializers and Constants."""
    tensors = list(model.graph.initializer)
    tensors += [each.t for node in model.graph.node if node.op_type == "Constant" for each in node.attribute]
    return sum(tensor.ByteSize() for tensor in tensors)


if __name__ == "__main__":
    serve(judge, {"fa_compiler": fa_compiler.__version__})
