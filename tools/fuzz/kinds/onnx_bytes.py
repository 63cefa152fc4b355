"""Damaged ONNX models: every command that takes a model ends in a result or in one error."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import onnx
import onnxruntime as ort

from fa_compiler.comparison.feeds import random_inputs
from fa_compiler.errors import InputError
from fa_compiler.lowering.ascend.onnx_route.check import check_model
from fa_compiler.model_files.inline_weights import make_inline
from fa_compiler.model_files.reading import load_bytes
from fa_compiler.model_files.writing import relocate
from fa_compiler.pipeline.fusing import run
from fa_compiler.pipeline.options import make_options
from tools.fuzz.damage import Damaged, Fault, Rng, any_bytes, command, message
from tools.fuzz.difference import Feed, session
from tools.fuzz.oracle import Judge
from tools.fuzz.originals import EXTERNAL, EXTERNAL_BYTES, models

OPTIONS = (
    make_options(),
    make_options(),
    make_options(assume=("no-empty-rows", "masks-dominate", "unbroken-sequences")),
    make_options(in_place_caches=True),
    make_options("ascend", soc_version="A2"),
)
IN_FILES = 0.02
"""Share of the models that go through a file and the command line."""
JUDGED = 0.05
"""Share of the fused models that are run beside the original."""
LOADED = 0.25
"""Share of the fused models that ONNX Runtime has to load, where it loads the original."""


class OnnxBytes(Damaged):
    """`optimize`, `inspect`, `atc` and `air check` of a damaged model, mostly in memory."""

    suffix = ".onnx"
    unread = "is not an ONNX model"
    innocent = ("original_loads", "run_original")

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="fuzz-onnx-"))
        (self.folder / EXTERNAL).write_bytes(bytes(EXTERNAL_BYTES))
        self.file, self.made = self.folder / "damaged.onnx", 0

    def originals(self, rng: Rng) -> tuple[bytes, bytes]:
        return rng.choice(models()), rng.choice(models())

    def damaged(self, data: bytes, donor: bytes, rng: Rng) -> bytes:
        if rng.random() < 0.1:
            return any_bytes(data, donor, rng)
        return message(data, onnx.ModelProto.DESCRIPTOR, donor, rng)

    def read(self, data: bytes, rng: Rng) -> str:
        if rng.random() < IN_FILES:
            return self._commanded(data, rng)
        options = rng.choice(OPTIONS)
        if rng.random() < 0.1:
            _checked(data, self.folder)
        loaded = load_bytes(data, self.folder)
        proto, report = run(loaded, options)
        json.dumps(report.to_json()).encode()
        words = sorted({f"{block.status} {block.code}" for block in report.blocks})
        if proto is None:
            return " ".join(words)
        relocate(proto, loaded.relative)
        make_inline(proto, loaded.weights)
        if options is OPTIONS[0]:
            fused = proto.SerializeToString()
            if rng.random() < LOADED and b"external" not in data and original_loads(data):
                _loads(fused)
                if rng.random() < JUDGED / LOADED:
                    _same(loaded.proto)
        return " ".join(["fused", *words])

    def _commanded(self, data: bytes, rng: Rng) -> str:
        self.file.write_bytes(data)
        self.made += 1
        out, path = self.folder / "out", str(self.file)
        match rng.randrange(6):
            case 0:
                return command("inspect", path, "--explain")
            case 1:
                return command("air", "check", path)
            case 2:
                return command("optimize", path, "-o", str(out.with_suffix(".onnx")), "--report", f"{out}.json")
            case _:
                out = self.folder / f"out{self.made}"
                route = rng.choice(("air", "onnx", "npu"))
                words = ("--soc-version", "Ascend910B2", "--route", route, "--quiet")
                sizes = rng.choice(((), ("--single-op",)))
                return command("atc", path, "-o", str(out), *words, *sizes)


def _checked(data: bytes, folder: Path) -> None:
    """`air check` of a model."""
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except Exception:  # protobuf's: load_bytes says so
        return
    for finding in check_model(model, folder):
        str(finding).encode("utf-8", "surrogateescape")


def original_loads(data: bytes) -> bool:
    """Whether ONNX Runtime loads a model, with optimisations, too, which find shapes that contradict each other. A
    process that ends here shows a fault of ONNX Runtime, not of ours."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    levels = ort.GraphOptimizationLevel.ORT_DISABLE_ALL, ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    try:
        for options.graph_optimization_level in levels:
            ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception:  # its exceptions share no class
        return False
    return True


def _loads(fused: bytes) -> None:
    try:
        session(onnx.ModelProto.FromString(fused), custom=True)
    except Exception as error:
        text = "".join("#" if char.isdigit() else char for char in " ".join(str(error).split())[:100])
        raise Fault(f"the fused model does not load: {text}", str(error)) from None


def _same(model: onnx.ModelProto) -> None:
    """Run the model and what is made of it."""
    try:
        feeds = [Feed("random", random_inputs(model, "model"), lenient=True)]
    except InputError:
        return
    finding = Judge(model, feeds, hides_nan=True).outcome().finding
    if finding is not None:
        raise Fault(finding.title, finding.detail)
