"""Linear attention in plain operators in sessions that have the execution provider, and in plans."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnxruntime as ort
import pytest

import fa_compiler
from fa_compiler import provider
from tests.passes.linear.test_graphs import LENGTHS, feeds_of, load
from tests.passes.running import assert_same

from .builders import saved
from .test_provider import RELEASE, fused, with_provider

pytestmark = pytest.mark.skipif(
    RELEASE < provider.FIRST_RELEASE, reason="ONNX Runtime has no plugin interface that we use"
)
TOLERANCE = 1e-5
"""float32 sums of decaying terms, in another order."""
MODELS = {
    "a step": "qwen3_next__rule_step_dynamo",
    "a Scan": "hand__scan_gated_delta_head_mulsum_axis2_s0False",
    "a Loop": "hand__loop_delta_matmul_vk_axis2_scatter",
    "chunks": "qwen3_next__rule_chunk16_dyn_dynamo",
}


def agree(model: onnx.ModelProto, session: ort.InferenceSession, length: int) -> None:
    """The session gives what ONNX Runtime alone gives."""
    feeds = feeds_of(model, length)
    expected = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)
    for got, wanted in zip(session.run(None, feeds), expected, strict=True):
        assert_same(got, wanted, TOLERANCE)


@pytest.mark.parametrize("name", MODELS)
def test_a_session_with_the_provider(name: str) -> None:
    model = load(MODELS[name])
    with provider.overhear() as heard:
        session = ort.InferenceSession(model.SerializeToString(), with_provider())
    assert 1 in fused(heard)
    (last, *_) = LENGTHS.get(MODELS[name], (9,))[::-1]
    agree(model, session, last)


def test_a_plan(tmp_path: Path) -> None:
    """A session with a plan does not ask the matcher."""
    model, plan = load(MODELS["a step"]), tmp_path / "model.plan"
    assert fa_compiler.plan(saved(model, tmp_path / "model.onnx"), plan).count("fused") == 1
    options = ort.SessionOptions()
    options.add_provider_for_devices(fa_compiler.register_provider(), {"plan": str(plan)})
    with provider.overhear() as heard:
        session = ort.InferenceSession(model.SerializeToString(), options)
    assert not heard.reports
    agree(model, session, 1)
