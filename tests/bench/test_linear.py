"""The cases of `python -m bench.linear` and what it asks of its helper processes, at small sizes."""

from __future__ import annotations

import argparse
from typing import Any, cast

import numpy as np
import pytest

from bench import linear
from bench.linear_mnn import model
from bench.peers import Peers, Run
from fa_compiler.op_registry import DOMAIN
from tools.processes import Server

HEADS, SIZE = 2, 8


def _small(dtype: str = "float32") -> argparse.Namespace:
    return argparse.Namespace(heads=HEADS, size=SIZE, dtype=dtype)


def _recurrence(case: linear.Case) -> np.ndarray:
    """The result of a layer in float64, token by token."""
    given = {name: array.astype(np.float64) for name, array in case.inputs.items()}
    tokens = given["input"].shape[2]
    window = np.concatenate([given["columns"], given["input"]], axis=2)[0]
    mixed = sum(window[:, column : column + tokens] * given["weight"][:, 0, column, None] for column in range(4))
    rows = (mixed / (1 + np.exp(-mixed))).reshape(3, HEADS, SIZE, tokens)
    state, results = given["past_state"][0], []
    for token in range(tokens):
        query, key, value = rows[..., token]
        state = state * np.exp(given["decay"][0, token])[:, None, None]
        correction = given["beta"][0, token][:, None] * (value - np.einsum("hkv,hk->hv", state, key))
        state = state + key[..., None] * correction[:, None]
        results.append(np.einsum("hkv,hk->hv", state, query) * SIZE**-0.5)
    return np.stack(results).reshape(1, tokens, -1)


@pytest.mark.parametrize("tokens", [1, 40])
def test_a_layer_is_the_recurrence(tokens: int) -> None:
    case = linear.layer(tokens, _small())
    expected = _recurrence(case)
    found = linear.session_of(case, DOMAIN, 1)()
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
    assert set(linear.methods(case, 1, [])) == {"ours", "contrib", "opset 27"}


class _Process:
    """A helper process in this one: its only peer takes layers, and its result is this one."""

    def __init__(self, result: np.ndarray) -> None:
        self.asked: list[dict[str, Any]] = []
        self.result = result
        self.peers = Peers(self._prepared)

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(question)
        return self.peers.answer(question)

    def _prepared(self, question: dict[str, Any]) -> dict[str, Run]:
        return {"peer": lambda: self.result} if question["case"] == "layer" else {}


@pytest.mark.parametrize(("tokens", "few"), [(8, True), (9, False)])
def test_a_peer_is_asked_and_timed(tokens: int, few: bool) -> None:
    case = linear.layer(tokens, _small())
    helper = _Process(_recurrence(case).astype(np.float32))
    servers = [cast(Server, helper)]
    assert linear.measure(case, 1, 0.0, servers)["peer"] >= 0
    asked = {"case": "layer", "gate": "", "heads": HEADS, "threads": 1, "type": "float32", "few": few}
    assert helper.asked[0].items() >= asked.items()
    for other, name in ((linear.attention("gated", "key", tokens, _small()), "gated"),
                        (linear.convolution(tokens, _small()), "convolution")):  # fmt: skip
        helper.asked.clear()
        assert "peer" not in linear.methods(other, 1, servers)
        assert [question["case"] for question in helper.asked] == [name]


def test_a_peer_that_is_wrong_ends_the_program() -> None:
    case = linear.layer(9, _small())
    with pytest.raises(SystemExit, match="layer: the result of peer differs from ours by"):
        linear.methods(case, 1, [cast(Server, _Process(1.01 * _recurrence(case).astype(np.float32)))])


def test_helpers() -> None:
    """A process for each option that is given."""
    options = argparse.Namespace(peer_python=None, ggml="libggml.so", mnn_python="MNN/bin/python")
    assert [command[-3:] for command in linear.helpers(options)] == [
        ["-m", "bench.linear_ggml", "libggml.so"],
        ["MNN/bin/python", "-m", "bench.linear_mnn"],
    ]


def test_the_model_of_mnn() -> None:
    """Each tensor has a name, and the operator reads the inputs in their order."""
    shapes = {"input": (1, 48, 5), "decay": (1, 5, 2), "beta": (1, 5, 2), "weight": (48, 1, 4)}
    made = model(shapes, HEADS, SIZE)
    *inputs, rule = made["oplists"]
    assert [made["tensorName"][place] for place in rule["inputIndexes"]] == list(shapes)
    assert [(each["name"], each["main"]["dims"]) for each in inputs] == list(shapes.items())
    assert rule["outputIndexes"] == [len(shapes)] and len(made["tensorName"]) == 5
