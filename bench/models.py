"""Measures whole models, original and fused: time, where it goes, the making of a session, the first run, memory.

    python -m bench models --models DIR --export-python TORCH/bin/python [--peer-python OPENVINO/bin/python]
    python -m bench models --models DIR --layers 2 --names "llama|step"    only so many layers, of full width

The models are exported once into DIR, with random weights, by an interpreter that has torch and transformers
(tools/makers/export_models.py): BERT-base, GPT-2 small, ViT-B, Whisper small and Llama 3.2 1B. They process one
sentence, image or sound at a time. `tokens` of a model whose name ends in -step are the cached ones, to which it adds
one. Each model runs in these variants, each in its own process, round by round:

    ort             the original, with all optimisations of ONNX Runtime
    ort-optimizer   optimised by onnxruntime.transformers, from an export by TorchScript where there is one, because
                    that is what it knows; the last line has the number of attention operators that it made
    ours            fused by fa_compiler
    ours-alone      the same file in ONNX Runtime without our library, where the bodies of the fused nodes run
    ours-in-place   the same with --in-place-caches, for the steps
    ours-contrib    fused for ONNX Runtime's own operators, which need no library (--target contrib --runtime ort-cpu)
    openvino        the original in OpenVINO, if an interpreter has it
    ours-openvino   fused into ONNX's Attention, in OpenVINO (--target onnx --runtime openvino)

The results are compared with those of `ort`. ONNX Runtime's profile tells where `ort` and `ours` spend their time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from bench.model_tables import document, fused_parts, original_parts
from bench.speed.tables import number
from bench.speed.workers import TIMEOUT, interpreters
from tools.processes import ROOT, HelperError, Server, module

OUT = Path("build/bench")
ROUNDS = 5
_CHUNK = 1 << 24
PADDING = 8
"""One part of so many of a sentence is padding."""


@dataclass(frozen=True)
class Model:
    """A model: its name, heads and channels for onnxruntime.transformers, and the numbers of tokens."""

    kind: str
    heads: int
    hidden: int
    lengths: tuple[int, ...]


_TEXT, _PAST = (128, 512, 2048, 4000), (128, 1024, 4000)
MODELS = {
    "bert-base": Model("bert", 12, 768, _TEXT),
    "gpt2": Model("gpt2", 12, 768, _TEXT),
    "gpt2-step": Model("gpt2", 12, 768, _PAST),
    "vit-b-224": Model("vit", 12, 768, (197,)),
    "vit-b-512": Model("vit", 12, 768, (1025,)),
    "whisper-encoder": Model("bart", 12, 768, (1500,)),
    "whisper-decoder": Model("bart", 12, 768, (4, 448)),
    "whisper-step": Model("bart", 12, 768, (16, 440)),
    "llama-1b": Model("gpt2", 32, 2048, _TEXT),
    "llama-1b-step": Model("gpt2", 32, 2048, _PAST),
}

FUSED: dict[str, tuple[str, tuple[str, ...]]] = {
    "ours": ("ort", ()),
    "ours-alone": ("ort-alone", ()),
    "ours-in-place": ("ort", ("--in-place-caches",)),
    "ours-contrib": ("ort", ("--target", "contrib", "--runtime", "ort-cpu")),
    "ours-openvino": ("openvino", ("--target", "onnx", "--runtime", "openvino")),
}
"""The variants that fa_compiler makes: the runtime that they run in, and the options."""


class NotPrepared(Exception):
    """A model could not be exported or fused. The text is the message of the tool."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    head, _, rest = (__doc__ or "").partition("\n\n")
    made = argparse.ArgumentParser(prog="python -m bench models", description=head, epilog=rest,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    made.add_argument("--models", type=Path, required=True, metavar="DIR", help="where the exported models are kept")
    made.add_argument("--export-python", metavar="PYTHON", help="has torch, transformers, onnxscript")
    made.add_argument("--peer-python", action="append", default=[], metavar="PYTHON", help="has OpenVINO")
    made.add_argument("--names", type=re.compile, default=re.compile(""), metavar="REGEX", help=", ".join(MODELS))
    made.add_argument("--variants", type=re.compile, default=re.compile(""), metavar="REGEX",
                      help="only these, of those above")  # fmt: skip
    made.add_argument("--layers", type=int, metavar="N", help="at most so many layers; default: all")
    made.add_argument("--kept", action="store_true", help="takes the fused files of an earlier run, if they are there")
    made.add_argument("--longest", type=int, default=4096, metavar="N", help="leaves out more tokens than these")
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--rounds", type=int, default=ROUNDS, help="fewer where one takes long; default: %(default)s")
    made.add_argument("--out", type=Path, default=OUT, metavar="DIR", help=f"models.json, models.md; default: {OUT}")
    return made


def prepare(name: str, folder: Path, arguments: argparse.Namespace) -> dict[str, tuple[str, str]]:
    """Exports and fuses the missing variants; returns (runtime, file) by variant.

    Raises NotPrepared.
    """
    original, wanted = folder / "model.onnx", arguments.variants
    if not original.exists():
        if arguments.export_python is None:
            raise NotPrepared(f"{original} does not exist, and cannot be made without --export-python")
        _exported(name, folder, arguments)
    files = {"ort": ("ort", original), "openvino": ("openvino", original)}
    for variant, (runtime, options) in FUSED.items():
        if not wanted.search(variant) or (variant == "ours-in-place" and not name.endswith("-step")):
            continue
        file = folder / variant / "model.onnx"
        if not (file.exists() and arguments.kept):
            file.parent.mkdir(exist_ok=True)
            words = ["optimize", str(original), "-o", str(file), "--quiet", *options]
            _made([sys.executable, "-m", "fa_compiler", *words])
        files[variant] = (runtime, file)
    if wanted.search("ort-optimizer") and (theirs := _optimised(name, folder, arguments)) is not None:
        files["ort-optimizer"] = ("ort", theirs)
    return {variant: (runtime, str(file)) for variant, (runtime, file) in files.items() if wanted.search(variant)}


def _exported(name: str, folder: Path, arguments: argparse.Namespace, *options: str) -> None:
    """Exports a model into a folder. Raises NotPrepared."""
    words = ["-m", "tools.makers.export_models", str(folder), name, *options]
    layers = ["--layers", str(arguments.layers)] if arguments.layers else []
    _made([arguments.export_python, *words, *layers])


def _optimised(name: str, folder: Path, arguments: argparse.Namespace) -> Path | None:
    """The model as onnxruntime.transformers optimises it; None if that fails.

    outcome.txt beside it holds the number of attention operators that it made, or its error.
    """
    file, known = folder / "optimizer" / "model.onnx", folder / "torchscript" / "model.onnx"
    outcome = file.with_name("outcome.txt")
    if not outcome.exists():
        file.parent.mkdir(exist_ok=True)
        if arguments.export_python and not known.exists():
            with contextlib.suppress(NotPrepared):  # the older exporter does not know every operator
                _exported(name, known.parent, arguments, "--torchscript")
        model = MODELS[name]
        given = str(known if known.exists() else folder / "model.onnx")
        words = ["optimise", model.kind, str(model.heads), str(model.hidden), given, str(file)]
        try:
            outcome.write_text(_made([sys.executable, "-m", "bench.model_worker", *words]).split()[-1])
        except NotPrepared as failure:
            outcome.write_text(str(failure))
    return file if outcome.read_text().isdigit() else None


def _made(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise NotPrepared(f"{' '.join(command[1:4])} failed: {last}")
    return done.stdout


def feeds(model: onnx.ModelProto, length: int) -> dict[str, np.ndarray]:
    """Random inputs of one sentence, image or sound with so many tokens, or with so many cached ones.

    The last part of a sentence is padding. A cached one has none, because each step of a generation is a token.
    """
    rng = np.random.default_rng(length)
    step = any(value.name == "past.0" for value in model.graph.input)
    sizes = {"batch": 1, "sequence": length, "past": length}
    given: dict[str, np.ndarray] = {}
    for value in model.graph.input:
        kind = value.type.tensor_type
        # The exporters name the tokens of the mask as they like: in a step, they are the cached ones and the new one.
        shape = [dim.dim_value or sizes.get(dim.dim_param, length + 1) for dim in kind.shape.dim]
        if value.name == "attention_mask":
            given[value.name] = np.ones(shape, np.int64)
            given[value.name][:, length if step else length - length // PADDING :] = int(step)
        elif kind.elem_type == onnx.TensorProto.INT64:
            given[value.name] = rng.integers(0, 1000, shape)
        else:
            given[value.name] = rng.standard_normal(shape, np.float32)
    return given


@contextlib.contextmanager
def servers(
    variants: Mapping[str, tuple[str, str]], pythons: Mapping[str, str], threads: int, absent: dict[str, str]
) -> Iterator[dict[str, Server]]:
    """A running worker for each variant. `absent` gets the reasons for the variants without a worker.

    The files are read once before, so that no session waits for the disk.
    """
    with contextlib.ExitStack() as stack:
        running = {}
        for name, (runtime, file) in variants.items():
            if runtime not in pythons:
                continue
            for part in Path(file).parent.glob(f"{Path(file).name}*"):
                with part.open("rb") as opened:
                    while opened.read(_CHUNK):
                        pass
            command = module(pythons[runtime], "bench.model_worker", runtime, str(threads), file)
            server = stack.enter_context(Server(command, TIMEOUT))
            try:
                server.start()
                running[name] = server
            except HelperError as error:
                absent[name] = str(error)
        yield running


def measure(given: Path, running: Mapping[str, Server], rounds: int) -> dict[str, Any]:
    """The variants of one row of the results, and why some are absent. `given` is the folder of the inputs."""
    row: dict[str, Any] = {"variants": {}, "absent": {}}
    times: dict[str, list[float]] = {}
    first: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for variant, server in running.items():
            answer = _asked(server, {"feeds": str(given), "save": f"{scratch}/{variant}.npy"})
            if "not" in answer:
                row["absent"][variant] = answer["not"]
                continue
            times[variant], first[variant] = [], answer["seconds"]
            row["variants"][variant] = {"difference": _difference(Path(scratch), variant), "peak_mib": 0.0,
                                        "made": server.greeting["made"], "first_ms": 1e3 * first[variant]}  # fmt: skip
    slowest = max(first.values(), default=0.0)
    for _ in range(rounds if slowest < 1 else min(rounds, 3) if slowest < 5 else min(rounds, 2)):
        for variant in list(times):
            time.sleep(0.05)
            calls = max(1, min(5, int(0.2 / first[variant])))
            answer = _asked(running[variant], {"calls": calls, "warm": int(first[variant] < 1)})
            if "not" in answer:
                row["absent"][variant] = answer["not"]
                del times[variant], row["variants"][variant]
                continue
            times[variant] += answer["seconds"]
            made = row["variants"][variant]
            made["peak_mib"] = max(made["peak_mib"], answer["peak_mib"])
    for variant, seconds in times.items():
        row["variants"][variant] |= {"ms": 1e3 * statistics.median(seconds), "calls": len(seconds)}
    return row


def profiles(variants: Mapping[str, tuple[str, str]], running: Mapping[str, Server]) -> dict[str, Any]:
    """The parts of the time of `ort` and `ours`, as model_tables.py divides it. Both have run."""
    graphs = {name: onnx.load(variants[name][1], load_external_data=False).graph for name in ("ort", "ours")}
    names = [{node.name for node in graph.node} for graph in graphs.values()]
    found: dict[str, Any] = {}
    for name, parts in (("ort", original_parts), ("ours", fused_parts)):
        nodes = _asked(running[name], {"profile": True}).get("nodes")
        if nodes:
            found[name] = parts(nodes, *names)
    return found


def _asked(server: Server, question: dict[str, Any]) -> dict[str, Any]:
    try:
        return server.ask(question)
    except HelperError as error:
        return {"not": str(error)}


def _difference(folder: Path, variant: str) -> float | None:
    """The difference from the result of `ort`, relative to its largest value; None for NaN, or without `ort`."""
    if not (folder / "ort.npy").exists():
        return None
    right, result = np.load(folder / "ort.npy"), np.load(folder / f"{variant}.npy")
    off = float(np.abs(result - right).max() / np.abs(right).max())
    return off if np.isfinite(off) else None


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All measurements, with a line of progress for each. Raises NotPrepared."""
    pythons = interpreters(arguments.peer_python)
    pythons["ort-alone"] = pythons["ort"]
    results: dict[str, Any] = {"threads": arguments.threads, "layers": arguments.layers, "versions": [],
                               "date": time.strftime("%Y-%m-%d"), "optimizer": {}, "rows": []}  # fmt: skip
    for name, model in MODELS.items():
        lengths = [length for length in model.lengths if length <= arguments.longest]
        if not arguments.names.search(name) or not lengths:
            continue
        folder = arguments.models.resolve() / (f"{name}-{arguments.layers}" if arguments.layers else name)
        variants = prepare(name, folder, arguments)
        outcome = folder / "optimizer" / "outcome.txt"
        results["optimizer"][name] = outcome.read_text() if outcome.exists() else "-"
        given = onnx.load(folder / "model.onnx", load_external_data=False)
        absent: dict[str, str] = {}
        with servers(variants, pythons, arguments.threads, absent) as running:
            for version in (server.greeting["version"] for server in running.values()):
                if version not in results["versions"]:
                    results["versions"].append(version)
            for length in lengths:
                with tempfile.TemporaryDirectory() as scratch:
                    for key, array in feeds(given, length).items():
                        np.save(Path(scratch) / f"{key}.npy", array)
                    row = measure(Path(scratch), running, arguments.rounds)
                row["absent"] |= absent
                both = {"ort", "ours"} <= row["variants"].keys()
                where = profiles(variants, running) if both else {}
                results["rows"].append({"model": name, "length": length, **row, "where": where})
                words = "  ".join(f"{key} {number(each['ms'])}" for key, each in row["variants"].items())
                print(f"{name:15} {length:5} ms: {words}", file=sys.stderr, flush=True)
    return results


def main(words: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    arguments = parser().parse_args(words)
    try:
        results = run(arguments)
    except (NotPrepared, OSError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "models.json").write_text(json.dumps(results, indent=1) + "\n")
    text = document(results)
    (arguments.out / "models.md").write_text(text)
    print(text)
    return 0
