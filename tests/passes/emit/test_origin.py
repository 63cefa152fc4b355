"""Fused nodes say where they come from: by the path in their names, and by the names of the nodes that they replace."""

from __future__ import annotations

import onnx
import pytest

from fa_compiler.passes.rewrite.origin import LONGEST, NAME_SCOPES, REPLACES
from tests.passes.running import fused, parse

TWO_LAYERS = """
    k0 = Transpose<perm=[0, 1, 3, 2]>(k) s0 = MatMul(q, k0) p0 = Softmax<axis=-1>(s0) y0 = MatMul(p0, v)
    k1 = Transpose<perm=[0, 1, 3, 2]>(k) s1 = MatMul(y0, k1) p1 = Softmax<axis=-1>(s1) y = MatMul(p1, v)
"""
LAYERS = {"0": ("k0", "s0", "p0", "y0"), "1": ("k1", "s1", "p1", "y")}


def layers() -> onnx.ModelProto:
    sizes = "float[B,4,S,8]"
    return parse(TWO_LAYERS, inputs=f"{sizes} q, {sizes} k, {sizes} v", outputs=f"{sizes} y")


def fused_nodes(proto: onnx.ModelProto) -> list[onnx.NodeProto]:
    result, _ = fused(proto)
    return [node for node in result.graph.node if node.op_type == "FlashAttentionScore"]


def replaced(node: onnx.NodeProto) -> str:
    (text,) = [entry.value for entry in node.metadata_props if entry.key == REPLACES]
    return text


def test_names_keep_the_path_and_the_metadata_the_nodes() -> None:
    proto = layers()
    for node in proto.graph.node:
        (layer,) = [number for number, outputs in LAYERS.items() if node.output[0] in outputs]
        part = "attn/softmax" if node.op_type == "Softmax" else "attn"
        node.name = f"/model/layer.{layer}/{part}/{node.op_type}_{node.output[0]}"
    first, second = fused_nodes(proto)
    assert [first.name, second.name] == [f"/model/layer.{n}/attn/FlashAttentionScore" for n in "01"]
    names = "attn/MatMul_y0", "attn/softmax/Softmax_p0", "attn/MatMul_s0", "attn/Transpose_k0"
    assert replaced(first) == ", ".join(f"/model/layer.0/{name}" for name in names)


def test_equal_paths_give_unique_names() -> None:
    proto = layers()
    for node in proto.graph.node:
        node.name = f"/model/{node.output[0]}"
    assert [node.name for node in fused_nodes(proto)] == [f"/model/FlashAttentionScore{end}" for end in ("", "_2")]


@pytest.mark.parametrize(
    ("scopes", "name"),
    [
        ("['', 'encoder', 'encoder.layer.{}', '{}']", "encoder.layer.{}/FlashAttentionScore"),
        ("['', '{1}']", None),
        ("[['a', {}", None),
        ("7", None),
    ],
)
def test_names_keep_the_scopes_of_newer_exports(scopes: str, name: str | None) -> None:
    proto = layers()
    for node in proto.graph.node:
        (layer,) = [number for number, outputs in LAYERS.items() if node.output[0] in outputs]
        node.metadata_props.add(key=NAME_SCOPES, value=scopes.format(layer, node.output[0]))
    wanted = ["fa_FlashAttentionScore", "fa_FlashAttentionScore_2"] if name is None else [name.format(n) for n in "01"]
    assert [node.name for node in fused_nodes(proto)] == wanted


def test_the_list_of_replaced_nodes_is_bounded() -> None:
    proto = layers()
    for node in proto.graph.node:
        node.name = f"{node.output[0]}_{'x' * (LONGEST // 3)}"
    for node in fused_nodes(proto):
        assert replaced(node).endswith("x, and 2 more")
