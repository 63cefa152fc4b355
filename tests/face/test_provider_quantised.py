"""Quantised keys, queries and biases in sessions of the provider, at every level of ONNX Runtime's optimisations."""

from __future__ import annotations

import numpy as np
import pytest

import fa_compiler.provider as provider
from tests.face.test_provider import RELEASE, session_of
from tests.pairs import pairwise
from tests.passes.emit.test_dequantised import feeds_for, model
from tests.passes.running import LEVELS, run

pytestmark = pytest.mark.skipif(
    RELEASE < provider.FIRST_RELEASE, reason="ONNX Runtime has no plugin interface that we use"
)


@pytest.mark.parametrize(("opset", "kind", "point"), pairwise((17, 21), ("int8", "int32"), (False, True)))
def test_integers_keep_their_signs(opset: int, kind: str, point: bool) -> None:
    """What is inserted lies in front of the DequantizeLinear, so that nothing is quantised again behind it."""
    proto = model(opset, {"q": kind, "kt": kind, "b": kind}, point)
    feeds = feeds_for(proto)
    (wanted,) = run(proto, feeds)
    for level in LEVELS:
        with provider.overhear() as heard:
            (got,) = session_of(proto, graph_optimization_level=level).run(None, dict(feeds))
        assert [report.count("fused") for report in heard.reports] == [1]
        np.testing.assert_allclose(got, wanted, atol=2e-5 * float(np.abs(wanted).max()))
