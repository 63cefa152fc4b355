"""What differs from a linear attention in one place is left, in every form; where it happens to be another linear
attention, the fused model gives the same numbers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.linear_composer import FORMS, Change, Model, Recipe, feeds
from tests.passes.running import assert_same, fused, run

TOLERANCE = 1e-5
"""float32 sums over a few tokens, in another order."""
TOKENS: dict[str, Change] = {
    "the memory of the query": Change(memory_key="q"),
    "the memory before the decay": Change(memory_state="old"),
    "the memory is added": Change(memory_sign="Add"),
    "beta on the memory only": Change(beta="memory"),
    "beta on the value only": Change(beta="value"),
    "the square of beta": Change(beta="squared"),
    "the query is written": Change(write_key="q"),
    "the update is taken away": Change(write_sign="Sub"),
    "the key is read": Change(read_key="k"),
    "read before the write": Change(read_state="decayed"),
    "read before the decay": Change(read_state="old"),
    "the decay after the write": Change(decay="after"),
    "the decay twice": Change(decay="twice"),
    "a bonus for the token": Change(bonus=True),
    "a bent state": Change(bent="Tanh"),
    "a rectified state": Change(bent="Relu"),
    "a decay that is a little larger": Change(gate_factor=1.0009765625),
    "the mean of the heads": Change(head_mean=True),
    "the first state is returned": Change(last="first"),
}
ORDER: dict[str, Change] = {
    "the key of the token before": Change(shifted="k"),
    "the value of the token before": Change(shifted="v"),
    "the gate of the token before": Change(shifted="d"),
    "the gate of another head": Change(rolled="d"),
    "the key of another head": Change(rolled="k"),
    "keys from behind": Change(reversed="k"),
}
UNROLLED: dict[str, Change] = {
    "the state before the last is returned": Change(last="before"),
    "the last token without its decay": Change(late="decay"),
    "the last token reads the first state": Change(late="state"),
    "the last token with beta on the value only": Change(late="beta"),
    "the last outputs change places": Change(late="output"),
}
CHUNKS: dict[str, Change] = {
    "without the diagonal": Change(diagonal=-1),
    "a later token": Change(diagonal=1),
    "the decay of the other direction": Change(decay_sign=-1),
    "no decay inside": Change(inner_decay=False),
    "no decay of the query": Change(outer_decay=False),
    "no decay of the key": Change(key_decay=False),
    "the decay of the first token": Change(state_decay="first"),
    "exclusive sums": Change(exclusive=True),
    "sums over all chunks": Change(whole_sums=True),
    "an inverse that ends early": Change(inverse="short"),
    "an inverse of the other sign": Change(inverse="plus"),
    "a transposed matrix": Change(inverse="turned"),
    "no beta in the matrix": Change(lower_beta=False),
    "the memory without its decay": Change(corrected_decay=False),
    "chunks change places": Change(order="swapped"),
    "the gate of another head": Change(rolled="d"),
    "the key of the token before": Change(shifted="k"),
}
GATED = (
    "read before the write",
    "read before the decay",
    "the update is taken away",
    "the decay after the write",
    "the decay twice",
    "a bonus for the token",
    "a bent state",
    "a rectified state",
    "a decay that is a little larger",
    "the mean of the heads",
)
SMALL: dict[str, Any] = {"sizes": (1, 2, 3, 5)}
ROWS: dict[str, Recipe] = {
    **{f"scan: {name}": Recipe(change=change, tokens=7, **SMALL) for name, change in (TOKENS | ORDER).items()},
    **{f"step: {name}": Recipe("step", change=change, **SMALL) for name, change in TOKENS.items()},
    **{f"unrolled: {name}": Recipe("unrolled", change=change, **SMALL) for name, change in UNROLLED.items()},
    **{f"chunks: {name}": Recipe("chunks", change=change, tokens=8, **SMALL) for name, change in CHUNKS.items()},
    **{f"gated scan: {name}": Recipe("scan", "gated", change=TOKENS[name], tokens=7, **SMALL) for name in GATED},
    "scan: a gate that may be negative": Recipe(gate="raw", tokens=7, **SMALL),
    "scan: a decay for each value": Recipe(by_key=True, tokens=7, change=Change(per_value=True), sizes=(1, 2, 3, 3)),
    "scan: a state that is turned": Recipe(tokens=7, change=Change(turned=True), sizes=(1, 2, 3, 3)),
    "unrolled: a decay for each value": Recipe(
        "unrolled", by_key=True, change=Change(per_value=True), sizes=(1, 2, 3, 3)
    ),
}
LEGAL = {
    *(f"scan: {name}" for name in (*ORDER, "the first state is returned")),
    "chunks: the gate of another head",
    "chunks: the key of the token before",
    *(
        f"step: {name}"
        for name in (
            "beta on the value only",
            "the square of beta",
            "the decay after the write",
            "the decay twice",
            "a bent state",
            "a rectified state",
            "a decay that is a little larger",
            "the mean of the heads",
            "the first state is returned",
        )
    ),
}
"""Those that are a linear attention of other operands, such as the keys of another head, or one with something in front
of it or behind it."""


@pytest.mark.parametrize("name", ROWS)
def test_a_change(name: str) -> None:
    """The model is left, or the fused one gives the same numbers."""
    model = Model(ROWS[name]).proto()
    result, report = fused(model)
    assert (report.count("fused") == 1) == (name in LEGAL)
    if name in LEGAL:
        inputs = feeds(model, {})
        for got, wanted in zip(run(result, inputs), run(model, inputs), strict=True):
            assert_same(got, wanted, TOLERANCE)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_not_changed(form: str) -> None:
    """The form of each row is found: what is left is left because of its change."""
    model = Model(Recipe(form, tokens={"scan": 7, "chunks": 8}.get(form), **SMALL)).proto()
    _, report = fused(model)
    assert [block.rule for block in report.blocks] == ["rule: gated_delta, a decay for each head"]


@pytest.mark.parametrize("rule", ["gated", "delta", "gated_delta"])
def test_one_token_without_a_state(rule: str) -> None:
    """The zeros of its state are multiplied: a decay or a key that is NaN or infinite reaches the result. Otherwise it
    does not show, so that its operator would be one without a decay."""
    assert not fused(Model(Recipe("step", rule, has_state=False, **SMALL)).proto())[1].count("fused")


def test_there_are_sixty_near_misses() -> None:
    assert len(ROWS.keys() - LEGAL) >= 60
