"""GE graphs to write, read and break."""

from __future__ import annotations

import numpy as np

from fa_compiler.lowering.ascend.graph import Attr, Graph, Model, Op, Output, TensorDesc, Weight, absent

SHAPE = (1, 12, 128, 64)


def weight(values: np.ndarray, dtype: str) -> Weight:
    """A constant that is there already."""
    data = values.tobytes()
    return Weight(dtype, values.shape, len(data), lambda: data)


def data(name: str, index: int, dtype: str = "DT_FLOAT16", shape: tuple[int, ...] | None = SHAPE, **more: object) -> Op:
    """A model input."""
    descs = [TensorDesc(end, dtype, shape, **more) for end in "xy"]  # type: ignore[arg-type]
    return Op(name, "Data", [], descs[:1], descs[1:], {"index": Attr("Int", index)})


def const(name: str, values: np.ndarray, dtype: str) -> Op:
    """A constant."""
    value = Attr("Tensor", weight(values, dtype))
    return Op(name, "Const", [], [], [TensorDesc("y", dtype, values.shape)], {"value": value})


def net_output(*sources: Output, dtype: str = "DT_FLOAT16", shape: tuple[int, ...] | None = SHAPE) -> Op:
    """The end of a graph."""
    descs = [TensorDesc(f"x{number}", dtype, shape) for number in range(len(sources))]
    return Op("NetOutput", "NetOutput", list(sources), descs)


def attention() -> Model:
    """One FlashAttentionScore with a mask: absent inputs in the middle, all of the attributes' common kinds."""
    statistics = (*SHAPE[:3], 8)
    inputs: list[Output | None] = [Output("q"), Output("k"), Output("v"), None, None, None, Output("mask")]
    descs = [TensorDesc(name, "DT_FLOAT16", SHAPE) for name in ("query", "key", "value")]
    descs += [absent(name) for name in ("real_shift", "drop_mask", "padding_mask")]
    descs.append(TensorDesc("atten_mask", "DT_BOOL", (128, 128)))
    outputs = [
        TensorDesc("softmax_max", "DT_FLOAT", statistics),
        TensorDesc("softmax_sum", "DT_FLOAT", statistics),
        TensorDesc("softmax_out", "DT_FLOAT16", (0, 0, 0, 0)),
        TensorDesc("attention_out", "DT_FLOAT16", SHAPE),
    ]
    attrs = {
        "head_num": Attr("Int", 12),
        "input_layout": Attr("String", "BNSD"),
        "scale_value": Attr("Float", 0.125),
    }
    mask = np.triu(np.ones((128, 128), bool), 1)
    fused = Op("attn", "FlashAttentionScore", inputs, descs, outputs, attrs)
    ops = [data(name, index) for index, name in enumerate("qkv")]
    ops += [const("mask", mask, "DT_BOOL"), fused, net_output(Output("attn", 3))]
    return Model("fas", [Graph("fas_graph", ops)])


def branches() -> Model:
    """An If whose two branches each take one input: negated or as it is."""
    shape = (2, 3)
    root = Graph("main")
    root.ops = [
        data("flag", 0, "DT_BOOL", ()),
        data("a", 1, "DT_FLOAT", shape),
        Op(
            "choice",
            "If",
            [Output("flag"), Output("a")],
            [TensorDesc("cond", "DT_BOOL", ()), TensorDesc("input0", "DT_FLOAT", shape)],
            [TensorDesc("output0", "DT_FLOAT", shape)],
            subgraphs={"then_branch": "negated", "else_branch": "kept"},
        ),
        net_output(Output("choice"), dtype="DT_FLOAT", shape=shape),
    ]
    inner = []
    for name, op_type in (("negated", "Neg"), ("kept", "Identity")):
        change = Op(
            "change",
            op_type,
            [Output("inner")],
            [TensorDesc("x", "DT_FLOAT", shape)],
            [TensorDesc("y", "DT_FLOAT", shape)],
        )
        end = net_output(Output("change"), dtype="DT_FLOAT", shape=shape)
        inner.append(Graph(name, [data("inner", 0, "DT_FLOAT", shape), change, end]))
    return Model("branches", [root, *inner])
