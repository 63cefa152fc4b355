"""A process that checks cases: tasks come in as lines of JSON, outcomes go out as lines of JSON.

    {"do": "check", "kind": NAME, "first": SEED, "count": N, "seconds": S}
        {"word": ..., "finding": ...} for each case, in order, then {"done": true, "large": ...}
    {"do": "reduce", "kind": NAME, "seed": SEED, "finding": {...}}
        {"finding": ... or null}

A worker that is killed by a case, or hangs in it, leaves the outcomes of the cases before it; so the engine knows
which one it was. What native code prints goes to standard error.
"""

from __future__ import annotations

import base64
import faulthandler
import json
import os
import resource
import sys
import time
import traceback
from typing import IO, Any

from tests.built_library import choose_library
from tools.fuzz.kind import Finding, Kind, Outcome, load

MEMORY = 12 << 30
"""Address space of a worker, in bytes: what asks for more gets a MemoryError instead of the machine's memory."""


LARGE_KIB = 3 << 20
"""A worker that has grown beyond this is replaced after its turn."""


def to_json(finding: Finding | None) -> dict[str, str] | None:
    """A finding as a line of JSON holds it."""
    if finding is None:
        return None
    data = base64.b64encode(finding.data).decode()
    return {"title": finding.title, "detail": finding.detail, "data": data, "suffix": finding.suffix}


def from_json(found: dict[str, str] | None) -> Finding | None:
    """The opposite of `to_json`."""
    if found is None:
        return None
    return Finding(found["title"], found["detail"], base64.b64decode(found["data"]), found["suffix"])


def checked(kind: Kind, seed: int) -> Outcome:
    """The outcome of a case; an exception is a finding."""
    try:
        return kind.check(seed)
    except Exception as error:  # any at all: to find them is the purpose
        frame = traceback.extract_tb(error.__traceback__)[-1]
        title = f"{type(error).__name__} in {frame.name} ({os.path.basename(frame.filename)})"  # noqa: PTH119
        return Outcome("raised", Finding(title, traceback.format_exc(), suffix=".txt"))


def main() -> None:
    """Serve until standard input ends."""
    faulthandler.enable()
    if not choose_library():  # sanitizers map terabytes, of which they use little
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY if most < 0 else min(MEMORY, most), most))
    with os.fdopen(os.dup(1), "w", buffering=1) as out:
        os.dup2(2, 1)
        loaded: dict[str, Kind] = {}
        for line in sys.stdin:
            task = json.loads(line)
            if task["kind"] not in loaded:
                loaded[task["kind"]] = load(task["kind"])
            _serve(loaded[task["kind"]], task, out)


def _serve(kind: Kind, task: dict[str, Any], out: IO[str]) -> None:
    if task["do"] == "reduce":
        finding = from_json(task["finding"])
        assert finding is not None
        print(json.dumps({"finding": to_json(kind.reduce(task["seed"], finding))}), file=out)
        return
    end = time.monotonic() + task["seconds"]
    for seed in range(task["first"], task["first"] + task["count"]):
        if time.monotonic() > end:
            break
        outcome = checked(kind, seed)
        print(json.dumps({"word": outcome.word, "finding": to_json(outcome.finding)}), file=out)
    large = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > LARGE_KIB
    print(json.dumps({"done": True, "large": large}), file=out)


if __name__ == "__main__":
    main()
