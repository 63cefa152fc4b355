"""How the result of `optimize` is run: the lines of a program, by the target and the runtime."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import dataclass

from fa_compiler.passes import Options, Report

PROVIDERS = {"ort-cuda": "CUDAExecutionProvider", "ort-dml": "DmlExecutionProvider"}
"""The execution providers of the runtimes that are ONNX Runtime on another processor."""
SOC_VERSION = "Ascend910B2"
"""The product in the example for ATC."""


@dataclass(frozen=True)
class Way:
    """One way to run a file: the language or the kind of program, and the lines for it."""

    name: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class HowToRun:
    """What a file needs, as a sentence, and the ways to run it. The first way is the one for most users."""

    needs: str
    ways: tuple[Way, ...]

    def __str__(self) -> str:
        """The sentence, and each way with its lines below its name."""
        lines = [self.needs]
        for way in self.ways:
            lines += [f"  {way.name}:", *(f"    {line}".rstrip() for line in way.lines)]
        return "\n".join(lines)


def how_to_run(path: str | os.PathLike[str], target: str = Options.target, runtime: str | None = None) -> HowToRun:
    """How to run a fused file.

    Args:
        path: the file that `optimize` wrote.
        target: the target that it was written for.
        runtime: the name of the runtime that the targets "onnx" and "contrib" were narrowed to.
    """
    place = os.fspath(path)
    if target == "ort":
        return _with_library(place)
    return _with_atc(place) if target == "ascend" else _without_library(place, runtime)


def how_to_run_result(path: str | os.PathLike[str], report: Report, options: Options) -> HowToRun | None:
    """How the file of a run is run; None if it holds no fused attention and so is run as before."""
    if not (report.count("fused") or report.count("already_fused")):
        return None
    return how_to_run(path, options.target, None if options.runtime is None else options.runtime.name)


def _with_library(path: str) -> HowToRun:
    return HowToRun(
        "Its kernels are in the library of fa_compiler, which the session has to load. Without the library the file "
        "runs about as fast as the model did. For sessions that cannot load it: --target contrib --runtime ort-cpu.",
        (
            Way("Python", _registered(path)),
            Way(
                "Python, where other code makes the sessions, of this file or of the original",
                ("FA_COMPILER_PROVIDER=1 python script.py    # ONNX Runtime 1.23 or newer",),
            ),
            Way(
                "C++",
                (
                    "options.RegisterCustomOpsLibrary(library);    // `fa-compiler library` prints its path",
                    f"Ort::Session session(env, {_quoted(path)}, options);",
                ),
            ),
        ),
    )


def _registered(path: str) -> tuple[str, ...]:
    return (
        "import onnxruntime",
        "import fa_compiler",
        "options = onnxruntime.SessionOptions()",
        "fa_compiler.register_custom_ops(options)",
        f"session = onnxruntime.InferenceSession({_quoted(path)}, options)",
    )


def _with_atc(path: str) -> HowToRun:
    words = ["fa-compiler", "atc", path, "-o", "folder", "--soc-version", SOC_VERSION]
    command = f'{shlex.join(words)} --input-shape "NAME:1,128"'
    return HowToRun(
        "Its operators are those of Ascend. The next command writes the folder that ATC compiles.",
        (
            Way("for the device", (command,)),
            Way("on this machine's CPU, in Python", _registered(path)),
        ),
    )


def _without_library(path: str, runtime: str | None) -> HowToRun:
    needs = "Its operators are those of ONNX or ONNX Runtime. It needs no library."
    if runtime == "openvino":
        lines = ("import openvino", f'model = openvino.Core().compile_model({_quoted(path)}, "CPU")')
        return HowToRun(needs, (Way("Python", lines),))
    if runtime == "ort-webgpu":
        create = f'await ort.InferenceSession.create({_quoted(path)}, {{executionProviders: ["webgpu"]}});'
        return HowToRun(needs, (Way("JavaScript, with onnxruntime-web", (f"const session = {create}",)),))
    if runtime is not None and not runtime.startswith("ort-"):
        return HowToRun(f"{needs} {runtime} loads it as any other ONNX file.", ())
    provider = PROVIDERS.get(runtime or "")
    providers = "" if provider is None else f', providers=["{provider}", "CPUExecutionProvider"]'
    session = f"session = onnxruntime.InferenceSession({_quoted(path)}{providers})"
    return HowToRun(needs, (Way("Python", ("import onnxruntime", session)),))


def _quoted(path: str) -> str:
    """The path as a string of Python, C++ and JavaScript."""
    return json.dumps(path, ensure_ascii=False)
