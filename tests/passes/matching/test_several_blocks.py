"""Several attentions in one model: what one fusion makes, moves or removes must not disturb the next."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx.compose import add_prefix

from tests.examples import examples
from tests.passes.builder import build
from tests.passes.running import assert_same, fused, run
from tests.passes.spelling import Spelling, consistent, may_decline
from tests.passes.strategies import SPELLINGS


def joined(spellings: list[Spelling], chained: bool) -> onnx.ModelProto:
    """One model that computes all spellings of the same inputs; chained, each one's result is the next one's query."""
    result: onnx.ModelProto | None = None
    for index, spelling in enumerate(spellings):
        model = add_prefix(build(spelling).model, f"b{index}_", rename_inputs=False)
        inputs = {each.name for each in model.graph.input}
        if result is None:
            result = model
            continue
        for node in model.graph.node:
            for position, name in enumerate(node.input):
                if chained and name == "q":
                    node.input[position] = f"b{index - 1}_y"
        assert inputs == {each.name for each in result.graph.input}
        for field in ("node", "initializer", "output"):
            getattr(result.graph, field).extend(getattr(model.graph, field))
    assert result is not None
    onnx.checker.check_model(result, full_check=True)
    return result


@st.composite
def families(draw: st.DrawFn) -> tuple[list[Spelling], bool]:
    """Spellings of the same inputs, and whether they may be chained."""
    first = draw(SPELLINGS.filter(lambda each: each.layout not in ("SD", "BSD") and each.packed == "none"))
    chained = draw(st.booleans())
    if chained:
        first = replace(first, sizes={**first.sizes, "E": first.sizes["D"]}, output=first.layout)
    rest = [
        # Of each other spelling, what does not change the inputs.
        replace(
            each,
            sizes=first.sizes,
            dtype=first.dtype,
            symbolic=first.symbolic,
            opset=first.opset,
            layout=first.layout,
            packed="none",
            cache=first.cache,
            sink=first.sink,
            gqa=first.gqa,
            masks=first.masks,
            output=first.output,
            transposed=False,
            upcast=first.upcast,
            product="matmul",
            values="matmul",
            guard=first.guard,
            floor=first.floor,
            # Names of sizes are taken from the inputs, so Shape nodes may be the same too.
            target="computed",
        )
        for each in draw(st.lists(SPELLINGS, min_size=1, max_size=2))
    ]
    return [first, *map(consistent, rest)], chained


@settings(max_examples=examples(25))
@given(families(), st.integers(0, 1 << 16))
def test_blocks_do_not_disturb_each_other(family: tuple[list[Spelling], bool], seed: int) -> None:
    spellings, chained = family
    model = joined(spellings, chained)
    result, report = fused(model)
    assert [block.id for block in report.blocks] == list(range(len(spellings)))
    for block, spelling in zip(report.blocks, spellings, strict=True):
        assert block.status == "fused" or block.code in may_decline(spelling), block
    feeds = build(spellings[0]).feeds(seed)
    tolerance = 2e-2 if spellings[0].dtype == "float16" else 1e-4
    for got, wanted in zip(run(result, feeds), run(model, feeds), strict=True):
        assert_same(got, wanted, tolerance)
        if chained and not np.isfinite(wanted).all():
            # What a NaN in the next query gives at positions that are masked is not promised.
            return
