"""Runs every model of a corpus through the plugin execution provider, and lists what differs from `optimize`.

    python -m tools.corpus.provider --corpus DIR [--filter REGEX] [--plans] [--json OUT]

DIR is a corpus as coverage.py takes it. The outputs of the original in ONNX Runtime with optimisations off are the
truth. The provider sees a graph after ONNX Runtime's first rewrites. A model is listed if it then finds fewer
attentions, or fuses them to other operators, than `optimize` does in the file. The exit code is 1 if an output differs,
or if more than 1 % of the attentions are lost. With --plans the sessions take plans, which are written before; the exit
code is 1, too, if a session does not take its plan.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from tools.corpus.coverage import add_corpus, chosen, inputs_of
from tools.processes import HelperError, Server, module

HERE = Path(__file__).parent
MOST_LOST = 0.01


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_corpus(parser)
    parser.add_argument("--timeout", type=float, default=120, help="seconds for one model (120)")
    parser.add_argument("--plans", action="store_true", help="write a plan for each model, and run with it")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every verdict as JSON")
    arguments = parser.parse_args()
    entries = [entry for entry in chosen(parser, arguments) if entry["ort_ok"]]
    verdicts: dict[str, dict[str, Any]] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        Server(module(sys.executable, "tools.corpus.compare_provider"), arguments.timeout) as helper,
    ):
        for entry in track(entries, "models", console=Console(stderr=True), transient=True):
            inputs = inputs_of(entry, arguments.corpus, Path(folder))
            job = {
                "original": str(arguments.corpus / entry["file"]),
                "inputs": str(inputs),
                "plan": arguments.plans,
            }
            try:
                verdicts[entry["id"]] = helper.ask(job)
            except HelperError as failure:
                verdicts[entry["id"]] = {"original_error": None, "problems": [str(failure)], "error": float("inf")}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(verdicts, indent=1))
    return report(verdicts, arguments.plans)


def report(verdicts: dict[str, dict[str, Any]], plans: bool) -> int:
    """Print what differs, and return the exit code."""
    ran = {name: verdict for name, verdict in verdicts.items() if verdict["original_error"] is None}
    wrong, lost, offline = 0, 0, 0
    for name, verdict in ran.items():
        here, there = Counter(verdict.get("provider", ())), Counter(verdict.get("offline", ()))
        offline += there.total()
        lost += (there - here).total()
        if plans and not verdict.get("planned"):
            verdict["problems"].append("no plan answers the session")
        wrong += bool(verdict["problems"])
        if here == there and not verdict["problems"]:
            continue
        print(f"{name}: {dict(there)} became {dict(here)}")
        for line in (*verdict["problems"], *verdict.get("failures", ()), *verdict.get("declined", ())):
            print(f"    {line}")
    print(f"{len(ran)} of {len(verdicts)} models ran; {wrong} differ; {lost} of {offline} attentions are lost")
    return int(wrong > 0 or lost > MOST_LOST * offline)


if __name__ == "__main__":
    sys.exit(main())
