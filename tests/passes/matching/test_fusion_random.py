"""Attention in random spellings is fused, and gives in ONNX Runtime what the model gave and the formula says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_compiler.passes.answer.options import Target
from fa_compiler.reference import evaluator
from tests.examples import examples
from tests.passes.builder import Case, build
from tests.passes.patterns import PATTERNS, WRITTEN
from tests.passes.running import Feeds, assert_same, fused, run
from tests.passes.spelling import CONSTANT, MODERATE, Mask, Spelling, consistent, may_decline
from tests.passes.strategies import SPELLINGS

STRUCTURAL = [source for source in WRITTEN if not source.startswith(("slice", "positions"))]
"""A constant that is cut to size says nothing of scores that are longer than it."""


def checked(case: Case, model: onnx.ModelProto, feeds: Feeds) -> None:
    """Run the model and compare with the original in ONNX Runtime and with the formula."""
    formula, tolerance = case.formula(feeds)
    original, result = run(case.model, feeds)[0], run(model, feeds)[0]
    # The original first: a formula that is wrong must not pass for a wrong fusion.
    assert_same(original, formula, tolerance)
    assert_same(result, formula, tolerance)
    assert_same(result, original, tolerance)


def keeps_first_key(mask: Mask, spelling: Spelling) -> bool:
    """Can a test see to it that every row keeps the first key?"""
    if mask.computed:
        moved = -1 if mask.bound else 0
        return bool(PATTERNS[mask.pattern].kept(spelling.sizes["S"], spelling.sizes["T"], moved)[:, 0].all())
    return mask.source not in CONSTANT


@settings(max_examples=examples(100))
@given(SPELLINGS, st.integers(0, 1 << 16))
def test_fused_spellings_give_what_the_model_gave(spelling: Spelling, seed: int) -> None:
    case = build(spelling)
    model, report = fused(case.model)
    (block,) = report.blocks
    if block.status != "fused":
        assert block.code in may_decline(spelling), block
        assert model == ir.to_proto(ir.from_proto(case.model)), "a declined model was changed"
        return
    assert not {node.op_type for node in model.graph.node} & {"Softmax", "Exp", "Einsum", "MatMul", "Gemm"}
    checked(case, model, case.feeds(seed))


@settings(max_examples=examples(40))
@given(SPELLINGS, st.integers(0, 1 << 16))
def test_what_is_fused_for_ascend_gives_the_same(spelling: Spelling, seed: int) -> None:
    """Without extensions, verified for the product, and still the same in ONNX Runtime."""
    case = build(spelling)
    model, report = fused(case.model, "ascend")
    (block,) = report.blocks
    if block.status != "fused":
        assert block.code in may_decline(spelling, "ascend") | {"illegal_for_target", "empty_rows"}, block
        # The prototype that is the default has no sink.
        plain = not spelling.masks and spelling.guard == "none" and not spelling.sink
        assert not plain or spelling.sizes["E"] > spelling.sizes["D"], block
        assert model == ir.to_proto(ir.from_proto(case.model)), "a declined model was changed"
        return
    (node,) = (node for node in model.graph.node if node.domain == "ascend")
    assert not [attribute.name for attribute in node.attribute if attribute.name.startswith("cpu_")]
    assert all(node.output), "an output has no name"
    assert not block.extensions
    checked(case, model, case.feeds(seed))


@settings(max_examples=examples(40))
@given(SPELLINGS.filter(lambda spelling: bool(spelling.masks)), st.integers(0, 1 << 16))
def test_masks_that_are_said_to_dominate(spelling: Spelling, seed: int) -> None:
    """The scores stay far above -1e4 here, so the user is right: rows that are masked everywhere included."""
    case = build(spelling)
    model, report = fused(case.model, assume=["masks-dominate"])
    (block,) = report.blocks
    if block.status != "fused":
        # How scores are rounded in a row that is masked everywhere is for another word to leave open.
        rounded = block.code == "mask_value" and "--assume no-empty-rows" in (block.hint or "")
        assert rounded or block.code in may_decline(spelling), block
        return
    checked(case, model, case.feeds(seed))


@settings(max_examples=examples(40))
@given(
    SPELLINGS.filter(lambda spelling: all(keeps_first_key(mask, spelling) for mask in spelling.masks)),
    st.integers(0, 1 << 16),
    st.sampled_from(["ort", "ascend"]),
)
def test_rows_that_are_said_not_to_be_empty(spelling: Spelling, seed: int, target: Target) -> None:
    """The first key is kept in every row."""
    case = build(spelling)
    model, report = fused(case.model, target, ["no-empty-rows"])
    (block,) = report.blocks
    if block.status != "fused":
        assert block.code in may_decline(spelling, target) | (
            {"illegal_for_target"} if target == "ascend" else set()
        ), block
        return
    feeds = case.feeds(seed)
    for name, mask in zip(("m0", "m1"), spelling.masks, strict=False):
        if name in feeds:
            # A mask without keys keeps or excludes whole rows.
            kept = feeds[name][..., 0] if mask.dims.endswith("T") else feeds[name]
            kept[...] = 0 if mask.form == "bias" else 1
    checked(case, model, feeds)


@settings(max_examples=examples(30))
@given(SPELLINGS, st.integers(0, 1 << 16))
def test_bfloat16(spelling: Spelling, seed: int) -> None:
    """ONNX Runtime has few operators for it: the fused model runs on the reference and is held against the formula.

    What a mask of moderate size makes of a row that keeps nothing depends on how sums are rounded: in float64 not.
    """
    masks = tuple(replace(mask, fill=min(mask.fill, MODERATE)) for mask in spelling.masks)
    change = {"dtype": "bfloat16", "opset": max(spelling.opset, 18), "product": "matmul", "masks": masks}
    if spelling.values == "einsum":  # which takes no bfloat16: a model that is declined would keep it
        change["values"] = "matmul"
    spelling = consistent(replace(spelling, **change))
    case = build(spelling)
    model, report = fused(case.model)
    (block,) = report.blocks
    if block.status != "fused":
        assert block.code in may_decline(spelling), block
        return
    feeds = case.feeds(seed)
    formula, tolerance = case.formula(feeds)
    (result,) = evaluator(model).run(None, feeds)
    assert_same(np.asarray(result), formula, tolerance)


def only_a_band(spelling: Spelling, source: str, pattern: str) -> Spelling:
    """The spelling with a mask that follows from positions alone, in more than one row and one column."""
    sizes = {**spelling.sizes, "S": max(spelling.sizes["S"], 2), "T": max(spelling.sizes["T"], 2)}
    mask = Mask(form=spelling.masks[0].form, source=source, pattern=pattern, dims="ST")
    if mask.form in ("bias", "add_mul"):
        mask = replace(mask, form="select")
    plain = replace(spelling, sizes=sizes, masks=(mask,), guard="none", floor=False, sink=False, upcast=False)
    return consistent(replace(plain, scale="mul", opset=max(plain.opset, 14)))


@settings(max_examples=examples(30))
@given(SPELLINGS.filter(lambda spelling: bool(spelling.masks)), st.sampled_from(STRUCTURAL), st.booleans())
def test_structural_masks_leave_no_matrix(spelling: Spelling, source: str, cached: bool) -> None:
    """However a causal mask is computed, none of what computes it is left."""
    spelling = only_a_band(spelling, source, "cached" if cached else "causal")
    model, report = fused(build(spelling).model)
    (block,) = report.blocks
    assert block.mask == "causal", block
    assert not {node.op_type for node in model.graph.node} & {
        "Trilu",
        "Range",
        "CumSum",
        "And",
        "LessOrEqual",
        "Greater",
    }
