"""A tiny decoder in the form that the model builder of onnxruntime-genai writes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HEADS, KEY_HEADS, SIZE = 4, 2, 32
LAYERS, WORDS, CONTEXT = 2, 50, 64
WIDTH, INNER = 64, 48

CACHE = ["batch_size", KEY_HEADS, "past_sequence_length", "kv_cache_dim"]
GROWN = ["batch_size", KEY_HEADS, "total_sequence_length", "kv_cache_dim"]


class Decoder:
    """Collects the nodes and weights of a decoder of LAYERS layers.

    With `packed` one MatMul makes query, key and value. Without `group_query` the attention is MultiHeadAttention,
    which the builder writes for processors that lack the other operator; rotary embeddings and masks are left out then.
    """

    def __init__(self, packed: bool = False, group_query: bool = True) -> None:
        self._rng = np.random.default_rng(0)
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []
        self._packed, self._group_query = packed, group_query
        self._key_heads = KEY_HEADS if group_query else HEADS
        self._lengths()
        last = self._node("Gather", ["model.embed_tokens.weight", "input_ids"], "/model/embed_tokens/Gather")
        self._weight("model.embed_tokens.weight", [WORDS, WIDTH], 1.0)
        for layer in range(LAYERS):
            last = self._layer(f"/model/layers.{layer}", layer, last)
        last = self._norm("/model/layers.final_norm", last)
        self._project("/lm_head", last, WIDTH, WORDS, "logits")
        self.model = self._made()

    def _node(self, op: str, inputs: Sequence[str], name: str, more: Sequence[str] = (), domain: str = "",
              out: str = "", **attributes: object) -> str:  # fmt: skip
        out = out or f"{name}/output_0"
        self._nodes.append(helper.make_node(op, inputs, [out, *more], name, domain=domain, **attributes))
        return out

    def _weight(self, name: str, shape: Sequence[int], scale: float) -> str:
        array = (self._rng.standard_normal(shape) * scale).astype(np.float32)
        self._weights.append(numpy_helper.from_array(array, name))
        return name

    def _project(self, name: str, value: str, rows: int, columns: int, out: str = "") -> str:
        weight = self._weight(f"{name[1:].replace('/', '.')}.MatMul.weight", [rows, columns], rows**-0.5)
        return self._node("MatMul", [value, weight], f"{name}/MatMul", out=out)

    def _norm(self, name: str, value: str) -> str:
        self._weights.append(numpy_helper.from_array(np.ones(WIDTH, np.float32), f"{name}.weight"))
        inputs = [value, f"{name}.weight"]
        return self._node("SimplifiedLayerNormalization", inputs, f"{name}/LayerNorm", axis=-1, epsilon=1e-5)

    def _lengths(self) -> None:
        """seqlens_k and total_sequence_length from the mask, and the tables of the rotary embedding."""
        one, name = "/model/constants/INT64/[1]", "/model/attn_mask_reformat/attn_mask_subgraph"
        self._weights.append(numpy_helper.from_array(np.array([1], np.int64), one))
        self._weights.append(numpy_helper.from_array(np.array(1, np.int64), "/model/constants/INT64/1"))
        if self._group_query:
            total = self._node("ReduceSum", ["attention_mask", one], f"{name}/ReduceSum", keepdims=0)
            less = self._node("Sub", [total, one], f"{name}/Sub")
            self._seqlens = self._node("Cast", [less], f"{name}/Sub/Cast", to=TensorProto.INT32)
            shape = self._node("Shape", ["attention_mask"], f"{name}/Shape")
            size = self._node("Gather", [shape, "/model/constants/INT64/1"], f"{name}/Gather", axis=0)
            self._total = self._node("Cast", [size], f"{name}/Gather/Cast", to=TensorProto.INT32)
            angles = np.arange(CONTEXT)[:, None] * 1e4 ** (-2 * np.arange(SIZE // 2) / SIZE)
            for kind, function in (("cos", np.cos), ("sin", np.sin)):
                self._weights.append(numpy_helper.from_array(function(angles).astype(np.float32), f"{kind}_cache"))

    def _layer(self, name: str, layer: int, value: str) -> str:
        normed, keys = self._norm(f"{name}/input_layernorm", value), self._key_heads * SIZE
        if self._packed:
            projected = [self._project(f"{name}/attn/qkv_proj", normed, WIDTH, HEADS * SIZE + 2 * keys), "", ""]
        else:
            widths = {"q": HEADS * SIZE, "k": keys, "v": keys}
            projected = [self._project(f"{name}/attn/{k}_proj", normed, WIDTH, width) for k, width in widths.items()]
        pasts = [f"past_key_values.{layer}.{kind}" for kind in ("key", "value")]
        presents = [f"present.{layer}.{kind}" for kind in ("key", "value")]
        scale, domain = SIZE**-0.5, "com.microsoft"
        if self._group_query:
            inputs = [*projected, *pasts, self._seqlens, self._total, "cos_cache", "sin_cache"]
            attended = self._node(
                "GroupQueryAttention", inputs, f"{name}/attn/GroupQueryAttention", presents, domain, num_heads=HEADS,
                kv_num_heads=KEY_HEADS, scale=scale, do_rotary=1, rotary_interleaved=0, local_window_size=-1,
                softcap=0.0,
            )  # fmt: skip
        else:
            inputs = [*projected, "", "", "", *pasts]
            attended = self._node(
                "MultiHeadAttention", inputs, f"{name}/attn/MultiHeadAttention", presents, domain, num_heads=HEADS,
                scale=scale, unidirectional=1,
            )  # fmt: skip
        out = self._project(f"{name}/attn/o_proj", attended, HEADS * SIZE, WIDTH)
        value = self._node("Add", [value, out], f"{name}/attn/Add")
        normed = self._norm(f"{name}/post_attention_layernorm", value)
        gate, up = (self._project(f"{name}/mlp/{kind}_proj", normed, WIDTH, INNER) for kind in ("gate", "up"))
        active = self._node("Sigmoid", [gate], f"{name}/mlp/act_fn/Sigmoid")
        active = self._node("Mul", [gate, active], f"{name}/mlp/act_fn/Mul")
        active = self._node("Mul", [active, up], f"{name}/mlp/Mul")
        return self._node("Add", [value, self._project(f"{name}/mlp/down_proj", active, INNER, WIDTH)], f"{name}/Add")

    def _made(self) -> onnx.ModelProto:
        def cache(name: str, sizes: Sequence[int | str]) -> onnx.ValueInfoProto:
            shape = [self._key_heads if axis == 1 else size for axis, size in enumerate(sizes)]
            return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

        inputs = [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch_size", "sequence_length"])]
        if self._group_query:
            sizes = ["batch_size", "total_sequence_length"]
            inputs.append(helper.make_tensor_value_info("attention_mask", TensorProto.INT64, sizes))
        sizes = ["batch_size", "sequence_length", WORDS]
        outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, sizes)]
        for layer in range(LAYERS):
            for kind in ("key", "value"):
                inputs.append(cache(f"past_key_values.{layer}.{kind}", CACHE))
                outputs.append(cache(f"present.{layer}.{kind}", GROWN))
        graph = helper.make_graph(self._nodes, "main_graph", inputs, outputs, self._weights)
        imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=imports, ir_version=10)
