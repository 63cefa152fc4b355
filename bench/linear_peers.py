"""transformers' chunked code of linear attention in torch: a helper process of linear.py, in the interpreter that has
torch and transformers.

It answers as peers.py says. The question for a case is

    {"case": name, "gate": "head" or "key", "few": flag, "inputs": path, "heads": n, "threads": n, "type": name}

There are peers of the cases "gated" and "gated_delta", if the tokens are not few. The inputs are an .npz of float32, as
FlashLinearAttention takes them; they are converted before any run. The code computes in float32, whatever their type
is. There is none for a decay for each key dimension without a correction.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from bench.torch_peers import Peers, Run
from tools.processes import serve

NAME = "transformers"
MAMBA_CHUNK = 256
"""chunk_size in the configurations of published models."""


def delta(given: dict[str, Tensor], gate: str) -> Run:
    """The gated delta rule of Qwen3-Next, and KDA of Kimi Linear. Both scale the query by their size^-0.5."""
    rule = torch_chunk_gated_delta_rule if gate == "head" else chunk_kimi_delta_attention
    if gate == "head":
        given["decay"] = given["decay"][..., 0]
    operands = [given[name] for name in ("query", "key", "value", "decay")] + [given["beta"][..., 0]]

    def run() -> Tensor:
        out: Tensor = rule(*operands, initial_state=given["past_state"], output_final_state=True)[0]
        return out

    return run


def state_space(given: dict[str, Tensor]) -> Run:
    """Mamba-2. Its decay is A dt and its value x dt, so that dt is the decay where A is -1."""
    dt = -given["decay"][..., 0].float()
    value = given["value"].float() / dt[..., None]
    query = given["query"].float() * given["query"].shape[-1] ** -0.5
    states = given["past_state"].float().transpose(-1, -2).contiguous()
    factor = -torch.ones(dt.shape[-1])

    def run() -> Tensor:
        out: Tensor = mamba2_chunk_scan(
            value, dt, factor, given["key"], query, MAMBA_CHUNK, initial_states=states, return_final_states=True
        )[0]
        return out

    return run


def prepared(question: dict[str, Any]) -> dict[str, Run]:
    """The peer of a case, if there is one."""
    if question["few"] or question["case"] not in ("gated", "gated_delta"):
        return {}
    with np.load(question["inputs"]) as file:
        given = {name: torch.from_numpy(file[name]).to(getattr(torch, question["type"])) for name in file}
    for name in given.keys() - {"past_state"}:
        given[name] = given[name].unflatten(-1, (question["heads"], -1))
    if question["case"] == "gated_delta":
        return {NAME: delta(given, question["gate"])}
    return {NAME: state_space(given)} if question["gate"] == "head" else {}


if __name__ == "__main__":
    serve(torch.inference_mode()(Peers(prepared).answer), {})
