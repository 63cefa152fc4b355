"""Whatever a file holds, verify answers: it finds faults and does not fail, and the unknown is no fault."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_compiler.op_registry import EXTENSIONS, NodeView, OpSpec, TensorInfo, get, verify
from fa_compiler.op_registry.geometry import LAYOUTS
from tests.examples import examples

from .nodes import SHAPES, backward, forward
from .test_constraints_backward import GOOD as GOOD_BACKWARD
from .test_constraints_forward import GOOD as GOOD_FORWARD

dims = st.one_of(st.integers(0, 9), st.sampled_from([1024, 2048, 3072]), st.sampled_from(["b", "s", None]))
shapes = st.one_of(st.none(), st.lists(dims, max_size=5).map(tuple))
floats = st.sampled_from(["DT_FLOAT16", "DT_FLOAT", "DT_BOOL", "DT_INT64", "DT_FLOAT8_E5M2", ""])
vectors = st.lists(st.integers(-3, 40), max_size=4).map(lambda v: np.asarray(v, np.int64))


@st.composite
def tensors(draw: st.DrawFn) -> TensorInfo:
    if draw(st.booleans()):
        content = draw(vectors)
        return TensorInfo("DT_INT64", content.shape, content)
    return TensorInfo(draw(floats), draw(shapes))


def attributes(spec: OpSpec) -> st.SearchStrategy[dict[str, Any]]:
    values = st.one_of(
        st.integers(-3, 12),
        st.sampled_from([2147483647, -(2**63), 0.5, float("nan"), "", "same_as_input", "zero", *LAYOUTS]),
        st.none(),
    )
    return st.dictionaries(st.sampled_from([*spec.attr_names, "cpu_empty_rows", "other"]), values, max_size=5)


@st.composite
def nodes(draw: st.DrawFn) -> NodeView:
    """A good node of a random layout with a few of its parts replaced by anything."""
    layout = draw(st.sampled_from(sorted(SHAPES)))
    node = draw(st.sampled_from([forward, backward]))(layout=layout)
    spec = get(node.op_type)
    inputs = dict(node.inputs) | draw(st.dictionaries(st.sampled_from(spec.input_names), tensors(), max_size=5))
    outputs = draw(st.dictionaries(st.sampled_from(spec.output_names), tensors(), max_size=2))
    return replace(node, inputs=inputs, outputs=outputs, attrs=node.attrs | draw(attributes(spec)))


@given(nodes(), st.sampled_from(["ort", "A2", "950", "310P"]))
@settings(max_examples=examples(100))
def test_verify_answers(node: NodeView, target: str) -> None:
    known = {entry.id for entry in EXTENSIONS}
    for violation in verify(node, target):
        assert violation.code in (161001, 161002)
        assert violation.message
        assert violation.extension is None or violation.extension in known


@given(st.data(), st.sampled_from(["ort", "A2"]))
@settings(max_examples=examples(80))
def test_less_knowledge_gives_no_violation(data: st.DataObject, target: str) -> None:
    """A good node stays one when some of its sizes and contents are forgotten or turned into symbols."""
    _, node = data.draw(st.sampled_from([*GOOD_FORWARD, *GOOD_BACKWARD]))

    def blurred(tensor: Any) -> Any:
        if not isinstance(tensor, TensorInfo) or tensor.shape is None:
            return tensor
        if data.draw(st.booleans()):
            return TensorInfo(data.draw(st.sampled_from([tensor.dtype, ""])), None)
        forget = data.draw(st.lists(st.sampled_from(["keep", "symbol", "unknown"]), min_size=5, max_size=5))
        words = zip(tensor.shape, forget, strict=False)
        sizes = tuple(n if word == "keep" else f"d{n}" if word == "symbol" else None for n, word in words)
        return TensorInfo(tensor.dtype, sizes, tensor.value if set(forget) == {"keep"} else None)

    inputs = {name: blurred(tensor) for name, tensor in node.inputs.items()}
    found = verify(replace(node, inputs=inputs, outputs={}), target)
    assert [violation for violation in found if violation.extension is None] == []
