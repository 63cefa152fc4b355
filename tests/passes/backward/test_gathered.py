"""The gradient of attention to gathered keys: SparseFlashAttentionGrad where a Scatter adds it up by the list that
gathered them; and what is near it and is not."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from fa_compiler.passes import Report
from tests.graphs import harness
from tests.passes.gradients import assert_close, evaluate, fused_pair, named
from tests.passes.running import Feeds, run

SPARSE = ["SparseFlashAttention", "SparseFlashAttentionGrad"]
DENSE = ["FlashAttentionScore", "FlashAttentionScoreGrad"]
TOLERANCE = 1e-5
"""Of the largest gradient, or of 1; the original is float32 throughout, with sums over at most 24 rows and 4 heads."""

ELEMENTS, PLACES = "train_dsa_gathered__fxjoint_op18", "train_dsa_indexed__fxjoint_op18"
"""Keys by GatherElements of keys repeated for each row, and by GatherND: batch 2, 24 rows and keys, 6 slots."""

BOTH = pytest.mark.parametrize("name", [ELEMENTS, PLACES])
Change = Callable[[onnx.ModelProto], None]


def feeds_of(model: onnx.ModelProto) -> Feeds:
    rng = np.random.default_rng(0)
    feeds: Feeds = {}
    for value in model.graph.input:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        if value.type.tensor_type.elem_type == TensorProto.INT64:
            feeds[value.name] = rng.integers(-shape[1], shape[1], shape)
        else:
            feeds[value.name] = rng.normal(size=shape).astype(np.float32)
    return feeds


def checked(model: onnx.ModelProto, ops: list[str], assume: tuple[str, ...] = ()) -> Report:
    """The pair became these two, and gives what the model gave, in ONNX Runtime and in the float64 reference."""
    fused, report = fused_pair(model, assume=assume)
    assert [block.op for block in report.blocks] == ops, report.missed
    feeds = feeds_of(model)
    original = named(model, run(model, feeds))
    for (name, wanted), result in itertools.product(
        original.items(), [evaluate(fused, feeds), named(fused, run(fused, feeds))]
    ):
        assert_close(result[name], wanted, TOLERANCE)
    return report


def made(model: onnx.ModelProto, *op_types: str) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type in op_types]


def scatters(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return made(model, "ScatterElements", "ScatterND")


def insert(model: onnx.ModelProto, node: onnx.NodeProto, before: onnx.NodeProto) -> None:
    model.graph.node.insert([*model.graph.node].index(before), node)


def without_slot_mask(model: onnx.ModelProto) -> None:
    """Every slot counts, forward and backward."""
    for node in made(model, "Where"):
        if node.output[0] in ("where_1", "where_2"):
            node.CopyFrom(helper.make_node("Identity", node.input[2:], node.output))


def given_list(model: onnx.ModelProto) -> None:
    """The list is an input: keys twice, and counted from the end."""
    without_slot_mask(model)
    (top,) = made(model, "TopK")
    model.graph.node.remove(top)
    model.graph.input.append(helper.make_tensor_value_info(top.output[1], TensorProto.INT64, [2, 24, 6]))


def ranks_without_mask(model: onnx.ModelProto) -> None:
    """A row may be given keys behind it only."""
    (top,) = made(model, "TopK")
    masking = next(node for node in made(model, "Where") if node.output[0] == top.input[0])
    top.input[0] = masking.input[2]


def twice_behind(model: onnx.ModelProto) -> None:
    """Twice the gradient is wanted of the keys."""
    last = next(node for node in model.graph.node if node.output[0] == "d_key")
    last.output[0] = "once"
    model.graph.node.append(helper.make_node("Add", ["once", "once"], ["d_key"]))


def only_values(model: onnx.ModelProto) -> None:
    """No gradient of the keys."""
    for output in [each for each in model.graph.output if each.name == "d_key"]:
        model.graph.output.remove(output)


ACCEPTED: dict[str, Change] = {
    "every slot": without_slot_mask,
    "a given list": given_list,
    "a factor behind": twice_behind,
    "values only": only_values,
}


@BOTH
@pytest.mark.parametrize("change", ACCEPTED.values(), ids=ACCEPTED)
def test_pairs_give_what_the_model_gave(name: str, change: Change) -> None:
    model = harness.load(name)
    change(model)
    report = checked(model, SPARSE)
    assert not report.missed


@BOTH
def test_a_row_that_may_be_without_a_key_leaves_the_pair_dense(name: str) -> None:
    model = harness.load(name)
    ranks_without_mask(model)
    _, report = fused_pair(model)
    assert [block.op for block in report.blocks] == DENSE
    (line,) = (line for line in report.missed if "stays dense" in line)
    assert "--assume no-empty-rows" in line
    _, report = fused_pair(model, assume=["no-empty-rows"])
    assert [block.op for block in report.blocks] == SPARSE


def other_list(model: onnx.ModelProto) -> None:
    """Added up by a list of its own."""
    scatter = scatters(model)[-1]
    model.graph.initializer.append(numpy_helper.from_array(np.array(1, np.int64), "one"))
    insert(model, helper.make_node("Sub", [scatter.input[1], "one"], ["moved"]), scatter)
    scatter.input[1] = "moved"


def beside_ones(model: onnx.ModelProto) -> None:
    """Added to ones."""
    scatter = scatters(model)[-1]
    zeros = next(each for each in model.graph.initializer if each.name == scatter.input[0])
    model.graph.initializer.append(numpy_helper.from_array(numpy_helper.to_array(zeros) + 1, "ones"))
    scatter.input[0] = "ones"


def reduced(model: onnx.ModelProto) -> None:
    """The largest is kept, not the sum."""
    (word,) = (each for each in scatters(model)[-1].attribute if each.name == "reduction")
    word.s = b"max"


def read_before(model: onnx.ModelProto) -> None:
    """Somebody wants the gradient of the slots."""
    name = scatters(model)[-1].input[2]
    model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 24, 6, 16]))


def squared_before(model: onnx.ModelProto) -> None:
    """Each slot's gradient is squared before it is added."""
    scatter = scatters(model)[-1]
    insert(model, helper.make_node("Mul", [scatter.input[2], scatter.input[2]], ["squared"]), scatter)
    scatter.input[2] = "squared"


LOOK_ALIKE: dict[str, Change] = {
    "another list": other_list,
    "not added to zeros": beside_ones,
    "another reduction": reduced,
    "read before": read_before,
    "changed before": squared_before,
}


@BOTH
@pytest.mark.parametrize("change", LOOK_ALIKE.values(), ids=LOOK_ALIKE)
def test_a_look_alike_stays_on_what_was_gathered(name: str, change: Change) -> None:
    model = harness.load(name)
    change(model)
    report = checked(model, DENSE)
    assert any("stays dense" in line and "the gradient of key" in line for line in report.missed)


def along_rows(model: onnx.ModelProto) -> None:
    """Of as many rows as keys, the keys' numbers are added along the rows."""
    scatter = scatters(model)[-1]
    (axis,) = (each for each in scatter.attribute if each.name == "axis")
    axis.i = 1


def over_keys(model: onnx.ModelProto) -> None:
    """Summed over the keys instead of the rows, of which there are as many."""
    scatter = scatters(model)[-1]
    total = next(node for node in made(model, "ReduceSum") if node.input[0] == scatter.output[0])
    model.graph.initializer.append(numpy_helper.from_array(np.array([2], np.int64), "keys"))
    total.input[1] = "keys"
    squeeze = next(node for node in made(model, "Squeeze") if node.input[0] == total.output[0])
    squeeze.input[1] = "keys"


@pytest.mark.parametrize("change", [along_rows, over_keys])
def test_sizes_that_are_equal_are_not_the_same(change: Change) -> None:
    model = harness.load(ELEMENTS)
    change(model)
    checked(model, DENSE)
