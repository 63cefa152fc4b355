"""What is not known of an operator that the model already holds is never dropped, and no release has something new."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime.capi.onnxruntime_pybind11_state as runtime
import pytest

from fa_compiler.passes import Options, fuse
from fa_compiler.passes.answer.options import NEWEST_OPSET, Target
from fa_compiler.passes.attention_ops import FAMILIES
from fa_compiler.passes.ir.signatures import SIGNATURES, Signature, unknown_part
from fa_compiler.passes.layout.contraction import any_contraction
from fa_compiler.passes.values.shapes import analyse
from tests.passes.running import fused, parse

MISSING = (
    "look at what it does; then read or decline it in the operator's reader, and list it in passes/ir/signatures.py"
)


def schemas() -> Iterator[Any]:
    """Every version of every operator of the installed ONNX and ONNX Runtime."""
    yield from onnx.defs.get_all_schemas_with_history()
    yield from runtime.get_all_operator_schema()


def test_no_release_has_more_than_is_known() -> None:
    """An operator that is read has no input, output, attribute or version in an installed release that nobody knows.

    `make compat` runs this with each of the pinned releases of ONNX Runtime.
    """
    compared = set()
    for schema in schemas():
        known = SIGNATURES.get((schema.domain, schema.name))
        if known is None:
            continue
        compared.add((schema.domain, schema.name))
        where = f"{schema.domain or 'ai.onnx'}::{schema.name} {schema.since_version}"
        assert schema.since_version <= known.version, f"{where}: a new version; {MISSING}"
        for what, names, listed in (
            ("inputs", [each.name for each in schema.inputs], known.inputs),
            ("outputs", [each.name for each in schema.outputs], known.outputs),
        ):
            assert len(names) <= len(listed), f"{where}: the {what} {names[len(listed) :]} are new; {MISSING}"
        new = set(schema.attributes) - known.attributes
        assert not new, f"{where}: the attributes {sorted(new)} are new; {MISSING}"
    assert compared >= {("com.microsoft", "GroupQueryAttention"), ("com.microsoft", "QAttention")}


def test_the_names_are_those_of_the_schemas() -> None:
    """Inputs and outputs are known by their places, so that the names of the lists have to be in the schemas' order."""
    for schema in schemas():
        known = SIGNATURES.get((schema.domain, schema.name))
        if known is not None:
            assert [each.name for each in schema.inputs] == list(known.inputs[: len(schema.inputs)]), schema.name
            assert [each.name for each in schema.outputs] == list(known.outputs[: len(schema.outputs)]), schema.name


def test_every_converted_operator_has_a_signature() -> None:
    for domain, name in FAMILIES:
        assert ("" if domain == "ai.onnx" else domain, name) in SIGNATURES, (domain, name)


def node_of(domain: str, name: str, known: Signature) -> ir.Node:
    """A node with all known inputs and outputs, each of which is used."""
    inputs = [ir.Value(name=each) for each in known.inputs]
    node = ir.node(name, inputs=inputs, domain=domain, num_outputs=len(known.outputs))
    ir.Graph([], list(node.outputs), nodes=[node], opset_imports={domain: 1})
    return node


@pytest.mark.parametrize("key", sorted(SIGNATURES), ids="::".join)
def test_unknown_parts(key: tuple[str, str]) -> None:
    """A further input, output, attribute and version is named, and one that is absent or unused does not count."""
    known = SIGNATURES[key]
    assert unknown_part(node_of(*key, known)) is None
    node = node_of(*key, known)
    node.attributes["of_a_later_release"] = ir.AttrInt64("of_a_later_release", 0)
    assert unknown_part(node) == "the attribute 'of_a_later_release'"
    node = node_of(*key, known)
    node.resize_inputs(len(known.inputs) + 1)
    assert unknown_part(node) is None
    node.replace_input_with(len(known.inputs), ir.Value(name="later"))
    assert known.variadic or unknown_part(node) == f"the input {len(known.inputs)} 'later'"
    node = node_of(*key, known)
    node.resize_outputs(len(known.outputs) + 1)
    assert unknown_part(node) is None
    node.outputs[-1].name = "more"
    assert isinstance(node.graph, ir.Graph)
    node.graph.outputs.append(node.outputs[-1])
    assert unknown_part(node) == f"the output {len(known.outputs)} 'more'"
    node = node_of(*key, known)
    assert isinstance(node.graph, ir.Graph)
    node.graph.opset_imports[key[0]] = known.version + 1
    assert unknown_part(node) == f"version {known.version + 1} of {key[0] or 'ai.onnx'}"


NO_ATTENTION = {
    "DisentangledAttention_TRT",  # adds up scores
    "LogSoftmax",  # an anchor only with an Exp behind it
    "PackedSparseAttentionIndexer",
    "PackedSparseAttentionIndexerMerge",
    "SparseAttentionIndexer",
    "SoftmaxCrossEntropyLoss",
}
"""Operators that are called attention or softmax and are none."""


def test_no_release_has_an_attention_that_is_passed_over() -> None:
    """Each operator that is called attention or softmax has a line in the report, with or without values behind it."""
    names = {(schema.domain, schema.name) for schema in schemas() if schema.domain not in ("ascend", "fa_compiler")}
    for domain, name in sorted(names):
        if not ("Attention" in name or "Softmax" in name) or name in NO_ATTENTION:
            continue
        node = ir.node(name, inputs=[ir.Value(name=each) for each in ("q", "k", "v")], domain=domain, name="it")
        graph = ir.Graph(node.inputs, node.outputs, nodes=[node], opset_imports={"": 23, domain: 1 if domain else 23})
        report = fuse(ir.Model(graph, ir_version=10), Options())
        assert [block.anchor for block in report.blocks] == ["it"], (domain, name)
        assert report.blocks[0].reason, (domain, name)


@pytest.mark.parametrize("target", ["ort", "onnx", "contrib", "ascend"])
def test_declined_by_name(target: Target) -> None:
    """A ready-made operator with something that is not known stays, and the report names the part."""
    model = parse(
        "y = com.microsoft.MultiHeadAttention<num_heads = 4, later = 1>(q, q, q) ",
        inputs="float[B,S,32] q",
        outputs="float[B,S,32] y",
    )
    result, report = fused(model, target)
    (block,) = report.blocks
    if target == "contrib":  # whose own operator it is
        assert block.status != "fused"
    else:
        assert block.code == "ready_made"
        assert block.reason == "MultiHeadAttention has the attribute 'later', and what it means is not known here"
    assert [node.op_type for node in result.graph.node] == ["MultiHeadAttention"]


def test_a_product_with_something_unknown_is_none() -> None:
    """The readers of other operators of ONNX Runtime go by the same lists."""
    model = ir.from_proto(parse("y = com.microsoft.FusedMatMul<alpha = 0.5>(q, k) ", outputs="float[B,4,S,T] y"))
    (node,) = model.graph
    info = analyse(model)
    assert any_contraction(node, info) is not None
    node.attributes["later"] = ir.AttrInt64("later", 1)
    assert any_contraction(node, info) is None


def test_the_newest_version_is_that_of_the_matcher() -> None:
    assert SIGNATURES["", "Attention"].version == NEWEST_OPSET
