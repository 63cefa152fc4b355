"""How many threads a rank uses."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence

from fa_compiler.parallel.communicator import Communicator


def threads_of_rank(communicator: Communicator) -> int:
    """The rank's share of the cores that it may use. Each core is divided among the ranks that may
    use it.

    So a rank has all cores that a launcher binds it to. All ranks call this together. It is 0, ONNX
    Runtime's default, for the only rank of a group. Raises RankError.
    """
    if communicator.size == 1:
        return 0
    machine, own = platform.node(), _cores()
    every = [
        json.loads(message) for message in communicator.share(json.dumps([machine, own]).encode())
    ]
    return share_of_cores(own, [cores for name, cores in every if name == machine])


def share_of_cores(own: Sequence[int], of_all: Sequence[Sequence[int]]) -> int:
    """The whole cores, 1 at least, that a rank gets of its own ones, given those of all ranks of
    the machine."""
    return max(1, int(sum(1 / sum(core in cores for cores in of_all) for core in own) + 1e-6))


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
