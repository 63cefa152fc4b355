"""What the helper processes of sparse.py and linear.py share: peers in torch, run one by one.

Such a process is a server of tools/processes.py. The questions are

    {"case": name, "threads": n, ...}   -> {"peers": names}
    {"result": name, "to": path}    runs a peer once, saves its first result as float32 -> {"mb": peak memory}
    {"time": name}                  -> {"seconds": s}

What else the question for a case has is up to the process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.speed.worker import grown

Run = Callable[[], Tensor]


class Peers:
    """The peers of the current case, which `prepared` makes for the question that begins it."""

    def __init__(self, prepared: Callable[[dict[str, Any]], dict[str, Run]]) -> None:
        self.prepared = prepared
        self.runs: dict[str, Run] = {}
        self.clock = time.process_time

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """One question of the protocol."""
        if "case" in question:
            torch.set_num_threads(question["threads"])
            self.clock = time.process_time if question["threads"] == 1 else time.perf_counter
            self.runs = self.prepared(question)
            return {"peers": list(self.runs)}
        if "result" in question:
            result, mb = grown(self.runs[question["result"]])
            np.save(question["to"], result.detach().float().numpy())
            return {"mb": mb}
        start = self.clock()
        self.runs[question["time"]]()
        return {"seconds": self.clock() - start}
