"""Types and shapes of the outputs of a node.

An operator's rule is one function here, named in `RULES`. A rule takes what is known of the inputs and
gives what follows; a size that is not known stays a symbol or None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fa_compiler.op_registry import sparse_shapes
from fa_compiler.op_registry.dtypes import FLOATS
from fa_compiler.op_registry.errors import NodeError
from fa_compiler.op_registry.geometry import BATCH_AXIS, LAYOUTS, STATISTICS, Geometry, Shape, measure
from fa_compiler.op_registry.node import Dim, TensorInfo, full_attrs
from fa_compiler.op_registry.registry import get, later_attrs
from fa_compiler.op_registry.spec import Kind

Inputs = Mapping[str, Any]
"""TensorInfo by name; of a dynamic input the list of its tensors."""


def infer(
    op_type: str, inputs: Mapping[str, Any], attrs: Mapping[str, Any], cann: str | None = None
) -> dict[str, TensorInfo]:
    """What is known of every output of a node, by name.

    `inputs` maps REG_OP names to TensorInfo (of a dynamic input a list), absent ones missing; `attrs` may lack those
    with a default; `cann` chooses the variant of the prototype. Raises NodeError if the attributes do not fit the
    operator, if the layout is unknown, or if query, key or value is missing or has another rank than the layout says.
    """
    spec = get(op_type, cann)
    for entry in spec.inputs[:3]:
        if entry.kind is not Kind.OPTIONAL and entry.name not in inputs:
            raise NodeError(f"{op_type} needs the input {entry.name}")
    return RULES[op_type](inputs, later_attrs(spec) | full_attrs(spec, attrs))


def can_infer(op_type: str) -> bool:
    """Whether `infer` has a rule for the operator."""
    return op_type in RULES


def _forward(inputs: Inputs, attrs: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """FlashAttentionScore: statistics [B,N1,S1,8] or [T1,N1,8] in float32, attention_out as query with Dv
    for D and, where one of query, key and value has batch 1, the batch of the others. softmax_out is never
    computed; the operator declares it [0,0,0,0]."""
    geometry = _geometry(inputs, attrs, repeats=True)
    query = inputs["query"]
    statistics: Shape
    if geometry.tnd:
        statistics = (geometry.t1, geometry.n1, STATISTICS)
    else:
        statistics = (geometry.b, geometry.n1, geometry.s1, STATISTICS)
    out = query.shape
    if out is not None:
        axis = BATCH_AXIS.get(geometry.layout)
        front = (geometry.b if i == axis else size for i, size in enumerate(out[:-1]))
        out = (*front, _last(geometry, out[-1]))
    dtype = _result_type(query, attrs)
    return {
        "softmax_max": TensorInfo("DT_FLOAT", statistics),
        "softmax_sum": TensorInfo("DT_FLOAT", statistics),
        "softmax_out": TensorInfo(dtype, (0, 0, 0, 0)),
        "attention_out": TensorInfo(dtype, out),
    }


def _backward(inputs: Inputs, attrs: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """FlashAttentionScoreGrad: each gradient has its input's shape; without that input it is empty, [0]."""
    _geometry(inputs, attrs)
    dtype = _result_type(inputs["query"], attrs)

    def gradient(name: str, dtype: str) -> TensorInfo:
        return TensorInfo(dtype, inputs[name].shape if name in inputs else (0,))

    return {
        "dq": gradient("query", dtype),
        "dk": gradient("key", dtype),
        "dv": gradient("value", dtype),
        "dpse": gradient("pse_shift", dtype),
        "dq_rope": gradient("query_rope", dtype),
        "dk_rope": gradient("key_rope", dtype),
        "dsink": gradient("sink", "DT_FLOAT"),
    }


def _decode(inputs: Inputs, attrs: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """IncreFlashAttention: attention_out as query; INT8 where quant_scale2 is given, and float16 of an INT8 query."""
    query: TensorInfo = inputs["query"]
    dtype = "DT_FLOAT16" if query.dtype == "DT_INT8" else query.dtype
    return {"attention_out": TensorInfo("DT_INT8" if _present(inputs, "quant_scale2") else dtype, query.shape)}


def _present(inputs: Inputs, name: str) -> bool:
    """Whether an optional input is there; to the operators of inference an empty tensor is absent."""
    return name in inputs and 0 not in (inputs[name].shape or ())


def _prompt(inputs: Inputs, attrs: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """PromptFlashAttention and FusedInferAttentionScore: attention_out in the layout of results, with Dv for D;
    softmax_lse [B,N1,S1,1], or [T1,N1,1] of packed layouts, [0] where it is not asked for."""
    given, _, wanted = str(attrs["input_layout"]).upper().partition("_")
    query: TensorInfo = inputs["query"]
    value: TensorInfo = inputs["value"][0] if isinstance(inputs["value"], list) else inputs["value"]
    dtype = "DT_FLOAT16" if query.dtype == "DT_INT8" else query.dtype
    if _present(inputs, "quant_scale2"):
        dtype = "DT_INT8"
    sizes = _prompt_sizes(given, query.shape, value.shape, attrs["num_heads"], attrs["num_key_value_heads"])
    if sizes is None or {*wanted} - sizes.keys() - {"H"} or _present(inputs, "block_table"):
        out = query.shape if not wanted and sizes is not None else None
        return {"attention_out": TensorInfo(dtype, out), "softmax_lse": TensorInfo("DT_FLOAT")}
    width = sizes["N"] * sizes["D"] if isinstance(sizes["N"], int) and isinstance(sizes["D"], int) else None
    shape = tuple(width if letter == "H" else sizes[letter] for letter in wanted or given)
    batch = 1 if given == "NSD" else sizes["B"]
    rows = (sizes["T"], sizes["N"]) if "T" in given else (batch, sizes["N"], sizes["S"])
    lse: Shape = (*rows, 1) if attrs.get("softmax_lse_flag") else (0,)
    return {"attention_out": TensorInfo(dtype, shape), "softmax_lse": TensorInfo("DT_FLOAT", lse)}


def _prompt_sizes(
    layout: str, query: Shape | None, value: Shape | None, heads: int, kv_heads: int
) -> dict[str, Dim] | None:
    """Query's sizes by letter, and Dv as D; None for an unknown layout, and where the ranks do not fit it."""
    if query is None or value is None or not len(query) == len(value) == len(layout):
        return None
    if layout != "BSH" and not {"N", "D"} <= {*layout} <= {*"BNSDT"}:
        return None
    sizes: dict[str, Dim] = {"B": None, "T": None, "S": None, **dict(zip(layout, query, strict=True))}
    last = value[-1]
    if layout == "BSH":
        sizes["N"] = heads
        kv_heads = kv_heads or heads
        last = last // kv_heads if isinstance(last, int) and kv_heads > 0 and last % kv_heads == 0 else None
    return {**sizes, "D": last}


def _prompt_only(inputs: Inputs, attrs: Mapping[str, Any]) -> dict[str, TensorInfo]:
    return {"attention_out": _prompt(inputs, attrs)["attention_out"]}


def _ring_update(inputs: Inputs, attrs: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """RingAttentionUpdate: each result is as the operand before it."""
    names = {"attn_out": "prev_attn_out", "softmax_max": "prev_softmax_max", "softmax_sum": "prev_softmax_sum"}
    return {
        output: TensorInfo(inputs[name].dtype, inputs[name].shape) for output, name in names.items() if name in inputs
    }


def _update(inputs: Inputs, attrs: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """AttentionUpdate: output as one of go, lse_m as one of lse; update_type 0 has no lse_m."""
    lse, go = inputs["lse"][0], inputs["go"][0]
    merged = TensorInfo("DT_FLOAT", lse.shape if attrs["update_type"] == 1 else (0,))
    return {"output": TensorInfo(go.dtype, go.shape), "lse_m": merged}


RULES: Mapping[str, Callable[[Inputs, Mapping[str, Any]], dict[str, TensorInfo]]] = {
    "FlashAttentionScore": _forward,
    "FlashAttentionScoreGrad": _backward,
    "IncreFlashAttention": _decode,
    "PromptFlashAttention": _prompt_only,
    "FusedInferAttentionScore": _prompt,
    "RingAttentionUpdate": _ring_update,
    "AttentionUpdate": _update,
    **sparse_shapes.RULES,
}


def _geometry(inputs: Inputs, attrs: Mapping[str, Any], repeats: bool = False) -> Geometry:
    # The operators' own inference takes the layout in either case; everything we emit is upper case.
    layout = str(attrs["input_layout"]).upper()
    if layout not in LAYOUTS:
        raise NodeError(f"input_layout is {attrs['input_layout']!r}, expected one of {', '.join(LAYOUTS)}")
    for name in ("query", "key", "value"):
        shape = inputs[name].shape
        if shape is not None and len(shape) != LAYOUTS[layout]:
            raise NodeError(f"{name} has rank {len(shape)}, expected {LAYOUTS[layout]} for input_layout {layout}")
    return measure(
        layout,
        attrs["head_num"],
        inputs["query"],
        inputs["key"],
        inputs["value"],
        inputs.get("actual_seq_qlen"),
        inputs.get("actual_seq_kvlen"),
        repeats,
    )


def _last(geometry: Geometry, last: Dim) -> Dim:
    """Last dimension of attention_out, given that of query: Dv, or N1*Dv where heads are folded in."""
    if geometry.layout not in ("BSH", "SBH"):
        return geometry.dv
    if geometry.dv is not None and geometry.dv == geometry.d:
        return last
    if isinstance(geometry.dv, int) and isinstance(geometry.n1, int):
        return geometry.n1 * geometry.dv
    return None


def _result_type(query: TensorInfo, attrs: Mapping[str, Any]) -> str:
    """Type of the results: the query's, or for 8-bit floats what out_dtype says (0 float16, 1 bfloat16)."""
    if query.dtype in FLOATS or not query.dtype:
        return query.dtype
    return "DT_BF16" if attrs["out_dtype"] == 1 else "DT_FLOAT16"
