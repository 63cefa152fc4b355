"""The ONNX models of the peers. Their inputs and outputs have the shapes of `cases.Case`, so the time includes
splitting and merging the heads, as in a real model.

The inputs of a graph have the names of the arrays of truth.py. `mask` is the float mask of padding,
[batch, 1, 1, keys], and `p` are the probabilities that a forward part has saved.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from bench.speed.cases import Case
from bench.speed.peer import MASKED, NotOffered
from bench.speed.truth import OUTPUTS, Array, to_bits, visible

TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}


class Builder:
    """Nodes and constants of one model."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.type = TYPES[case.dtype]
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self._count = 0

    def input(self, name: str, shape: list[int], kind: int | None = None) -> str:
        """Declares an input of the model, of the type `kind` or of the case's type."""
        self.inputs.append(helper.make_tensor_value_info(name, kind or self.type, shape))
        return name

    def output(self, name: str, shape: list[int] | None, kind: int | None = None) -> str:
        """Declares an output of the model."""
        self.outputs.append(helper.make_tensor_value_info(name, kind or self.type, shape))
        return name

    def operands(self, names: str = "qkv") -> list[str]:
        """Declares query, key and value in the shapes of the case."""
        case = self.case
        row = [case.batch, case.rows, case.heads * case.size]
        key = [case.batch, case.keys, case.kv_heads * case.size]
        cache = [case.batch, case.kv_heads, case.keys, case.size]
        return [self.input(n, row if n == "q" else cache if case.kind == "decode" else key) for n in names]

    def constant(self, values: Array | list[int], own_type: bool = False) -> str:
        """An initializer: integers, booleans, or numbers of the case's type."""
        array = np.asarray(values)
        kind = self.type if own_type else helper.np_dtype_to_tensor_dtype(array.dtype)
        if own_type:
            array = to_bits(array.astype(np.float32), self.case.dtype)
        self._count += 1
        name = f"constant_{self._count}"
        self.constants.append(helper.make_tensor(name, kind, array.shape, array.tobytes(), raw=True))
        return name

    def __call__(self, op: str, *inputs: str, output: str = "", domain: str = "", **attributes: Any) -> str:
        """Adds a node with one output; returns the name of the output."""
        self._count += 1
        name = output or f"value_{self._count}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], domain=domain, **attributes))
        return name

    def split(self, name: str, heads: int) -> str:
        """[batch, rows, heads * size] to [batch, heads, rows, size]."""
        shape = self.constant([self.case.batch, -1, heads, self.case.size])
        return self("Transpose", self("Reshape", name, shape), perm=[0, 2, 1, 3])

    def merge(self, name: str, heads: int, output: str) -> str:
        """[batch, heads, rows, size] to [batch, rows, heads * size], as an output of the model."""
        case = self.case
        shape = self.constant([case.batch, -1, heads * case.size])
        self("Reshape", self("Transpose", name, perm=[0, 2, 1, 3]), shape, output=output)
        rows = case.keys if output in ("dk", "dv") else case.rows
        return self.output(output, [case.batch, rows, heads * case.size])

    def turned(self, name: str) -> str:
        """The tensor with its last two axes exchanged."""
        return self("Transpose", name, perm=[0, 1, 3, 2])

    def model(self, opset: int = 17, *domains: str) -> onnx.ModelProto:
        """The model."""
        graph = helper.make_graph(self.nodes, "attention", self.inputs, self.outputs, self.constants)
        opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
        return helper.make_model(graph, ir_version=8 if opset < 23 else 11, opset_imports=opsets)


def unfused(case: Case) -> onnx.ModelProto:
    """The spelling of an exporter, and of an autograd: products, softmax, and their gradients."""
    b = Builder(case)
    q, k, v = b.operands()
    q = b.split(q, case.heads)
    if case.kind != "decode":
        k, v = b.split(k, case.kv_heads), b.split(v, case.kv_heads)
    if case.heads != case.kv_heads:
        k, v = _repeated(b, k), _repeated(b, v)
    scale = b.constant(np.array(case.size**-0.5), own_type=True)
    if case.kind == "backward":
        p = b.input("p", [case.batch, case.heads, case.rows, case.keys])
    else:
        scores = b("Mul", b("MatMul", q, b.turned(k)), scale)
        p = b("Softmax", _masked(b, scores), axis=-1)
        b.merge(b("MatMul", p, v), case.heads, "out")
    if case.gradient:
        _gradients(b, q, k, v, p, scale)
    return b.model()


def _repeated(b: Builder, name: str) -> str:
    case = b.case
    wide = b.constant([case.batch, case.kv_heads, case.heads // case.kv_heads, case.keys, case.size])
    flat = b.constant([case.batch, case.heads, case.keys, case.size])
    return b("Reshape", b("Expand", b("Unsqueeze", name, b.constant([2])), wide), flat)


def _masked(b: Builder, scores: str) -> str:
    case = b.case
    left = visible(case, np.arange(case.rows))
    if left is not None:
        low = -65504.0 if case.dtype == "float16" else -3.38e38
        return b("Where", b.constant(left[None, None]), scores, b.constant(np.array(low), own_type=True))
    if case.mask == "pad":
        return b("Add", scores, b.input("mask", [case.batch, 1, 1, case.keys]))
    if case.mask == "bias":
        return b("Add", scores, b.input("bias", [1, case.heads, case.rows, case.keys]))
    return scores


def _gradients(b: Builder, q: str, k: str, v: str, p: str, scale: str) -> None:
    """dV = P^T dO, dP = dO V^T, dS = P * (dP - rowsum(P * dP)) * scale, dQ = dS K, dK = dS^T Q."""
    case = b.case
    dy = b.split(b.input("dy", [case.batch, case.rows, case.heads * case.size]), case.heads)
    dp = b("MatMul", dy, b.turned(v))
    row = b("ReduceSum", b("Mul", p, dp), b.constant([-1]), keepdims=1)
    ds = b("Mul", b("Mul", p, b("Sub", dp, row)), scale)
    b.merge(b("MatMul", ds, k), case.heads, "dq")
    b.merge(b("MatMul", b.turned(ds), q), case.kv_heads, "dk")
    b.merge(b("MatMul", b.turned(p), dy), case.kv_heads, "dv")


def padding(case: Case, data: dict[str, Array]) -> dict[str, Array]:
    """The input `mask` of the unfused graph, if it has one."""
    if case.mask != "pad":
        return {}
    return {"mask": to_bits(np.where(data["valid"], 0, MASKED).astype(np.float32), case.dtype)[:, None, None]}


def fused(case: Case, kind: str | None = None) -> onnx.ModelProto:
    """FlashAttentionScore, FlashAttentionScoreGrad, or both.

    `kind` replaces the kind of the case. The kind `statistics` is the forward part with the outputs for a gradient.
    """
    b, kind = Builder(case), kind or case.kind
    if kind == "decode":  # one row: [batch, 1, heads * size] and [batch, heads, 1, size] are the same numbers
        q = b.input("q", [case.batch, case.heads, case.rows, case.size])
        k, v = b.operands("kv")
    else:
        q, k, v = b.operands()
    attrs = {"head_num": case.heads, "input_layout": "BNSD" if kind == "decode" else "BSH",
             "scale_value": case.size**-0.5}  # fmt: skip
    bias, mask = "", ""
    if case.mask in ("causal", "window"):
        mask = b.constant(np.triu(np.ones((2048, 2048), bool), 1))
        attrs |= {"sparse_mode": 3} if case.mask == "causal" else {
            "sparse_mode": 4, "pre_tockens": case.window - 1, "next_tockens": 0}  # fmt: skip
    elif case.mask == "pad":
        mask = b.input("hidden", [case.batch, 1, 1, case.keys], TensorProto.BOOL)
    elif case.mask == "bias":
        bias = b.input("bias", [1, case.heads, case.rows, case.keys])
        attrs["pse_type"] = 0
    statistics = ["max", "sum"]
    if kind == "backward":
        for name in statistics:
            b.input(name, [case.batch, case.heads, case.rows, 8], TensorProto.FLOAT)
        b.input("out", [case.batch, case.rows, case.heads * case.size])
    else:
        named = statistics if kind in ("both", "statistics") else ["", ""]
        b.nodes.append(helper.make_node("FlashAttentionScore", [q, k, v, bias, "", "", mask], [*named, "", "out"],
                                        domain="ascend", **attrs))  # fmt: skip
        own = [case.batch, case.rows, case.heads * case.size]
        b.output("out", [case.batch, case.heads, case.rows, case.size] if kind == "decode" else own)
    if kind == "statistics":
        for name in statistics:
            b.output(name, None, TensorProto.FLOAT)
    if kind in ("backward", "both"):
        dy = b.input("dy", [case.batch, case.rows, case.heads * case.size])
        b.nodes.append(helper.make_node(
            "FlashAttentionScoreGrad", [q, k, v, dy, bias, "", "", mask, *statistics, "", "out"], ["dq", "dk", "dv"],
            domain="ascend", **attrs))  # fmt: skip
        for name in OUTPUTS["backward"]:
            b.output(name, None)
    return b.model(17, "ascend")


def multi_head(case: Case) -> onnx.ModelProto:
    """com.microsoft MultiHeadAttention. Its inputs `kpm` and `wide` are the key mask and the full additive mask."""
    if case.gradient:
        raise NotOffered("no gradient")
    if case.heads != case.kv_heads:
        raise NotOffered("no grouped heads")
    if case.dtype != "float32":
        raise NotOffered("float32 only")
    b = Builder(case)
    inputs = b.operands()
    attrs: dict[str, Any] = {"num_heads": case.heads}
    if case.mask == "causal":
        attrs["unidirectional"] = 1
    elif case.mask == "pad":
        inputs += ["", b.input("kpm", [case.batch, case.keys], TensorProto.INT32)]
    elif case.mask == "bias":
        inputs += ["", "", b.input("bias", [1, case.heads, case.rows, case.keys])]
    elif case.mask == "window":
        inputs += ["", "", b.input("wide", [1, 1, case.rows, case.keys])]
    b("MultiHeadAttention", *inputs, output="out", domain="com.microsoft", **attrs)
    b.output("out", [case.batch, case.rows, case.heads * case.size])
    return b.model(17, "com.microsoft")


def group_query(case: Case) -> onnx.ModelProto:
    """com.microsoft GroupQueryAttention. In a decode step its cache holds all keys but the newest, which is a separate
    input. The operator writes it into the cache in place."""
    if case.gradient:
        raise NotOffered("no gradient")
    if case.mask in ("pad", "bias") or (case.rows != case.keys and case.kind == "forward"):
        raise NotOffered("no such mask")
    if case.dtype == "bfloat16":
        raise NotOffered("no bfloat16")
    b = Builder(case)
    cache = [case.batch, case.kv_heads, case.keys, case.size]
    new = [case.batch, 1 if case.kind == "decode" else case.keys, case.kv_heads * case.size]
    attrs: dict[str, Any] = {"num_heads": case.heads, "kv_num_heads": case.kv_heads}
    if case.mask == "window":
        attrs["local_window_size"] = case.window
    elif case.mask == "none" and case.kind == "forward":
        attrs["causal"] = 0
    inputs = [b.input("q", [case.batch, case.rows, case.heads * case.size]), b.input("k", new), b.input("v", new)]
    inputs += [b.input("past_k", cache), b.input("past_v", cache)] if case.kind == "decode" else ["", ""]
    inputs += [b.input("lengths", [case.batch], TensorProto.INT32), b.input("total", [1], TensorProto.INT32)]
    outputs = [b.output("out", [case.batch, case.rows, case.heads * case.size])]
    outputs += [b.output("present_k", cache), b.output("present_v", cache)]
    b.nodes.append(helper.make_node("GroupQueryAttention", inputs, outputs, domain="com.microsoft", **attrs))
    return b.model(17, "com.microsoft")


def attention(case: Case) -> onnx.ModelProto:
    """ai.onnx Attention of opset 23. `wide` is its additive mask of full size."""
    if case.gradient:
        raise NotOffered("no gradient")
    if case.dtype == "bfloat16":
        raise NotOffered("no bfloat16")
    b = Builder(case)
    heads_first = case.kind == "decode"
    attrs: dict[str, Any] = {} if heads_first else {"q_num_heads": case.heads, "kv_num_heads": case.kv_heads}
    q = [case.batch, case.heads, case.rows, case.size] if heads_first else [
        case.batch, case.rows, case.heads * case.size]  # fmt: skip
    inputs = [b.input("q", q), *b.operands("kv")]
    if case.mask == "causal":
        attrs["is_causal"] = 1
    elif case.mask == "bias":
        inputs.append(b.input("bias", [1, case.heads, case.rows, case.keys]))
    elif case.mask != "none":
        inputs.append(b.input("wide", [case.batch, 1, case.rows, case.keys]))
    b("Attention", *inputs, output="out", **attrs)
    b.output("out", q)
    return b.model(23)
