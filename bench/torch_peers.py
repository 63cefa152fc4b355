"""What the helper processes of sparse.py and linear.py in torch share: peers.py, for tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench import peers

Run = Callable[[], Tensor]


class Peers(peers.Peers):
    """Peers whose results are tensors. torch uses as many threads as the question says."""

    def __init__(self, prepared: Callable[[dict[str, Any]], dict[str, Run]]) -> None:
        def begun(question: dict[str, Any]) -> dict[str, Run]:
            torch.set_num_threads(question["threads"])
            return prepared(question)

        super().__init__(begun, lambda result: result.detach().float().numpy())
