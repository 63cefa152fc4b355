"""Models that are nearly attention are declined, or what is fused computes the same, empty rows and NaN included."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from tests.examples import examples
from tests.passes.builder import build
from tests.passes.near_misses import changed
from tests.passes.running import Array, assert_same, fused, run
from tests.passes.spelling import MODERATE, Spelling, consistent, may_decline
from tests.passes.strategies import even

pytestmark = pytest.mark.usefixtures("declines_change_nothing")

TOLERANCE = {"float32": 2e-4, "float16": 2e-2}
"""A changed model may have large scores; what it is sensitive to is measured where this is not enough."""


def alike(seed: int) -> Spelling:
    """A spelling whose sizes are mostly the same, so that axes can be taken for one another.

    No batch of 1: a change can make it face another axis, and one that the graph leaves open is taken to be no 1.
    """
    spelling = even(seed)
    rng = random.Random(seed)
    size = rng.choice([2, 3, 4])
    sizes = dict.fromkeys("NSTDE", size) | {"K": rng.choice([1, size]), "P": 1, "B": rng.choice([2, size])}
    if rng.random() < 0.3:
        sizes |= {rng.choice("SDE"): 5}
    # A mask number that rounds the scores leaves them too inexact for a narrow tolerance.
    masks = tuple(replace(mask, fill=min(mask.fill, MODERATE)) for mask in spelling.masks)
    return consistent(replace(spelling, sizes=sizes, dropout=False, masks=masks))


@settings(max_examples=examples(120))
@given(st.integers(0, (1 << 32) - 1))
def test_one_change(seed: int) -> None:
    spelling = alike(seed)
    case = build(spelling)
    found = changed(case.model, random.Random(seed + 1))
    if found is None:
        return
    model, what = found
    feeds = case.feeds(seed)
    try:
        wanted = run(model, feeds)
    except Exception:
        # The change made sizes disagree.
        return
    if any(
        len(each.type.tensor_type.shape.dim) != array.ndim
        for each, array in zip(model.graph.output, wanted, strict=True)
    ):
        return
    result, report = fused(model)
    if all(block.status != "fused" for block in report.blocks):
        assert result == ir.to_proto(ir.from_proto(model)), "a declined model was changed"
        return
    same(model, result, feeds, wanted, spelling, what)
    poisoned = poison(feeds, spelling, seed)
    same(model, result, poisoned, run(model, poisoned), spelling, what)


def poison(feeds: dict[str, Array], spelling: Spelling, seed: int) -> dict[str, Array]:
    """The same inputs with NaN and infinities here and there, in the operands where no mask hides some of the scores:
    what is not finite there the operator does not read, where the model may spread it or a mask's number wins."""
    rng = np.random.default_rng(seed)
    result = {}
    for name, array in feeds.items():
        array = array.copy()
        if array.dtype.kind == "f" and array.size and (name.startswith("m") or not spelling.masks):
            numbers = [np.nan, np.inf, -np.inf]
            if name.startswith("m") and spelling.guard == "bias":
                # ONNX Runtime's ReduceMax does not pass NaN on in every type.
                numbers = numbers[1:]
            elif spelling.floor and not name.startswith("m"):
                numbers = numbers[:1]
            array.reshape(-1)[rng.integers(array.size)] = rng.choice(numbers)
        result[name] = array
    return result


def same(
    model: onnx.ModelProto,
    result: onnx.ModelProto,
    feeds: dict[str, Array],
    wanted: list[Array],
    spelling: Spelling,
    what: str,
) -> None:
    """All outputs agree; where they do not, the model has to be as sensitive to its inputs."""
    for index, (got, want) in enumerate(zip(run(result, feeds), wanted, strict=True)):
        if want.dtype.kind == "f":
            # Infinity times a probability that is nearly 0 is infinite or NaN.
            got, want = (np.where(np.isinf(each), np.nan, each) for each in (got, want))
            if spelling.masks or spelling.guard != "none":
                # What is at keys that are masked is not read: NaN that it would spread does not.
                got, want = (np.where(np.isnan(want), 0, each) for each in (got, want))
            if spelling.masks and spelling.guard in ("nan", "cast_nan") and what.startswith("the constant"):
                # A divisor of 0 makes NaN at masked keys, too, and the guard makes 0 of it.
                got = np.where(want == 0, 0, got)
            if spelling.guard == "bias" and what.startswith("the constant"):
                # NaN at a key that a bias lowers stays NaN, also in a row that the guard makes 0 (recognised.md).
                got = np.where((want == 0) & np.isnan(got), 0, got)
        try:
            assert_same(got, want, TOLERANCE[spelling.dtype])
        except AssertionError as error:
            if not sensitive(model, feeds, index, got, want):
                raise AssertionError(f"{what}: {error}") from error


def sensitive(model: onnx.ModelProto, feeds: dict[str, Array], index: int, got: Array, want: Array) -> bool:
    """Does rounding of the inputs change the output as much as the fusion did?"""
    with np.errstate(all="ignore"):
        off = np.abs(got.astype(np.float64) - want)
        for sign in (-1, 1):
            step = {"float16": 2.0**-11, "float32": 2.0**-22}
            nudged = {
                name: (array * (1 + sign * step.get(array.dtype.name, 0))).astype(array.dtype)
                for name, array in feeds.items()
            }
            moved = np.abs(run(model, nudged)[index].astype(np.float64) - want)
            if (off[np.isfinite(off)] <= 16 * moved[np.isfinite(off)].max(initial=0)).all() and np.isfinite(off).all():
                return True
    return False


@dataclass(frozen=True)
class Misfit:
    """A change after which no FlashAttentionScore computes the same: at which mark, and the codes it may have."""

    mark: str
    codes: str
    nodes: Callable[[str, str], list[onnx.NodeProto]]
    """Nodes between a value and what reads it, under a new name; none where the value becomes an output."""


def _by_element(op_type: str) -> Callable[[str, str], list[onnx.NodeProto]]:
    def make(source: str, name: str) -> list[onnx.NodeProto]:
        numbers = numpy_helper.from_array(np.array([[1, 2, 1], [0.5, 1, 1], [1, 3, 1]], np.float32))
        given = helper.make_node("Constant", [], ["numbers"], name="numbers", value=numbers)
        return [given, helper.make_node(op_type, [source, "numbers"], [name], name=name)]

    return make


def _rounded(source: str, name: str) -> list[onnx.NodeProto]:
    return [
        helper.make_node("Cast", [source], ["half"], name="half", to=TensorProto.FLOAT16),
        helper.make_node("Cast", ["half"], [name], name=name, to=TensorProto.FLOAT),
    ]


def _single(op_type: str) -> Callable[[str, str], list[onnx.NodeProto]]:
    return lambda source, name: [helper.make_node(op_type, [source], [name], name=name)]


def _output(source: str, name: str) -> list[onnx.NodeProto]:
    return []


MISFITS = {
    "scores_are_output": Misfit("scores", "scores_are_output", _output),
    "masked_scores_are_output": Misfit("masked", "scores_are_output", _output),
    "probabilities_are_output": Misfit("probabilities", "probabilities_are_output", _output),
    "scale_by_element": Misfit("scores", "scale", _by_element("Mul")),
    "divided_by_element": Misfit("scores", "scale", _by_element("Div")),
    "relu": Misfit("scores", "score_term", _single("Relu")),
    "rounded": Misfit("scores", "cast", _rounded),
    "masked_and_rounded": Misfit("masked", "cast", _rounded),
    "probabilities_by_element": Misfit("probabilities", "probability_term", _by_element("Mul")),
}


@pytest.mark.parametrize("misfit", MISFITS.values(), ids=MISFITS)
@settings(max_examples=examples(4))
@given(seed=st.integers(0, (1 << 32) - 1))
def test_misfits(misfit: Misfit, seed: int) -> None:
    """Declined in every spelling, with the same code, and the culprit is a node of the graph."""
    spelling = replace(even(seed), sizes=dict.fromkeys("BNKSTDEP", 3), dtype="float32", upcast=False, symbolic=False)
    # A cache would make the rows more than three.
    spelling = consistent(replace(spelling, gqa="none", cache=False))
    case = build(spelling)
    model, value = case.model, case.marks[misfit.mark]
    added = misfit.nodes(value, "misfit")
    if added:
        for node in model.graph.node:
            for place, name in enumerate(node.input):
                if name == value:
                    node.input[place] = "misfit"
        index = next(place for place, node in enumerate(model.graph.node) if value in node.output)
        nodes = list(model.graph.node)
        nodes[index + 1 : index + 1] = added
        del model.graph.node[:]
        model.graph.node.extend(nodes)
    else:
        folded = spelling.product == "folded" and misfit.mark == "probabilities"
        free = [None] * (3 if folded else case.rank)
        model.graph.output.append(helper.make_tensor_value_info(value, TensorProto.FLOAT, free))
    result, report = fused(model)
    (block,) = report.blocks
    assert block.status == "declined"
    assert block.code in {misfit.codes} | may_decline(spelling), block
    assert block.culprit in {node.name for node in model.graph.node}
    assert result == ir.to_proto(ir.from_proto(model)), "a declined model was changed"
