"""Calls of the operators that are wrong in one or two ways, for the tests of what is refused and how.

`corrupted` starts from a small call that is right, of any variant of the operator, and drops, renames, retypes,
reshapes, negates, swaps or adds inputs and attributes. Many of the results are still right; nothing here says which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from fa_compiler.op_registry import get, has_kernel, variants
from fa_compiler.op_registry.ops.flash_linear_attention import LOW_RANK, UPDATE_RULES
from tests.prompt_problems import FIA, PFA, Problem, drawn

Rng = np.random.Generator

TRIANGLE = np.triu(np.ones((2048, 2048), np.bool_), 1)
PREFIX_MASK = np.concatenate([TRIANGLE, np.arange(2048)[None, :].repeat(1024, 0) >= 1024])


VARIED = 6
"""One in so many calls is of some variant of the prototype."""
CHANGES = (0, 1, 1, 1, 1, 1, 1, 2, 2)
"""How many things are changed in a call."""


class Case(NamedTuple):
    """A call, and what was done to a right one."""

    op_type: str
    inputs: dict[str, Any]
    attrs: dict[str, Any]
    change: str
    cann: str | None = None
    """The variant of the prototype; the newest without."""


def corrupted(seed: int, count: int, operators: tuple[str, ...] = ()) -> Iterator[Case]:
    """`count` calls, of all operators that have a kernel in turn, or of those named."""
    rng = np.random.default_rng(seed)
    names = [name for name in BASES if name in (operators or WITH_KERNEL)]
    for n in range(count):
        op_type = names[n % len(names)]
        inputs, attrs = _pick(rng, BASES[op_type])(rng)
        cann = _pick(rng, variants(op_type)).variant if rng.integers(0, VARIED) == 0 else None
        if cann is not None:
            inputs, attrs = of_variant(op_type, cann, inputs, attrs)
        change = "; ".join(_change(rng, op_type, cann, inputs, attrs) for _ in range(_pick(rng, CHANGES)))
        yield Case(op_type, inputs, attrs, change or "nothing", cann)


def of_variant(op_type: str, cann: str, inputs: dict[str, Any], attrs: dict[str, Any]) -> Parts:
    """The call without what a variant of the prototype lacks, and with the flags that it needs."""
    spec = get(op_type, cann)
    flags = {entry.name: True for entry in spec.attrs if entry.required and entry.type == "Bool"}
    attrs = flags | {name: value for name, value in attrs.items() if name in spec.attr_names}
    return {name: value for name, value in inputs.items() if name in spec.input_names}, attrs


# Right calls.

Parts = tuple[dict[str, Any], dict[str, Any]]


def _floats(rng: Rng, *shape: int, dtype: Any = np.float32) -> Any:
    return rng.standard_normal(shape).astype(dtype)


def _half(rng: Rng) -> Any:
    return _pick(rng, (np.float32, np.float32, np.float16, ml_dtypes.bfloat16))


def _extras(rng: Rng, count: int) -> set[int]:
    """Which of so many features a call has besides the plain ones, which are number 0: mostly one, now and then two."""
    return {int(each) for each in rng.integers(0, count, 1 + (rng.integers(0, 4) == 0))}


def _forward(rng: Rng) -> Parts:
    b, n1, n2, s1, s2, d, dtype = 2, 4, 2, 3, 5, 8, _half(rng)
    layout, extras = _pick(rng, ("BNSD", "BSND", "BSH", "SBH")), _extras(rng, 11)
    s1 = s2 if 9 in extras else s1

    def put(n: int, s: int, width: int) -> Any:
        shape = {"BNSD": (b, n, s, width), "BSND": (b, s, n, width)}.get(layout, (b, s, n * width))
        return _floats(rng, *((s, b, n * width) if layout == "SBH" else shape), dtype=dtype)

    inputs = {"query": put(n1, s1, d), "key": put(n2, s2, d), "value": put(n2, s2, d)}
    attrs: dict[str, Any] = {"head_num": n1, "input_layout": layout, "scale_value": 0.3}
    if 1 in extras:
        inputs["atten_mask"] = np.zeros((s1, s2), np.bool_)
        attrs["sparse_mode"] = int(rng.integers(0, 2))
    if 2 in extras:
        inputs["atten_mask"] = TRIANGLE
        attrs |= {"sparse_mode": int(rng.integers(2, 5)), "pre_tockens": 4, "next_tockens": 2}
    if 3 in extras:
        inputs |= {"atten_mask": PREFIX_MASK, "prefix": np.array([3, 4])}
        attrs["sparse_mode"] = 6
    if 4 in extras:
        inputs["real_shift"] = _floats(rng, b, n1, s1, s2, dtype=dtype)
        attrs["pse_type"] = int(rng.integers(0, 2))
    if 5 in extras:
        inputs["drop_mask"] = np.full(-(-b * n1 * s1 * s2 // 8), 255, np.uint8)
        attrs["keep_prob"] = 0.5
    if 6 in extras:
        inputs["sink"] = _floats(rng, n1)
    if 7 in extras:
        inputs |= {"query_rope": put(n1, s1, 4), "key_rope": put(n2, s2, 4)}
    if 8 in extras:
        shape = _pick(rng, ((b, 1, s1, s2), (s1, s2)))
        inputs |= {"atten_mask": np.zeros(shape, np.bool_), "prefix": np.array([3, 4])}
        attrs["sparse_mode"] = 5
    if 9 in extras:
        inputs["real_shift"] = _floats(rng, n1)
        attrs["pse_type"] = int(rng.integers(2, 4))
    if 10 in extras and attrs.get("pse_type") != 1:
        attrs["cpu_softcap"] = _pick(rng, (0.5, 30.0))
    return inputs, attrs


def _packed(rng: Rng) -> Parts:
    n1, n2, d, dtype = 4, 2, 8, _half(rng)
    extras = _extras(rng, 5)
    q_lens, k_lens = np.array([3, 2]), np.array([3, 2])
    if extras <= {0, 4} and rng.integers(0, 2):
        q_lens, k_lens = (rng.permutation([5, 0, 2])[:2] for _ in range(2))
    inputs = {
        "query": _floats(rng, int(q_lens.sum()), n1, d, dtype=dtype),
        "key": _floats(rng, int(k_lens.sum()), n2, d, dtype=dtype),
        "value": _floats(rng, int(k_lens.sum()), n2, d, dtype=dtype),
        "actual_seq_qlen": np.cumsum(q_lens),
        "actual_seq_kvlen": np.cumsum(k_lens),
    }
    attrs: dict[str, Any] = {"head_num": n1, "input_layout": "TND", "scale_value": 0.3}
    if 1 in extras:
        inputs["atten_mask"] = np.zeros((3, 3), np.bool_)
    if 2 in extras:
        inputs["atten_mask"] = TRIANGLE
        attrs |= {"sparse_mode": _pick(rng, (2, 3, 4, 7, 8)), "pre_tockens": 4, "next_tockens": 0}
    if 3 in extras:
        inputs["real_shift"] = _floats(rng, n1)
        attrs["pse_type"] = int(rng.integers(2, 4))
    if 4 in extras:
        inputs["real_shift"] = _floats(rng, int(n1 * (q_lens * k_lens).sum()), 1, dtype=dtype)
    return inputs, attrs


def _backward_of(forward: Callable[[Rng], Parts]) -> Callable[[Rng], Parts]:
    def backward(rng: Rng) -> Parts:
        inputs, attrs = forward(rng)
        shift = inputs.pop("real_shift", None)
        if shift is not None:
            inputs["pse_shift"] = shift[:, 0] if shift.ndim == 2 else shift
        out = inputs["query"]
        axes = {"BNSD": (0, 1, 2), "BSND": (0, 2, 1), "TND": (0, 1)}.get(attrs["input_layout"])
        b, s = out.shape[:2][:: -1 if attrs["input_layout"] == "SBH" else 1]
        statistics = (b, 4, s, 8) if axes is None else (*(out.shape[axis] for axis in axes), 8)
        inputs |= {"dy": out, "attention_in": out}
        inputs |= {name: np.ones(statistics, np.float32) for name in ("softmax_max", "softmax_sum")}
        return inputs, attrs

    return backward


def _decode(rng: Rng) -> Parts:
    b, n1, n2, s, d, dtype = 2, 4, 2, 32, 16, _half(rng)
    layout = _pick(rng, ("BNSD", "BSND", "BSH"))

    def put(n: int, length: int, batch: int = b, kind: Any = dtype) -> Any:
        shape = {"BNSD": (batch, n, length, d), "BSND": (batch, length, n, d)}.get(layout, (batch, length, n * d))
        return _floats(rng, *shape).astype(kind)

    inputs: dict[str, Any] = {"query": put(n1, 1), "key": put(n2, s), "value": put(n2, s)}
    attrs: dict[str, Any] = {"num_heads": n1, "num_key_value_heads": n2, "input_layout": layout, "scale_value": 0.3}
    extras = _extras(rng, 9)
    if 8 in extras:
        attrs["cpu_softcap"] = 0.5
    if 1 in extras:
        inputs["atten_mask"] = np.zeros((b, s), np.bool_)
    if 2 in extras:
        inputs["pse_shift"] = _floats(rng, b, n1, 1, s, dtype=dtype)
    if 3 in extras:
        inputs |= {"actual_seq_lengths": np.array([20, 7]), "kv_padding_size": np.array([3])}
    if 4 in extras:
        inputs |= {name: [put(n2, 9, 1), put(n2, 30, 1)] for name in ("key", "value")}
    if 5 in extras:
        pages = _floats(rng, 5, 32, n2 * d, dtype=dtype)
        table = {"block_table": np.array([[0, 3], [4, 1]], np.int32), "actual_seq_lengths": np.array([40, 64])}
        inputs |= {"key": pages, "value": pages, **table}
        attrs["block_size"] = 32
    if 6 in extras:
        inputs |= {name: put(n2, s, kind=np.int8) for name in ("key", "value")}
        inputs |= {name: np.ones(2, dtype) for name in ("antiquant_scale", "antiquant_offset")}
    if 7 in extras:
        inputs |= {name: np.ones(1, np.float32) for name in ("quant_scale2", "quant_offset2")}
    return inputs, attrs


def _ring(rng: Rng) -> Parts:
    dtype = _half(rng)
    if rng.integers(0, 2):
        out, statistics = (5, 2, 64), (5, 2, 8)
        more, attrs = {"actual_seq_qlen": np.array([0, 2, 5])}, {"input_layout": "TND"}
        attrs["input_softmax_layout"] = _pick(rng, ("", "TND"))
    else:
        out, statistics, more, attrs = (3, 2, 16), (2, 4, 3, 8), {}, {"input_layout": "SBH"}
    inputs: dict[str, Any] = {}
    for part in ("prev", "cur"):
        inputs[f"{part}_attn_out"] = _floats(rng, *out, dtype=dtype)
        inputs |= {f"{part}_softmax_{kind}": np.ones(statistics, np.float32) for kind in ("max", "sum")}
    return inputs | more, attrs


def _merge(rng: Rng) -> Parts:
    dtype = _half(rng)
    inputs = {"lse": [_floats(rng, 6) for _ in range(2)], "go": [_floats(rng, 6, 3, dtype=dtype) for _ in range(2)]}
    return inputs, {"update_type": int(rng.integers(0, 2)), "sp": 2}


def _tokens(rng: Rng) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    return _pick(rng, (("BSND", (2, 3), (2, 7)), ("TND", (5,), (9,))))


def _ends(layout: str, names: tuple[str, str], dtype: Any) -> dict[str, Any]:
    return {names[0]: np.array([3, 5], dtype), names[1]: np.array([4, 9], dtype)} if layout == "TND" else {}


def _selection(rng: Rng, q: tuple[int, ...], k: tuple[int, ...], dtype: Any) -> dict[str, Any]:
    return {
        "query": _floats(rng, *q, 4, 8, dtype=dtype),
        "key": _floats(rng, *k, 2, 8, dtype=dtype),
        "value": _floats(rng, *k, 2, 6, dtype=dtype),
        "sparse_indices": rng.integers(-1, 4, (*q, 2, 3)).astype(np.int32),
    }


def _selected(rng: Rng) -> Parts:
    layout, q, k = _tokens(rng)
    dtype = _half(rng)
    inputs = {
        **_selection(rng, q, k, dtype),
        **_ends(layout, ("actual_seq_lengths_query", "actual_seq_lengths_kv"), np.int32),
    }
    if rng.integers(0, 2):
        inputs |= {"query_rope": _floats(rng, *q, 4, 2, dtype=dtype), "key_rope": _floats(rng, *k, 2, 2, dtype=dtype)}
    if rng.integers(0, 3) == 0:
        inputs["sinks"] = _floats(rng, 4)
    attrs: dict[str, Any] = {"scale_value": 0.3, "layout_query": layout, "layout_kv": layout, "attention_mode": 2}
    attrs["sparse_mode"] = _pick(rng, (0, 3))
    if layout == "TND" and rng.integers(0, 2):
        for name in ("key", "value", "key_rope"):
            if name in inputs:
                inputs[name] = _floats(rng, 4, 16, *inputs[name].shape[-2:], dtype=dtype)
        inputs |= {"block_table": np.array([[2], [1]], np.int32), "actual_seq_lengths_kv": np.array([7, 9], np.int32)}
        attrs["layout_kv"] = "PA_BSND"
    return inputs, attrs


def _selected_grad(rng: Rng) -> Parts:
    layout, q, k = _tokens(rng)
    dtype = _half(rng)
    inputs = {
        **_selection(rng, q, k, dtype),
        "d_out": _floats(rng, *q, 4, 6, dtype=dtype),
        "out": _floats(rng, *q, 4, 6, dtype=dtype),
        **_statistics(q, 2, 2),
        **_ends(layout, ("actual_seq_lengths_query", "actual_seq_lengths_kv"), np.int32),
    }
    attrs = {"scale_value": 0.3, "sparse_block_size": 1, "layout": layout, "sparse_mode": _pick(rng, (0, 3))}
    return inputs, attrs


def _statistics(q: tuple[int, ...], heads: int, group: int) -> dict[str, Any]:
    shape = (*q[:-1], heads, q[-1], group)
    return {name: np.ones(shape, np.float32) for name in ("softmax_max", "softmax_sum")}


def _indexer(rng: Rng) -> Parts:
    layout, q, k = _tokens(rng)
    dtype = _half(rng)
    inputs = {
        "query": _floats(rng, *q, 3, 8, dtype=dtype),
        "key": _floats(rng, *k, 1, 8, dtype=dtype),
        "weights": _floats(rng, *q, 3, dtype=dtype),
        **_ends(layout, ("actual_seq_lengths_query", "actual_seq_lengths_key"), np.int32),
    }
    attrs: dict[str, Any] = {"layout_query": layout, "layout_key": layout, "sparse_count": 4, "return_values": True}
    return inputs, attrs


def _indexer_grad(rng: Rng) -> Parts:
    inputs, attrs = _indexer(rng)
    q = inputs["query"].shape[:-2]
    inputs["dy"] = _floats(rng, *q, 1, dtype=inputs["query"].dtype)
    inputs["sparse_indices"] = np.zeros((*q, 1, 1), np.int32)
    return inputs, {"headNum": 3, "layout": attrs["layout_query"]}


def _loss(rng: Rng) -> Parts:
    layout, q, k = _tokens(rng)
    dtype = _half(rng)
    inputs = {
        "query": _floats(rng, *q, 4, 8, dtype=dtype),
        "key": _floats(rng, *k, 1, 8, dtype=dtype),
        "query_index": _floats(rng, *q, 3, 5, dtype=dtype),
        "key_index": _floats(rng, *k, 1, 5, dtype=dtype),
        "weight": _floats(rng, *q, 3, dtype=dtype),
        "sparse_indices": np.zeros((*q, 1, 1), np.int32),
        **_statistics(q, 1, 4),
        **_ends(layout, ("actual_seq_lengths_query", "actual_seq_lengths_key"), np.int64),
    }
    return inputs, {"scale_value": 0.3, "layout": layout}


def _prompt(op: str) -> Callable[[Rng], Parts]:
    def prompt(rng: Rng) -> Parts:
        dtype = _pick(rng, ("float32", "float16", "bfloat16"))
        problem = Problem(drawn(int(rng.integers(0, 2**31)), op, dtype, 8))
        return dict(problem.inputs), dict(problem.attrs)

    return prompt


def _linear(rng: Rng) -> Parts:
    dtype, rule = _half(rng), str(_pick(rng, UPDATE_RULES))
    b, t, size, width = 2, int(rng.integers(0, 5)), 4, 6
    q_heads, heads, key_heads = _pick(rng, ((2, 2, 2), (4, 2, 1), (1, 4, 2)))
    inputs = {
        "query": _floats(rng, b, t, q_heads * size, dtype=dtype),
        "key": _floats(rng, b, t, key_heads * size, dtype=dtype),
        "value": _floats(rng, b, t, heads * width, dtype=dtype),
    }
    attrs: dict[str, Any] = {"q_num_heads": q_heads, "kv_num_heads": heads, "update_rule": rule}
    if rule.startswith("gated") or (rule in LOW_RANK and rng.integers(0, 2)):
        decay = rng.uniform(-2, 0, (b, t, heads * _pick(rng, (1, size))))
        inputs["decay"] = decay.astype(dtype)
    if rule.endswith("delta"):
        inputs["beta"] = rng.uniform(0, 1, (b, t, _pick(rng, (heads, 1)))).astype(dtype)
    if rule in LOW_RANK:
        for name in ("low_rank_write", "low_rank_read"):
            inputs[name] = 0.3 * _floats(rng, b, t, heads * size, dtype=np.float32)
            inputs[name] = inputs[name].astype(dtype)
    if rng.integers(0, 2):
        inputs["past_state"] = _floats(rng, b, heads, size, width, dtype=_pick(rng, (np.float32, dtype)))
    if rng.integers(0, 4) == 0:
        attrs["scale"] = 0.7
    if rng.integers(0, 4) == 0:  # the same tokens as sequences of one row
        for name in inputs.keys() - {"past_state"}:
            inputs[name] = inputs[name].reshape(1, b * t, inputs[name].shape[2])
        inputs["cu_seqlens"] = np.array([0, t, b * t], np.int32)
    return inputs, attrs


def _convolution(rng: Rng) -> Parts:
    dtype, b, channels, tokens, width = _half(rng), 2, 3, int(rng.integers(0, 6)), int(rng.integers(1, 5))
    last = bool(rng.integers(0, 2))
    inputs = {
        "input": _floats(rng, b, *((tokens, channels) if last else (channels, tokens)), dtype=dtype),
        "weight": _floats(rng, channels, 1, width, dtype=dtype),
    }
    if rng.integers(0, 2):
        inputs["bias"] = _floats(rng, channels, dtype=dtype)
    if rng.integers(0, 2):
        inputs["past_state"] = _floats(rng, b, channels, width - 1, dtype=dtype)
    return inputs, {"activation": str(_pick(rng, ("none", "silu"))), "channels_last": last}


def _norm(names: tuple[str, ...]) -> Callable[[Rng], Parts]:
    def norm(rng: Rng) -> Parts:
        dtype, shape = _half(rng), _pick(rng, ((2, 3, 16), (5, 16), (16,), (2, 3, 4, 8)))
        gamma = shape[-int(rng.integers(1, len(shape) + 1)) :]
        inputs = {name: _floats(rng, *shape, dtype=dtype) for name in names}
        wide = names == ("x",) and rng.integers(0, 3) == 0
        inputs["gamma"] = _floats(rng, *gamma, dtype=np.float32 if wide else dtype)
        return inputs, {"epsilon": _pick(rng, (1e-6, 1e-5, 0.0))}

    return norm


def _gemma(rng: Rng) -> Parts:
    inputs, attrs = _norm(("x",))(rng)
    if rng.integers(0, 3):
        inputs["gamma"] = inputs["gamma"].astype(inputs["x"].dtype)
    return inputs, attrs


def _centred(rng: Rng) -> Parts:
    """The last one or two axes are normalised, with a weight and a bias or without."""
    inputs, attrs = _norm(("x",))(rng)
    gamma = inputs["gamma"]
    inputs["normalized_shape"] = np.array(gamma.shape, np.int32)
    inputs["beta"] = _floats(rng, *gamma.shape, dtype=gamma.dtype)
    for name in ("gamma", "beta"):
        if rng.integers(0, 3) == 0:
            del inputs[name]
    return inputs, attrs


def _centred_from_an_axis(rng: Rng) -> Parts:
    """The weights have more axes than are normalised, or fewer, or as many."""
    inputs, attrs = _norm(("x",))(rng)
    x, gamma = inputs["x"], inputs["gamma"]
    inputs["beta"] = _floats(rng, *gamma.shape, dtype=gamma.dtype)
    attrs["begin_params_axis"] = x.ndim - gamma.ndim
    return inputs, attrs | {"begin_norm_axis": int(rng.integers(-x.ndim, x.ndim))}


def _centred_sum(rng: Rng) -> Parts:
    inputs, attrs = _norm(("x1", "x2"))(rng)
    gamma = inputs["gamma"]
    inputs["beta"] = _floats(rng, *gamma.shape, dtype=gamma.dtype)
    if rng.integers(0, 2):
        inputs["bias"] = _floats(rng, *_pick(rng, (gamma, inputs["x1"])).shape, dtype=gamma.dtype)
    return inputs, attrs | {"additional_output": bool(rng.integers(0, 2))}


def _gated(rng: Rng) -> Parts:
    shape, dim = _pick(rng, (((2, 3, 16), -1), ((5, 8), 1), ((4, 3), 0), ((6,), -1), ((2, 4, 5), -2)))
    return {"x": _floats(rng, *shape, dtype=_half(rng))}, {"dim": dim}


def _gelu_gated(rng: Rng) -> Parts:
    inputs, attrs = _gated(rng)
    return inputs, attrs | {"approximate": int(rng.integers(0, 2)), "activate_left": bool(rng.integers(0, 2))}


def _gelu(rng: Rng) -> Parts:
    x = _floats(rng, *_pick(rng, ((2, 3, 4), (5,), ())), dtype=_half(rng))
    return {"x": x}, {"approximate": str(_pick(rng, ("none", "tanh")))}


def _clipped(rng: Rng) -> Parts:
    inputs, attrs = _gated(rng)
    if rng.integers(0, 3) == 0:
        inputs["group_index"] = rng.integers(0, 2, int(rng.integers(1, 4)))
    return inputs, attrs | {"interleaved": bool(rng.integers(0, 2)), "limit": _pick(rng, (7.0, 0.5))}


BF16 = ml_dtypes.bfloat16


def _delta(rng: Rng, lengths: Any) -> tuple[dict[str, Any], tuple[int, ...]]:
    """The tokens of a gated delta rule, and the shape of a state."""
    tokens, size, width = int(lengths.sum()), 4, 6
    key_heads, heads = _pick(rng, ((2, 2), (2, 4), (1, 3)))
    inputs = {
        "query": _floats(rng, tokens, key_heads, size, dtype=BF16),
        "key": (0.3 * _floats(rng, tokens, key_heads, size)).astype(BF16),
        "value": _floats(rng, tokens, heads, width, dtype=BF16),
        "beta": rng.uniform(0, 1, (tokens, heads)).astype(BF16),
        "actual_seq_lengths": lengths.astype(np.int32),
    }
    if rng.integers(0, 4):
        inputs["g"] = rng.uniform(-1, 0, (tokens, heads)).astype(np.float32)
    return inputs, (heads, width, size)


def _chunks(rng: Rng) -> Parts:
    inputs, state = _delta(rng, rng.permutation([1, 3, 5])[:2])
    inputs["initial_state"] = _floats(rng, 2, *state, dtype=_pick(rng, (BF16, BF16, np.float32)))
    return inputs, {"scale_value": 0.5} if rng.integers(0, 2) else {}


def _recurrence(rng: Rng) -> Parts:
    lengths = rng.permutation([1, 3, 2])[:2]
    inputs, state = _delta(rng, lengths)
    tokens, (heads, _, size) = int(lengths.sum()), state
    inputs["state"] = _floats(rng, tokens + 2, *state, dtype=_pick(rng, (BF16, BF16, np.float32)))
    inputs["ssm_state_indices"] = rng.permutation(tokens + 2)[:tokens].astype(np.int32)
    if rng.integers(0, 3) == 0:
        inputs["gk"] = rng.uniform(-1, 0, (tokens, heads, size)).astype(np.float32)
    if rng.integers(0, 3) == 0:
        inputs["num_accepted_tokens"] = np.maximum(lengths - 1, 1).astype(np.int32)
    return inputs, {"scale_value": 0.5} if rng.integers(0, 2) else {}


def _line_convolution(rng: Rng) -> Parts:
    """A prompt, a step, or a step behind accepted tokens."""
    dtype, kind, k, dim, length = _pick(rng, (np.float16, BF16)), int(rng.integers(0, 3)), 4, 64, 6
    inputs = {
        "x": _floats(rng, 2, (3, 1, 2)[kind], dim, dtype=dtype),
        "weight": _floats(rng, k if kind == 2 else int(rng.integers(2, 5)), dim, dtype=dtype),
        "conv_states": _floats(rng, 5, length, dim, dtype=dtype),
    }
    if kind == 0 and rng.integers(0, 2):
        inputs["initial_state_mode"] = rng.integers(0, 2, 2).astype(np.int32)
    if kind == 2:
        inputs["num_accepted_tokens"] = np.array([1, 2], np.int32)
    if kind != 1 and rng.integers(0, 2):
        inputs["x"] = inputs["x"].reshape(-1, dim)
        inputs["query_start_loc"] = np.array([0, 1, len(inputs["x"])], np.int32)
    if rng.integers(0, 2):
        inputs["bias"] = _floats(rng, dim, dtype=dtype)
    if rng.integers(0, 2):
        inputs["cache_indices"] = rng.permutation(5)[:2].astype(np.int32)
    return inputs, {"activation_mode": str(_pick(rng, ("silu", "none")))}


def _added_convolution(rng: Rng) -> Parts:
    """A prompt or a step, now and then with the states of blocks."""
    dtype, dim, s = _pick(rng, (np.float16, BF16)), 64, 4
    inputs = {
        "x": _floats(rng, 2, s, dim, dtype=dtype),
        "weight": _floats(rng, 3, dim, dtype=dtype),
        "conv_states": _floats(rng, 8, s + 1, dim, dtype=dtype),
    }
    attrs: dict[str, Any] = {"residual_connection": int(rng.integers(0, 2))}
    if rng.integers(0, 2):
        inputs["x"] = inputs["x"].reshape(-1, dim)
        inputs["query_start_loc"] = np.array([0, s - 1, 2 * s], np.int32)
        attrs["max_query_len"] = s + 1
    extras = _extras(rng, 4)
    if 1 in extras:
        inputs["num_accepted_tokens"] = np.array([1, 2], np.int32)
    if 2 in extras:
        inputs["num_computed_tokens"] = np.array([0, 1], np.int32)
        attrs["conv_mode"] = int(rng.integers(0, 2))
    if 3 in extras:  # blocks of two tokens, of which each sequence has filled one
        inputs["num_computed_tokens"] = np.array([2, 2], np.int32)
        inputs["cache_indices"] = rng.permutation(8)[:6].reshape(2, 3).astype(np.int32)
        first, last = np.array([1, 1], np.int32), np.array([2, 2], np.int32)
        inputs |= {"block_idx_first_scheduled_token": first, "block_idx_last_scheduled_token": last}
        inputs["initial_state_idx"] = np.array([0, 0], np.int32)
        attrs["block_size"] = 2
    elif rng.integers(0, 2):
        inputs["cache_indices"] = rng.permutation(8)[:2].astype(np.int32)
    return inputs, attrs


def _rotary(rng: Rng) -> Parts:
    dtype, mode = _half(rng), int(rng.integers(0, 4))
    x = _pick(rng, ((2, 3, 4, 8), (5, 2, 12)))
    table = tuple(size if n in (0, len(x) - 1) or (n == 1 and len(x) == 4) else 1 for n, size in enumerate(x))
    inputs = {"x": _floats(rng, *x, dtype=dtype)} | {name: _floats(rng, *table, dtype=dtype) for name in ("cos", "sin")}
    if rng.integers(0, 4) == 0:
        inputs["rotate"] = _floats(rng, x[-1], x[-1], dtype=dtype)
    return inputs, {"mode": mode}


def _rotary_mul(rng: Rng) -> Parts:
    dtype = _half(rng)
    x, table = _pick(rng, (((2, 3, 4, 64), (1, 1, 4, 64)), ((2, 3, 4, 64), (2, 3, 1, 64)), ((2, 3, 1, 64),) * 2))
    return {"x": _floats(rng, *x, dtype=dtype)} | {name: _floats(rng, *table, dtype=dtype) for name in ("r1", "r2")}, {}


def _interleaved(rng: Rng) -> Parts:
    b, n, s, dtype = 2, int(rng.integers(1, 4)), int(rng.integers(1, 4)), _pick(rng, (np.float16, BF16))
    table = (b, 1, _pick(rng, (1, s)), 64)
    tables = {name: _floats(rng, *table, dtype=dtype) for name in ("cos", "sin")}
    return {"x": _floats(rng, b, n, s, 64, dtype=dtype), **tables}, {}


def _latent(rng: Rng) -> Parts:
    b, s, heads, dtype = 2, int(rng.integers(1, 4)), 1, _pick(rng, (np.float16, ml_dtypes.bfloat16))
    mode = _pick(rng, ("Norm", "PA", "PA_BNSD", "PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ"))
    has_v, eight_bits = bool(rng.integers(0, 2)), bool(rng.integers(0, 2))
    heads = 2 if has_v else 1
    turned, key, value, size = 32, 64 if has_v else 32, 32, 32
    width = key if has_v else value + turned
    inputs = {"kv": _floats(rng, b, heads, s, width, dtype=dtype)}
    inputs["gamma"] = _floats(rng, key if has_v else value, dtype=dtype)
    inputs |= {name: _floats(rng, b, heads, _pick(rng, (1, s)), turned, dtype=dtype) for name in ("cos",)}
    inputs["sin"] = _floats(rng, *inputs["cos"].shape, dtype=dtype)
    inputs["index"] = np.arange(b * s).reshape(b, s) if mode == "Norm" else np.arange(b * s)
    if "BLK" in mode:
        inputs["index"] = np.arange(b) * size
    for name, own in (("k_cache", key), ("ckv_cache", value)):
        shape = (b, heads, 8, own) if mode == "Norm" else (3, size, heads, own)
        inputs[name] = rng.integers(-9, 9, shape).astype(np.int8 if eight_bits else dtype)
    if eight_bits:
        inputs |= {"k_rope_scale": _floats(rng, heads, key), "c_kv_scale": _floats(rng, heads, value)}
        inputs |= {"c_kv_offset": _floats(rng, heads, value)} if rng.integers(0, 2) else {}
    if has_v:
        inputs["v"] = _floats(rng, b, heads, s, value, dtype=dtype)
    return inputs, {"cache_mode": mode, "is_output_kv": bool(rng.integers(0, 2))}


def _rotary_pair(rng: Rng) -> Parts:
    dtype, heads = _half(rng), _pick(rng, ((4, 2), (3, 3)))
    query, key = (_floats(rng, 2, 3, count, 64, dtype=dtype) for count in heads)
    tables = {name: _floats(rng, 2, 3, 1, 64, dtype=dtype) for name in ("cos", "sin")}
    return {"query": query, "key": key, **tables}, {}


def _joined_heads(rng: Rng) -> Parts:
    b, s, query, key, width, dtype = 2, int(rng.integers(1, 4)), 2, 1, 128, _pick(rng, (np.float16, ml_dtypes.bfloat16))
    rows, pages, size, heads = b * s, 2, 32, query + 2 * key
    inputs = {"qkv": _floats(rng, rows, heads * width, dtype=dtype), "index": rng.permutation(pages * size)[:rows]}
    inputs |= {name: _floats(rng, width, dtype=dtype) for name in ("q_gamma", "k_gamma")}
    inputs |= {name: _floats(rng, rows, width, dtype=dtype) for name in ("cos", "sin")}
    inputs["q_out"] = np.zeros((rows, query * width), dtype)
    for name in ("k", "v"):
        part, kind = _pick(rng, ((16, dtype), (32, np.int8)))
        inputs[f"{name}_cache"] = rng.integers(-9, 9, (pages, key * width // part, size, part)).astype(kind)
        if kind == np.int8:
            inputs[f"{name}_scale"] = _floats(rng, key, width) + np.float32(3)
            inputs |= {f"{name}_offset": _floats(rng, key, width)} if rng.integers(0, 2) else {}
    return inputs, {"qkv_size": [b, s, heads, width], "head_nums": [query, key, key]}


BASES: dict[str, tuple[Callable[[Rng], Parts], ...]] = {
    "FlashAttentionScore": (_forward, _packed),
    "FlashAttentionScoreGrad": (_backward_of(_forward), _backward_of(_packed)),
    "IncreFlashAttention": (_decode,),
    "PromptFlashAttention": (_prompt(PFA),),
    "FusedInferAttentionScore": (_prompt(FIA),),
    "RingAttentionUpdate": (_ring,),
    "AttentionUpdate": (_merge,),
    "SparseFlashAttention": (_selected,),
    "SparseFlashAttentionGrad": (_selected_grad,),
    "LightningIndexer": (_indexer,),
    "LightningIndexerGrad": (_indexer_grad,),
    "SparseLightningIndexerGradKLLoss": (_loss,),
    "FlashLinearAttention": (_linear,),
    "ShortConvolution": (_convolution,),
    "RmsNorm": (_norm(("x",)),),
    "AddRmsNorm": (_norm(("x1", "x2")),),
    "LayerNormV4": (_centred,),
    "AddLayerNorm": (_centred_sum,),
    "SwiGlu": (_gated,),
    "GeGluV2": (_gelu_gated,),
    "ClippedSwiglu": (_clipped,),
    "GeluV2": (_gelu,),
    "ChunkGatedDeltaRule": (_chunks,),
    "RecurrentGatedDeltaRule": (_recurrence,),
    "CausalConv1d": (_line_convolution,),
    "FusedCausalConv1d": (_added_convolution,),
    "RotaryPositionEmbedding": (_rotary,),
    "KvRmsNormRopeCache": (_latent,),
    "ApplyRotaryPosEmb": (_rotary_pair,),
    "QkvRmsNormRopeCache": (_joined_heads,),
    "GemmaRmsNorm": (_gemma,),
    "LayerNormV3": (_centred_from_an_axis,),
    "RotaryMul": (_rotary_mul,),
    "InterleaveRope": (_interleaved,),
}
WITH_KERNEL = tuple(filter(has_kernel, BASES))
"""The operators that ONNX Runtime computes here."""


# What is done to them.

LARGEST = 256
"""Larger sizes than this are of masks that are what they are."""
DTYPES: tuple[Any, ...] = (
    *(np.float16, np.float32, np.float64, ml_dtypes.bfloat16, np.int8, np.uint8, np.int32, np.int64, np.uint64),
    *(np.bool_, np.complex64, np.uint16, object, "U4", "datetime64[s]", ml_dtypes.float8_e4m3fn),
)
NUMBERS: tuple[Any, ...] = (0, -1, 1, 2, 5, 7, 2**31, 2**61, 2**62, -(2**63), 2**63 - 1, 2**64, 0.0, 0.5, -3.0, True)
ODD: tuple[Any, ...] = ("", "BSH", "bnsd", "x", b"TND", [1, 2], [], {}, float("nan"), float("inf"), 1e39, 3 + 4j)


def _change(rng: Rng, op_type: str, cann: str | None, inputs: dict[str, Any], attrs: dict[str, Any]) -> str:
    """Changes one thing in place and says what."""
    kind = int(rng.integers(-3, 12))
    if kind < 0:
        return _graft(rng, _pick(rng, BASES[op_type])(rng), inputs, attrs)
    if kind < 2:
        return _resize(rng, inputs, attrs)
    if kind == 2:
        return _change_attribute(rng, {**_defaults(op_type, cann), **attrs}, attrs)
    if attrs and kind <= 5:
        return _change_attribute(rng, attrs, attrs)
    if not inputs:
        return "nothing left"
    name = _pick(rng, tuple(inputs))
    value = inputs[name]
    if isinstance(value, list) and value and rng.integers(0, 2):
        place = int(rng.integers(0, len(value)))
        changed, what = _changed(rng, value[place])
        inputs[name] = [*value[:place], changed, *value[place + 1 :]]
        return f"{name}[{place}] {what}"
    kind = int(rng.integers(0, 8))
    if kind == 0:
        del inputs[name]
        return f"{name} left out"
    if kind == 1:
        inputs[name + "x"] = inputs.pop(name)
        return f"{name} renamed"
    if kind == 2:
        other = _pick(rng, tuple(inputs))
        inputs[name], inputs[other] = inputs[other], inputs[name]
        return f"{name} and {other} swapped"
    if kind == 3:
        inputs[name] = _pick(
            rng, ([value], [value, value], [], [None], [value, None], (), None, "text", {}, 3, object())
        )
        return f"{name} is a {type(inputs[name]).__name__}"
    inputs[name], what = _changed(rng, value)
    return f"{name} {what}"


def _defaults(op_type: str, cann: str | None) -> dict[str, Any]:
    """What the attributes are that are not given."""
    return {entry.name: entry.value_if_absent for entry in get(op_type, cann).attrs if not entry.required}


def _graft(rng: Rng, other: Parts, inputs: dict[str, Any], attrs: dict[str, Any]) -> str:
    """An input of another call, and half of the times that call's attributes."""
    name = _pick(rng, tuple(name for name in other[0] if name not in inputs) or tuple(other[0]))
    inputs[name] = other[0][name]
    if rng.integers(0, 2):
        return f"{name} given"
    attrs |= other[1]
    return f"{name} given with {other[1]}"


def _resize(rng: Rng, inputs: dict[str, Any], attrs: dict[str, Any]) -> str:
    """Another number wherever a size is found, in the shapes and in the attributes."""
    arrays = {name: value for name, value in inputs.items() if isinstance(value, np.ndarray)}
    sizes = sorted({size for array in arrays.values() for size in array.shape if size <= LARGEST})
    if not sizes:
        return "no sizes"
    size = _pick(rng, tuple(sizes))
    other = max(0, _pick(rng, (0, 1, size - 1, size + 1, 2 * size, 3 * size // 4)))
    for name, array in arrays.items():
        inputs[name] = np.resize(array, tuple(other if each == size else each for each in array.shape))
    attrs |= {name: other for name, value in attrs.items() if type(value) is int and value == size}
    return f"{other} in place of {size}"


def _changed(rng: Rng, value: Any) -> tuple[Any, str]:
    if not isinstance(value, np.ndarray):
        return None, "is None"
    kind = int(rng.integers(0, 14))
    if kind == 0:
        dtype = _pick(rng, DTYPES)
        try:
            return value.astype(dtype), f"as {dtype}"
        except (TypeError, ValueError):
            return np.zeros(value.shape, dtype), f"zeros of {dtype}"
    if kind == 1:
        return value.reshape(-1), "flat"
    if kind == 2:
        return value[None], "with an axis more"
    if kind == 3 and value.ndim and value.shape[0] > 0:
        return value[0], "with an axis less"
    if kind == 4:
        return value.T, "transposed"
    if kind in (5, 6) and value.ndim:
        axis = int(rng.integers(0, value.ndim))
        size = max(0, _pick(rng, (0, 1, value.shape[axis] - 1, value.shape[axis] + 1, 2 * value.shape[axis])))
        return np.resize(value, (*value.shape[:axis], size, *value.shape[axis + 1 :])), f"of size {size} on axis {axis}"
    if kind == 7:
        return np.zeros((0,) * value.ndim, value.dtype), "empty"
    if kind == 8:
        return np.array(3).astype(value.dtype), "a scalar"
    if kind == 9 and value.dtype.kind in "iu":
        bounds = np.iinfo(value.dtype)
        return np.full_like(value, _pick(rng, (bounds.min, bounds.max, 0, 1, 2, 9))), "of other integers"
    if kind == 10:
        return value.tolist(), "as a Python list"
    if kind in (11, 12) and value.dtype.kind in "iu" and value.size:
        place = int(rng.integers(0, value.size))
        changed = value.copy()
        with np.errstate(over="ignore"):
            beside = (changed.flat[place] - changed.dtype.type(1), changed.flat[place] + changed.dtype.type(1))
        number = _pick(rng, (0, 1, *beside, value.min(), value.max()))
        changed.flat[place] = number
        return changed, f"with {number} at {place}"
    return -value if value.dtype.kind in "fi" else value, "negated"


def _change_attribute(rng: Rng, values: Mapping[str, Any], attrs: dict[str, Any]) -> str:
    """Changes one of the attributes that have `values`, which need not be given."""
    name = _pick(rng, tuple(values))
    value = values[name]
    kind = int(rng.integers(0, 8))
    if kind == 0:
        attrs.pop(name, None)
        return f"{name} left out"
    if kind == 1:
        attrs.pop(name, None)
        attrs[name + "x"] = value
        return f"{name} renamed"
    if kind == 2:
        attrs[name] = _pick(rng, ODD)
    elif isinstance(value, str):
        attrs[name] = _pick(rng, ("BNSD", "BSND", "BSH", "SBH", "TND", "PA_BSND", "", "NTD", "same_as_input"))
    elif isinstance(value, float):
        attrs[name] = _pick(rng, (*NUMBERS, float("nan"), float("inf"), -float("inf"), 1e39, -1e-46))
    else:
        attrs[name] = _pick(rng, NUMBERS)
    return f"{name} = {attrs[name]!r}"


def _pick(rng: Rng, choice: tuple[Any, ...]) -> Any:
    return choice[int(rng.integers(0, len(choice)))]


def flat(arrays: Mapping[str, Any]) -> Iterator[np.ndarray]:
    """All arrays, those of dynamic inputs one by one."""
    for value in arrays.values():
        yield from value if isinstance(value, list) else [value]


def asks_the_kernel(case: Case, arrays: Mapping[str, Any]) -> bool:
    """Does the kernel refuse by itself what the registry refuses of this call? Only the registry knows of older
    prototypes; a kernel computes what has no elements, and refuses numbers beyond 31 bits where a product of sizes
    overflows."""
    beyond = any(isinstance(value, int) and value >= 2**31 for value in case.attrs.values())
    return case.cann is None and not beyond and all(array.size for array in flat(arrays))
