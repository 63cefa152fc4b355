"""What the helper processes of sparse.py and linear.py share: peers that run one by one.

Such a process is a server of tools/processes.py. The questions are

    {"case": name, "threads": n, ...}   -> {"peers": names}
    {"result": name, "to": path}    runs a peer once, saves its first result as float32 -> {"mb": peak memory}
    {"time": name}                  -> {"seconds": s}

What else the question for a case has is up to the process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bench.speed.worker import grown

Run = Callable[[], Any]


class Peers:
    """The peers of the current case, which `prepared` makes for the question that begins it.

    `array` makes a NumPy array of the result of a run.
    """

    def __init__(
        self, prepared: Callable[[dict[str, Any]], Mapping[str, Run]], array: Callable[[Any], np.ndarray] = np.asarray
    ) -> None:
        self.prepared = prepared
        self.array = array
        self.runs: Mapping[str, Run] = {}
        self.clock = time.process_time

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """One question of the protocol."""
        if "case" in question:
            self.clock = time.process_time if question["threads"] == 1 else time.perf_counter
            self.runs = self.prepared(question)
            return {"peers": list(self.runs)}
        if "result" in question:
            result, mb = grown(self.runs[question["result"]])
            np.save(question["to"], self.array(result))
            return {"mb": mb}
        start = self.clock()
        self.runs[question["time"]]()
        return {"seconds": self.clock() - start}
