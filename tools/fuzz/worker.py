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
import os
import time
import traceback
from collections.abc import Callable

from tests.built_library import choose_library
from tools.fuzz.kind import Finding, Kind, Outcome, load
from tools.processes import Line, replies, tasks

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
        import resource  # Windows has none

        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY if most < 0 else min(MEMORY, most), most))
    reply = replies()
    loaded: dict[str, Kind] = {}
    for task in tasks():
        if task["kind"] not in loaded:
            loaded[task["kind"]] = load(task["kind"])
        _serve(loaded[task["kind"]], task, reply)


def _serve(kind: Kind, task: Line, reply: Callable[[Line], None]) -> None:
    if task["do"] == "reduce":
        finding = from_json(task["finding"])
        assert finding is not None
        reply({"finding": to_json(kind.reduce(task["seed"], finding))})
        return
    end = time.monotonic() + task["seconds"]
    for seed in range(task["first"], task["first"] + task["count"]):
        if time.monotonic() > end:
            break
        outcome = checked(kind, seed)
        reply({"word": outcome.word, "finding": to_json(outcome.finding)})
    import resource  # Windows has none

    large = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > LARGE_KIB
    reply({"done": True, "large": large})


if __name__ == "__main__":
    main()
