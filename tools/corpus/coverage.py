"""Optimises every model of a corpus, compares the result with the original, and prints what was fused.

    python -m tools.corpus.coverage --corpus DIR [--kinds issue2] [--filter REGEX] [--jobs 2] [--json OUT]
                             [--ort-python OTHER/bin/python]... [--peers OTHER/bin/python]

DIR holds the models and `manifest.json`, with one entry for each model (id, cls, expected, exporter, arch, file,
inputs, ...). The outputs of the original in ONNX Runtime with optimisations off are the truth. The optimised model runs
with optimisations off and on. A model that ONNX Runtime cannot run is compared on the reference evaluators and counted
separately. Each step runs in a helper process, so a crash or a hang is reported and ends nothing else.

With --peers, the onnxruntime.transformers, onnxscript and OpenVINO of another interpreter fuse the same models, if they
are installed there; peers.py tells how their blocks are counted. Blocks that are declined because FlashAttentionScore
cannot express them are compared with inexpressible.json, a list that was checked by hand. Those whose scores or
probabilities the model needs, too, are counted apart. The exit code is 1 if any output, check or interface differs, or
if the blocks differ from that list.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from tools.corpus.compare_inputs import VARIANTS
from tools.corpus.coverage_tables import (
    print_declined,
    print_defects,
    print_fused,
    print_missing,
    print_models,
    print_runs,
    print_shares,
    print_totals,
)
from tools.corpus.outcome import Outcome
from tools.processes import HelperError, Server, module

ISSUE2 = {
    "BERT": "bert|bert_tt|bert_nomask|bert_fp16|bert_decoder|big_bert48",
    "DistilBERT": "distilbert",
    "RoBERTa": "roberta|xlmroberta",
    "GPT-2": "gpt2|gpt2_nomask",
    "OPT": "opt|opt_past",
    "ViT": "vit",
    "CLIP": "clip_text|clip_vision",
    "BART": "bart|bart_decpast",
    "Whisper": "whisper|whisper_enc",
    "T5": "t5|t5_decpast|t5_fp16",
    "Llama-like": "llama.*|mistral|qwen3.*|smollm3|phi3.*",
    "nn.MultiheadAttention": "nn_mha_.*|nn_transformer_encoder",
}
"""The architectures whose plain attention must be fused completely: the group, and a pattern for `arch`."""


class Bench:
    """One worker's helper processes."""

    def __init__(
        self, stack: ExitStack, pythons: Sequence[str], peers: str | None, timeout: float, folder: Path
    ) -> None:
        def server(python: str, name: str) -> Server:
            return stack.enter_context(Server(module(python, f"tools.corpus.{name}"), timeout))

        self.folder = folder
        self.optimiser = server(sys.executable, "compare_optimise")
        self.checker = server(sys.executable, "compare_check")
        self.runners = [server(python, "compare_run") for python in pythons]
        self.peers = None if peers is None else server(peers, "peers")
        self.library = self.optimiser.start()["library"]
        self.versions = [str(runner.start()["onnxruntime"]) for runner in self.runners]

    def examine(self, entry: dict[str, Any], corpus: Path) -> Outcome:
        """Optimise, check, run and compare one model."""
        outcome = Outcome(entry["id"], group_of(entry), entry["expected"], entry["already_fused"])
        paths = {
            "original": str(corpus / entry["file"]),
            "optimised": str(self.folder / f"{entry['id']}.onnx"),
        }
        try:
            self._examine(outcome, entry, corpus, paths)
        except HelperError as failure:
            outcome.problems.append(str(failure))
        if self.peers is not None:
            self._ask_peers(
                outcome,
                self.peers,
                {"original": paths["original"], "arch": entry.get("arch") or "", "heads": outcome.heads},
            )
        return outcome

    @staticmethod
    def _ask_peers(outcome: Outcome, peers: Server, job: dict[str, Any]) -> None:
        """Let other tools fuse the original. If one of them crashes, the answers of the others are lost, too."""
        tools = peers.greeting["tools"] if peers.greeting else peers.start()["tools"]
        try:
            outcome.peers = peers.ask(job)
        except HelperError as failure:
            outcome.peers = {tool: {"error": str(failure)} for tool in tools}

    def _examine(
        self,
        outcome: Outcome,
        entry: dict[str, Any],
        corpus: Path,
        paths: dict[str, str],
    ) -> None:
        answer = self.optimiser.ask(paths)
        if answer.get("refused"):
            outcome.compared = "refused"
            return
        if answer["error"] is not None:
            outcome.problems.append(f"optimize failed: {answer['error']}")
            return
        outcome.seconds = answer["seconds"]
        self._read_report(outcome, answer["report"])
        check = self.checker.ask(paths)
        self._read_check(outcome, answer, check)

        inputs = str(inputs_of(entry, corpus, self.folder))
        job = {
            **paths,
            "inputs": inputs,
            "library": self.library,
            "coarsest": check["coarsest"],
        }
        for version, runner in zip(self.versions, self.runners, strict=True):
            try:
                verdict = runner.ask(job)
            except HelperError as failure:
                verdict = {
                    "original_error": None,
                    "problems": [str(failure)],
                    "error": float("inf"),
                }
            if verdict["original_error"] is not None:
                outcome.runs[version] = "original does not run"
                continue
            outcome.compared = "ort"
            outcome.runs[version] = "wrong" if verdict["problems"] else "same"
            outcome.problems += [f"ORT {version} {problem}" for problem in verdict["problems"]]
            outcome.error = max(outcome.error, verdict["error"])
        if outcome.runs[self.versions[0]] == "same":
            self._vary(outcome, job)
        if outcome.compared == "no":
            verdict = self.optimiser.ask({k: v for k, v in job.items() if k != "library"})
            if verdict["error"] is not None:
                outcome.problems.append(f"the reference does not run the optimised model: {verdict['error']}")
            elif verdict["original_error"] is None:
                outcome.compared = "reference"
                outcome.problems += verdict["problems"]
                outcome.error = verdict["worst"]

    def _vary(self, outcome: Outcome, job: dict[str, Any]) -> None:
        """Compare on other inputs, too, if the original accepts them.

        These inputs are more difficult than those of the corpus. So a difference is compared with the one that ONNX
        Runtime's own optimisations make to the original on the same inputs.
        """
        for variant, words in enumerate(VARIANTS):
            varied = {**job, "variant": variant, "to": str(self.folder / f"{outcome.id}.npz")}
            self.checker.ask(varied)
            try:
                verdict = self.runners[0].ask({**job, "inputs": varied["to"], "lenient": True})
            except HelperError as failure:
                verdict = {"original_error": None, "problems": [str(failure)], "error": float("inf")}
            if verdict["original_error"] is None:
                outcome.varied += 1
                outcome.problems += [f"({words}) {problem}" for problem in verdict["problems"]]
                outcome.error = max(outcome.error, verdict["error"])

    @staticmethod
    def _read_report(outcome: Outcome, report: dict[str, Any]) -> None:
        for block in report["blocks"]:
            if block["kind"] in ("backward", "convolution"):
                continue
            if block["status"] == "fused":
                outcome.fused += 1
                outcome.heads = outcome.heads or (block["heads"] or [0])[0]
                words = " ".join(map(str, (block["layout"], block["mask"], *block["extensions"])))
                outcome.fused_as[words] = outcome.fused_as.get(words, 0) + 1
            elif block["status"] == "declined":
                outcome.declined.append(block)
            else:
                outcome.not_attention += 1

    @staticmethod
    def _read_check(outcome: Outcome, answer: dict[str, Any], check: dict[str, Any]) -> None:
        report = answer["report"]
        if check["original_problem"] is None:
            for where, problem in (
                ("", check["problem"]),
                (" (our schemas)", answer["problem"]),
            ):
                if problem is not None:
                    outcome.problems.append(f"checker{where}: {problem}")
        if not check["same_interface"]:
            outcome.problems.append("inputs, outputs or the IR version changed")
        fused = sum(block["status"] == "fused" for block in report["blocks"])
        if fused != check["nodes"]:
            outcome.problems.append(f"the report says {fused} fused, the model has {check['nodes']} nodes")
        softmaxes = sum(block["kind"] != "backward" for block in report["blocks"])
        if softmaxes < check["softmaxes"]:
            outcome.problems.append(f"{softmaxes} blocks for {check['softmaxes']} softmaxes")
        for block in report["blocks"]:
            if block["status"] == "declined" and not (block["code"] and block["reason"]):
                outcome.problems.append(f"block {block['id']} is declined without code or reason")


def inputs_of(entry: dict[str, Any], corpus: Path, folder: Path) -> Path:
    """The inputs file of a model. If it has none, seeded random inputs of the manifest's shapes go to `folder`."""
    if entry.get("inputs"):
        return corpus / str(entry["inputs"])
    rng = np.random.default_rng(0)
    arrays = {}
    for name, (dtype, shape) in entry["input_shapes"].items():
        small = rng.integers(0, 2, shape) if np.dtype(dtype).kind in "iub" else rng.standard_normal(shape)
        arrays[name] = small.astype(dtype)
    path = folder / f"{entry['id']}.npz"
    np.savez(path, **arrays)
    return path


def group_of(entry: dict[str, Any]) -> str:
    """The exporter of a model, as a short name."""
    exporter = re.sub(r"torch\.onnx (\w+) torch ([\d.]+).*", r"torch \2 \1", entry["exporter"])
    return " ".join(word for word in (entry["cls"], exporter, entry.get("attn_impl")) if word)


def kind_of(entry: dict[str, Any]) -> str | None:
    """The architecture group of `ISSUE2` that a torch export belongs to, or None."""
    if entry["cls"] not in "AG":
        return None
    arch = entry.get("arch") or ""
    return next((kind for kind, pattern in ISSUE2.items() if re.fullmatch(pattern, arch)), None)


def examine_all(
    entries: Sequence[dict[str, Any]],
    corpus: Path,
    pythons: Sequence[str],
    peers: str | None,
    jobs: int,
    timeout: float,
    keep: Path,
) -> list[Outcome]:
    """Examine the models on `jobs` workers, in manifest order."""
    with ExitStack() as stack:
        idle: SimpleQueue[Bench] = SimpleQueue()
        for _ in range(min(jobs, len(entries))):
            idle.put(Bench(stack, pythons, peers, timeout, keep))

        def work(entry: dict[str, Any]) -> Outcome:
            bench = idle.get()
            try:
                return bench.examine(entry, corpus)
            finally:
                idle.put(bench)

        pool = stack.enter_context(ThreadPoolExecutor(jobs))
        progress = Console(stderr=True)
        results = pool.map(work, entries)
        return list(track(results, "models", total=len(entries), console=progress, transient=True))


def add_corpus(parser: argparse.ArgumentParser) -> None:
    """The options that choose models of a corpus."""
    parser.add_argument("--corpus", type=Path, required=True, help="folder with manifest.json")
    parser.add_argument("--filter", default="", metavar="REGEX", help="only models whose id matches")
    parser.add_argument("--kinds", choices=["all", "issue2"], default="all", help="which architectures")


def entries_of(parser: argparse.ArgumentParser, corpus: Path) -> list[dict[str, Any]]:
    """The manifest's entries. A folder without a manifest is an error of the command line."""
    try:
        models: list[dict[str, Any]] = json.loads((corpus / "manifest.json").read_text())["models"]
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"--corpus {corpus} is not a folder with a manifest.json: {error}")
    return models


def chosen(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The manifest's entries that the options choose. If there are none, this is an error of the command line."""
    entries = [
        entry
        for entry in entries_of(parser, arguments.corpus)
        if re.search(arguments.filter, entry["id"]) and (arguments.kinds == "all" or kind_of(entry))
    ]
    if not entries:
        parser.error("no model of the corpus matches")
    return entries


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_corpus(parser)
    parser.add_argument("--jobs", type=int, default=2, help="models at a time (2)")
    parser.add_argument(
        "--timeout",
        type=float,
        default=120,
        help="seconds for one step of one model (120)",
    )
    parser.add_argument(
        "--ort-python",
        action="append",
        default=[],
        metavar="PYTHON",
        help="an interpreter with another onnxruntime, which runs the models, too",
    )
    parser.add_argument(
        "--peers", metavar="PYTHON", help="an interpreter with other fusers, whose fused blocks are counted"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the optimised models here")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every outcome as JSON")
    arguments = parser.parse_args()

    entries = chosen(parser, arguments)
    with tempfile.TemporaryDirectory() as folder:
        keep = arguments.keep or Path(folder)
        keep.mkdir(parents=True, exist_ok=True)
        pythons = [sys.executable, *arguments.ort_python]
        outcomes = examine_all(
            entries, arguments.corpus, pythons, arguments.peers, arguments.jobs, arguments.timeout, keep
        )

    console = Console(width=None if sys.stdout.isatty() else 150)
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for entry, outcome in zip(entries, outcomes, strict=True):
        groups[(kind_of(entry) or "") if arguments.kinds == "issue2" else outcome.group].append(outcome)
    print_models(console, outcomes)
    print_totals(
        console,
        "Attention blocks by " + ("architecture" if arguments.kinds == "issue2" else "generator"),
        groups,
    )
    print_runs(console, outcomes)
    print_fused(console, outcomes)
    print_declined(console, outcomes)
    if arguments.kinds == "issue2":
        print_missing(console, groups)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    # The list is for the whole corpus. With some of the models, only blocks that are missing in the list can be found.
    differing = print_shares(console, outcomes)
    return 1 if print_defects(console, outcomes) or differing else 0


if __name__ == "__main__":
    sys.exit(main())
