"""Gradients that are added up: of one tensor read several times, over several attentions, over several steps."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
import pytest

from tests.passes.backward.test_rejects import BODY, INPUTS, NUMBERS, layer
from tests.passes.gradients import assert_close, evaluate, fused_pair, named
from tests.passes.running import parse, random_feeds, run

SHAPE = "float[B,4,6,8]"


def agrees(original: onnx.ModelProto, pairs: int = 1) -> None:
    """Every pair is fused, nothing of a softmax is left, and every output is the same: by the reference and by the
    kernel."""
    changed, report = fused_pair(original)
    assert [block.status for block in report.blocks] == ["fused"] * 2 * pairs, report.blocks
    assert not {"Softmax", "ReduceSum"} & {node.op_type for node in changed.graph.node}
    for seed in range(2):
        feeds = random_feeds(original, seed)
        wanted = named(original, run(original, feeds))
        for got in (evaluate(changed, feeds), named(changed, run(changed, feeds))):
            for name, value in wanted.items():
                assert_close(got[name], value, 1e-5)


def model(changes: Mapping[str, str], more: str, outputs: str, inputs: str = INPUTS) -> onnx.ModelProto:
    body = " ".join({**BODY, **changes}.values())
    results = ", ".join(f"{SHAPE} {name}" for name in outputs.split())
    return parse(body, more, inputs=inputs, outputs=results, initializers=NUMBERS)


SUMS = {
    "of the output, by Add": ({"kt": f"g = Add(g1, g2) {BODY['kt']}"}, f"{SHAPE} g1, {SHAPE} g2", "y dq dk dv"),
    "of the output, by Sum": (
        {"kt": f"g = Sum(g1, g2, g3) {BODY['kt']}"},
        f"{SHAPE} g1, {SHAPE} g2, {SHAPE} g3",
        "y dq dk dv",
    ),
    "of the output, residual": (
        {"kt": f"less = Mul(g1, c) g = Add(less, g1) {BODY['kt']}"},
        f"{SHAPE} g1",
        "y dq dk dv",
    ),
    "with what other steps gave": (
        {"dk": f"{BODY['dk']} a = Add(old, dq) b = Sum(older, dk, dv)"},
        f"{SHAPE} old, {SHAPE} older",
        "y a b",
    ),
    "and given out one by one": ({"dk": f"{BODY['dk']} a = Add(dq, dk)"}, "", "y a dq dk dv"),
}
WITHOUT_G = INPUTS.rsplit(", ", 1)[0]


@pytest.mark.parametrize(("changes", "more", "outputs"), SUMS.values(), ids=SUMS)
def test_sums_of_gradients(changes: Mapping[str, str], more: str, outputs: str) -> None:
    agrees(model(changes, more, outputs, WITHOUT_G if "g1" in more else INPUTS))


ONE = f"{SHAPE} z, {SHAPE} g"
SHARED = {
    "key and value": ("k = Identity(z) v = Identity(z)", "dz = Add(dk, dv)", "y dq dz", f"{SHAPE} q, {ONE}"),
    "key and value, by Sum": ("k = Identity(z) v = Identity(z)", "dz = Sum(dk, dv)", "y dq dz", f"{SHAPE} q, {ONE}"),
    "query and key": ("q = Identity(z) k = Identity(z)", "dz = Add(dq, dk)", "y dv dz", f"{SHAPE} v, {ONE}"),
    "all three": (
        "q = Identity(z) k = Identity(z) v = Identity(z)",
        "dz0 = Add(dq, dk) dz = Add(dz0, dv)",
        "y dz",
        ONE,
    ),
    "all three, two of them wanted": (
        "q = Identity(z) k = Identity(z) v = Identity(z)",
        "dz = Add(dq, dv)",
        "y dz",
        ONE,
    ),
}


@pytest.mark.parametrize(("sources", "total", "outputs", "inputs"), SHARED.values(), ids=SHARED)
def test_one_tensor_for_several_operands(sources: str, total: str, outputs: str, inputs: str) -> None:
    agrees(model({"kt": f"{sources} {BODY['kt']}", "dk": f"{BODY['dk']} {total}"}, "", outputs, inputs))


def test_two_attentions_of_the_same_key_and_value() -> None:
    """Each has its own gradients, whose sum is that of the shared tensors."""
    first, second = layer(1, "q", "k", "v", "g"), layer(2, "q2", "k", "v", "g2")
    total = "dk = Add(dk1, dk2) dv = Sum(dv1, dv2)"
    outputs = ", ".join(f"{SHAPE} {name}" for name in ("y1", "y2", "dq1", "dq2", "dk", "dv"))
    body = " ".join((first[0], second[0], second[1], first[1], total))
    more = f"{SHAPE} q2, {SHAPE} g2"
    agrees(parse(body, more, inputs=INPUTS, outputs=outputs, initializers=NUMBERS), 2)


@pytest.mark.parametrize("wanted", ["dq", "dk", "dv", "dq dv", "dk dv"])
def test_gradients_nobody_asks_for_are_not_made(wanted: str) -> None:
    """The nodes of the others are left in the graph by many exporters; nobody reads them."""
    original = model({}, "", f"y {wanted}")
    agrees(original)
    changed, _ = fused_pair(original)
    (gradient,) = (node for node in changed.graph.node if node.op_type == "FlashAttentionScoreGrad")
    made = {role for role, name in zip(("dq", "dk", "dv"), gradient.output, strict=False) if name}
    assert made == set(wanted.split())
