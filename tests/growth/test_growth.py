"""Work against size: with each growing thing the work grows about linearly, whatever is asked of the model."""

from __future__ import annotations

import pytest

import fa_compiler
from fa_compiler.passes.answer import budget
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.emit.build import Names
from tests.growth.entries import ENTRIES
from tests.growth.graphs import GROWING, model
from tests.growth.steps import Growth, TooManySteps, measured, steps

LADDERS = (
    "bias_ladder_add",
    "lowered_ladder_where",
    "bias_ladder_concat",
    "scores_ladder",
    "constant_concat",
    "mask_ladder",
    "mask_ladder_of_inputs",
    "mask_ladder_xor",
    "size_ladder_min",
    "size_slices",
    "size_product_of_sums",
)
"""What doubles with each step where shared parts are walked again."""
WIDE = ("readers_of_probabilities", "readers_of_scores", "size_broadcasts", "functions_called")
DEEP = ("mask_chain_of_negations", "bias_chain", "query_activated", "plain_chain")


@pytest.mark.parametrize("name", LADDERS)
def test_shared_parts_are_walked_once(name: str) -> None:
    made = model(name, 40)
    assert steps(lambda: fa_compiler.inspect(made)) < 10_000_000


@pytest.mark.parametrize("name", WIDE)
def test_readers_are_walked_once(name: str) -> None:
    growth = measured("inspect ort", name, (50, 150))
    assert growth.fault is None, growth


@pytest.mark.parametrize("name", DEEP)
def test_chains_are_no_limit(name: str) -> None:
    """A chain of 5,000 operators does not reach the end of Python's stack."""
    report = fa_compiler.inspect(model(name, 5000))
    assert report.count("fused") == 1, report.blocks


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", ["attentions_of_one", "bias_ladder_add"])
def test_every_entry(entry: str, name: str) -> None:
    growth = measured(entry, name, (6, 18))
    assert growth.fault is None, growth


@pytest.mark.parametrize("name", ["keys_in_parts", "parts_of_scores"])
def test_what_is_changed_in_front_of_the_matcher(name: str) -> None:
    """Each change looks at what it changes, and not at the whole graph: the work is linear almost from the start."""
    few, many = measured("inspect ort", name, (10, 30)).counts
    assert many < 1.1 * 3 * few, (few, many)
    assert fa_compiler.inspect(model(name, 2)).count("fused") == 2


class _Counting(set[str]):
    """Names, and how often it was asked for one."""

    asked = 0

    def __contains__(self, name: object) -> bool:
        self.asked += 1
        return super().__contains__(name)


def test_a_free_name_is_found_at_once() -> None:
    """Nodes without names take one stem thousands of times. The search for a free name makes no calls to count."""
    taken = _Counting()
    names = Names(taken)
    assert len({names.new("node") for _ in range(1000)}) == 1000
    assert taken.asked < 3000


def test_every_growing_thing_is_a_model() -> None:
    for name in GROWING:
        fa_compiler.inspect(model(name, 2))


def test_names_are_not_counted_from_the_start() -> None:
    """`shard` names nodes without names."""
    growth = measured("shard", "attentions_without_names", (8, 24))
    assert growth.fault is None, growth


def test_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget ends in a decline of this attention; the next one has a budget of its own."""
    monkeypatch.setattr(budget, "STEPS", 1)
    report = fa_compiler.inspect(model("attentions_beside", 2))
    assert [block.code for block in report.blocks] == [Code.BUDGET] * 2
    assert [block.status for block in report.blocks] == ["declined"] * 2
    assert all("1 steps" in (block.reason or "") and block.culprit and block.hint for block in report.blocks)


def test_budget_is_far_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundredth of it is enough for a plain attention."""
    monkeypatch.setattr(budget, "STEPS", budget.STEPS // 100)
    assert fa_compiler.inspect(model("attentions_causal", 2)).count("fused") == 2


def test_no_budget_while_nodes_are_made() -> None:
    node = fa_compiler  # any object stands for the node
    with budget.limited(node) as found:  # type: ignore[arg-type]
        with budget.building():
            budget.spend(steps=2 * budget.STEPS)
        assert found.ended is None and found.spent > budget.STEPS


def test_what_grows_is_noticed() -> None:
    assert Growth("", "", (10, 20, 40), (1e6, 2e6, 4e6)).fault is None
    assert Growth("", "", (10, 20, 40), (1e6, 2e6, 8e6)).fault == "2 times the size is 4.0 times the work"


def test_endless_work_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.growth.steps.MOST", 1000)
    with pytest.raises(TooManySteps):
        steps(lambda: [len(str(number)) for number in range(10_000)])
