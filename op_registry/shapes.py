"""Helpers of shape functions that several operators share."""

from __future__ import annotations

from fa_compiler.op_registry.dtypes import FLOATS
from fa_compiler.op_registry.errors import NodeError
from fa_compiler.op_registry.geometry import LAYOUTS, Geometry, Shape, measure
from fa_compiler.op_registry.node import Dim, TensorInfo
from fa_compiler.op_registry.operator import Attrs, Inputs, Outputs


def training_geometry(inputs: Inputs, attrs: Attrs, repeats: bool = False) -> Geometry:
    """The sizes of a call of FlashAttentionScore or its gradient. `repeats` is explained in
    `measure`. Raises NodeError if the layout is unknown, or if query, key or value has another rank
    than the layout says."""
    # The operators' own shape inference accepts lower case, too. This project always writes upper
    # case.
    layout = str(attrs["input_layout"]).upper()
    if layout not in LAYOUTS:
        raise NodeError(
            f"input_layout is {attrs['input_layout']!r}, expected one of {', '.join(LAYOUTS)}"
        )
    for name in ("query", "key", "value"):
        shape = inputs[name].shape
        if shape is not None and len(shape) != LAYOUTS[layout]:
            raise NodeError(
                f"{name} has rank {len(shape)}, expected {LAYOUTS[layout]} for input_layout {layout}"
            )
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


def training_type(query: TensorInfo, attrs: Attrs) -> str:
    """The type of the results of FlashAttentionScore and its gradient: the type of query, or for
    8-bit floats the type that out_dtype states (0 float16, 1 bfloat16)."""
    if query.dtype in FLOATS or not query.dtype:
        return query.dtype
    return "DT_BF16" if attrs["out_dtype"] == 1 else "DT_FLOAT16"


def inference_type(inputs: Inputs) -> str:
    """The type of attention_out of the inference operators: INT8 if quant_scale2 is given,
    otherwise float16 for an INT8 query and the type of query for other queries."""
    if _present(inputs, "quant_scale2"):
        return "DT_INT8"
    query: TensorInfo = inputs["query"]
    return "DT_FLOAT16" if query.dtype == "DT_INT8" else query.dtype


def _present(inputs: Inputs, name: str) -> bool:
    """Whether an optional input is given. The inference operators treat an empty tensor as
    absent."""
    return name in inputs and 0 not in (inputs[name].shape or ())


def prompt_outputs(inputs: Inputs, attrs: Attrs) -> Outputs:
    """The outputs of PromptFlashAttention and FusedInferAttentionScore. attention_out has the
    layout of the results, with Dv in place of D. softmax_lse is [B,N1,S1,1], or [T1,N1,1] in packed
    layouts, or [0] without softmax_lse_flag."""
    given, _, wanted = str(attrs["input_layout"]).upper().partition("_")
    query: TensorInfo = inputs["query"]
    value: TensorInfo = inputs["value"][0] if isinstance(inputs["value"], list) else inputs["value"]
    dtype = inference_type(inputs)
    sizes = _prompt_sizes(
        given, query.shape, value.shape, attrs["num_heads"], attrs["num_key_value_heads"]
    )
    if sizes is None or {*wanted} - sizes.keys() - {"H"} or _present(inputs, "block_table"):
        out = query.shape if not wanted and sizes is not None else None
        return {"attention_out": TensorInfo(dtype, out), "softmax_lse": TensorInfo("DT_FLOAT")}
    width = (
        sizes["N"] * sizes["D"]
        if isinstance(sizes["N"], int) and isinstance(sizes["D"], int)
        else None
    )
    shape = tuple(width if letter == "H" else sizes[letter] for letter in wanted or given)
    batch = 1 if given == "NSD" else sizes["B"]
    rows = (sizes["T"], sizes["N"]) if "T" in given else (batch, sizes["N"], sizes["S"])
    lse: Shape = (*rows, 1) if attrs.get("softmax_lse_flag") else (0,)
    return {"attention_out": TensorInfo(dtype, shape), "softmax_lse": TensorInfo("DT_FLOAT", lse)}


def _prompt_sizes(
    layout: str, query: Shape | None, value: Shape | None, heads: int, kv_heads: int
) -> dict[str, Dim] | None:
    """The sizes of query by the letters of its layout, but with Dv as D. None if the layout is
    unknown or the ranks do not fit it."""
    if query is None or value is None or not len(query) == len(value) == len(layout):
        return None
    if layout != "BSH" and not {"N", "D"} <= {*layout} <= {*"BNSDT"}:
        return None
    sizes: dict[str, Dim] = {
        "B": None,
        "T": None,
        "S": None,
        **dict(zip(layout, query, strict=True)),
    }
    last = value[-1]
    if layout == "BSH":
        sizes["N"] = heads
        kv_heads = kv_heads or heads
        last = (
            last // kv_heads
            if isinstance(last, int) and kv_heads > 0 and last % kv_heads == 0
            else None
        )
    return {**sizes, "D": last}
