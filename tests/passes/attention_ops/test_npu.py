"""The attention operators of ATC's parser give what their formula gives, or are left with a true reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fa_compiler import reference
from tests.passes.operators import Operator, declined
from tests.passes.running import Array, assert_same, fused, run

pytestmark = pytest.mark.usefixtures("declines_change_nothing")

TRIANGLE = np.triu(np.ones((2048, 2048), dtype=np.bool_), 1)
RANKS = {"BSH": 3, "SBH": 3, "BSND": 4, "BNSD": 4, "BNSD_BSND": 4}


def excluded(*shape: int) -> Array:
    """A mask that leaves every row its first key."""
    mask = np.random.default_rng(2).random(shape) < 0.4
    mask[..., 0] = False
    return mask


def flash(domain: str = "npu", **given: Any) -> Operator:
    """NPUFlashAttention over two heads of size 8."""
    names = ("head_num", "input_layout", "scale", "keep_prob", "pre_tockens", "next_tockens", "sparse_mode")
    attrs = {name: given.pop(name) for name in names if name in given}
    inputs = {name: given.get(name) for name in ("q", "k", "v", "bias", "padding", "mask", "prefix", "qlen", "klen")}
    inputs |= {key: inputs[key] or default for key, default in (("q", "B S 16"), ("k", "B T 16"), ("v", "B T 16"))}
    attrs = {"head_num": 2, "input_layout": "BSH", **attrs}
    constants = tuple(given.get("constants", ()))
    return Operator("NPUFlashAttention", inputs, ("y",), attrs, domain, 17, {}, "float32", constants, fixed=True)


FLASH: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.3},
    "grouped": {"q": "B S 32", "head_num": 4},
    "SBH": {"q": "S B 16", "k": "T B 16", "v": "T B 16", "input_layout": "SBH"},
    "bias": {"bias": "B 2 S T", "scale": 0.3},
    "bias of a row": {"bias": "1 2 1 T"},
    "mask": {"mask": ("S T", excluded(4, 6)), "sparse_mode": 1},
    "mask of the batch": {"mask": ("B 1 S T", excluded(2, 1, 4, 6)), "sparse_mode": 1},
    "mask of bytes": {"mask": ("S T", excluded(4, 6).astype(np.uint8)), "sparse_mode": 1},
    "no mask, no band": {"sparse_mode": 0, "pre_tockens": 1},
    "mask and band": {"mask": ("S T", np.triu(np.ones((4, 6), np.bool_), 1)), "pre_tockens": 2, "next_tockens": 0},
    "mask and no limit": {"mask": ("S T", excluded(4, 6)), "pre_tockens": 1 << 30, "next_tockens": 1 << 30},
    "causal": {"mask": ("2048 2048", TRIANGLE), "constants": ("mask",), "sparse_mode": 2},
    "causal to the end": {"mask": ("2048 2048", TRIANGLE), "constants": ("mask",), "sparse_mode": 3},
    "band": {
        "mask": ("2048 2048", TRIANGLE),
        "constants": ("mask",),
        "sparse_mode": 4,
        "pre_tockens": 2,
        "next_tockens": 1,
    },
}


@pytest.mark.parametrize("name", FLASH)
def test_flash(name: str) -> None:
    """As the operator it stands for."""
    operator = flash(**FLASH[name])
    feeds = operator.feeds()
    result, report = fused(operator.model(feeds))
    assert report.blocks[0].status == "fused", report.blocks[0].reason
    wanted = by_reference(operator, feeds)
    (got,) = run(result, {name: value for name, value in feeds.items() if name not in operator.constants})
    assert_same(got, wanted, 1e-5)


def by_reference(operator: Operator, feeds: dict[str, Array]) -> Array:
    """FlashAttentionScore with the same words."""
    words = {"q": "query", "k": "key", "v": "value", "bias": "real_shift", "mask": "atten_mask"}
    attrs = dict(operator.attrs)
    attrs["scale_value"] = attrs.pop("scale", 1.0)
    attrs = {"pre_tockens": 0, "next_tockens": 0, "sparse_mode": 0, **attrs}
    inputs = {words[name]: value for name, value in feeds.items()}
    return np.asarray(reference.run("FlashAttentionScore", inputs, attrs)["attention_out"])


FLASH_REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "layout": ({"input_layout": "BNSD"}, "ready_made", "layout"),
    "dropout": ({"keep_prob": 0.9}, "ready_made", "dropout"),
    "prefix": ({"prefix": ("B", np.array([1, 2]))}, "ready_made", "prefix"),
    "lengths": ({"qlen": ("B", np.array([1, 2]))}, "ready_made", "lengths"),
    "triangle not known": ({"mask": ("2048 2048", TRIANGLE), "sparse_mode": 2}, "ready_made", "triangle"),
    "other mask": (
        {"mask": ("2048 2048", TRIANGLE.T.copy()), "constants": ("mask",), "sparse_mode": 2},
        "ready_made",
        "triangle",
    ),
    "prefix mode": ({"mask": ("S T", excluded(4, 6)), "sparse_mode": 5}, "ready_made", "sparse_mode 5"),
    "float mask": ({"mask": "S T", "sparse_mode": 1}, "dtype", "boolean"),
    "bias of a dimension": ({"bias": "T"}, "rank", "1 dimensions"),
}


@pytest.mark.parametrize("name", FLASH_REFUSED)
def test_flash_refused(name: str) -> None:
    features, code, words = FLASH_REFUSED[name]
    got, reason = declined(flash(**features))
    assert got == code
    assert words in reason


def inference(op_type: str, *, fixed: bool = True, **given: Any) -> Operator:
    """NPUPromptFlashAttention or NPUIncreFlashAttention over two heads of size 8."""
    prompt = op_type == "NPUPromptFlashAttention"
    names = (
        "num_heads",
        "num_key_value_heads",
        "input_layout",
        "scale_value",
        "pre_tokens",
        "next_tokens",
        "sparse_mode",
    )
    attrs = {"num_heads": 2, "input_layout": "BSH", **{name: given.pop(name) for name in names if name in given}}
    order = ["q", "k", "v", "bias", "mask", *(["qlen"] if prompt else []), "klen"]
    rows = "S" if prompt else "1"
    default: dict[str, Any] = {"q": f"B {rows} 16", "k": "B T 16", "v": "B T 16"}
    inputs = {name: {**default, **given}.get(name) for name in [*order, *(["scale"] if "scale" in given else [])]}
    while prompt and inputs[list(inputs)[-1]] is None:
        del inputs[list(inputs)[-1]]
    constants = tuple(given.get("constants", ()))
    return Operator(op_type, inputs, ("y",), attrs, "npu", 17, {}, "float32", constants, fixed=fixed)


PROMPT: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale_value": 0.3},
    "BNSD": {"q": "B 2 S 8", "k": "B 2 T 8", "v": "B 2 T 8", "input_layout": "BNSD"},
    "BSND": {"q": "B S 2 8", "k": "B T 2 8", "v": "B T 2 8", "input_layout": "BSND"},
    "BNSD_BSND": {"q": "B 2 S 8", "k": "B 2 T 8", "v": "B 2 T 8", "input_layout": "BNSD_BSND"},
    "grouped": {"q": "B S 32", "num_heads": 4, "num_key_value_heads": 2},
    "bias": {"bias": "1 2 S T", "scale_value": 0.3},
    "empty bias": {"bias": ("0", np.zeros(0, np.float32))},
    "mask": {"mask": ("S T", excluded(4, 6)), "sparse_mode": 1},
    "mask of rank 3": {"mask": ("B S T", excluded(2, 4, 6)), "sparse_mode": 1},
    "mask of rank 4": {"mask": ("B 1 S T", excluded(2, 1, 4, 6)), "sparse_mode": 1},
    "key lengths": {"klen": ("B", np.array([3, 5]))},
    "one key length": {"klen": ("1", np.array([4]))},
    "mask and key lengths": {"mask": ("S T", excluded(4, 6)), "sparse_mode": 1, "klen": ("B", np.array([3, 5]))},
    "causal": {"mask": ("1 2048 2048", TRIANGLE[None]), "constants": ("mask",), "sparse_mode": 2},
    "causal to the end": {"mask": ("1 1 2048 2048", TRIANGLE[None, None]), "constants": ("mask",), "sparse_mode": 3},
    "causal and key lengths": {
        "mask": ("2048 2048", TRIANGLE),
        "constants": ("mask",),
        "sparse_mode": 2,
        "klen": ("B", np.array([3, 5])),
    },
}
INCREMENTAL: dict[str, dict[str, Any]] = {
    "plain": {},
    "BNSD": {"q": "B 2 1 8", "k": "B 2 T 8", "v": "B 2 T 8", "input_layout": "BNSD"},
    "scale": {"scale_value": 0.3},
    "bias": {"bias": "B 2 1 T"},
    "mask": {"mask": ("B T", excluded(2, 6))},
    "mask of rank 3": {"mask": ("B 1 T", excluded(2, 1, 6))},
    "mask of rank 4": {"mask": ("B 1 1 T", excluded(2, 1, 1, 6))},
    "all masked": {"mask": ("B T", np.ones((2, 6), np.bool_))},
    "lengths": {"klen": ("B", np.array([2, 6]))},
    "one length": {"klen": ("1", np.array([3]))},
    "mask and lengths": {"mask": ("B T", excluded(2, 6)), "klen": ("B", np.array([2, 6]))},
}


def formula(operator: Operator, feeds: dict[str, Array]) -> Array:
    """softmax(scale * q k' + bias) v over the keys that are left, in float64."""
    layout = str(operator.attrs["input_layout"]).split("_")[0]
    heads = int(str(operator.attrs["num_heads"]))
    counts = (heads, *[int(str(operator.attrs.get("num_key_value_heads", heads)))] * 2)
    order = {"BSH": (0, 2, 1, 3), "BSND": (0, 2, 1, 3), "BNSD": (0, 1, 2, 3)}[layout]
    parts = []
    for name, count in zip("qkv", counts, strict=True):
        part = feeds[name].astype(np.float64)
        part = part.reshape(*part.shape[:2], count, -1) if layout == "BSH" else part
        parts.append(part.transpose(order).repeat(heads // count, axis=1))
    q, k, v = parts
    scores = q @ k.swapaxes(-1, -2) * float(str(operator.attrs.get("scale_value", 1.0)))
    if feeds.get("bias", np.zeros(0)).size:
        scores = scores + feeds["bias"]
    rows, columns = np.mgrid[: scores.shape[2], : scores.shape[3]]
    left = np.ones(scores.shape, np.bool_)
    mode = operator.attrs.get("sparse_mode", 0)
    if mode in (2, 3):
        left &= columns - rows <= (0 if mode == 2 else scores.shape[3] - scores.shape[2])
    elif "mask" in feeds:
        mask = feeds["mask"].astype(np.bool_)
        by_key = operator.op_type == "NPUIncreFlashAttention"
        mask = mask.reshape(mask.shape[0], 1, 1, -1) if by_key else mask[:, None] if mask.ndim == 3 else mask
        scores = np.where(np.broadcast_to(mask, scores.shape), -1e12, scores) if by_key else scores
        left &= True if by_key else ~np.broadcast_to(mask, scores.shape)
    if "klen" in feeds:
        left &= columns < feeds["klen"].reshape(-1, 1, 1, 1)
    scores = np.where(left, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = (weights / weights.sum(-1, keepdims=True)) @ v
    if operator.attrs["input_layout"] == "BNSD":
        return out
    out = out.transpose(0, 2, 1, 3)
    return out.reshape(*out.shape[:2], -1) if layout == "BSH" else out


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize(
    ("op_type", "name"), [("Prompt", name) for name in PROMPT] + [("Incre", name) for name in INCREMENTAL]
)
def test_inference(op_type: str, name: str, fixed: bool) -> None:
    features = (PROMPT if op_type == "Prompt" else INCREMENTAL)[name]
    operator = inference(f"NPU{op_type}FlashAttention", fixed=fixed, **features)
    feeds = operator.feeds()
    result, report = fused(operator.model(feeds))
    assert report.blocks[0].status == "fused", report.blocks[0].reason
    (got,) = run(result, {name: value for name, value in feeds.items() if name not in operator.constants})
    assert_same(got, formula(operator, feeds), 1e-5)


@pytest.mark.parametrize("name", INCREMENTAL)
def test_ascend_decodes(name: str) -> None:
    """The product's own operator: masked keys have the score that it gives them, and lengths stay lengths."""
    features = {key: each for key, each in INCREMENTAL[name].items() if key != "bias"}
    operator = replace(inference("NPUIncreFlashAttention", **features), dtype="float16")
    feeds = operator.feeds()
    result, report = fused(operator.model(feeds), "ascend")
    (block,) = report.blocks
    wanted = "+".join(word for word, given in (("lengths", "klen"), ("atten_mask", "mask")) if given in features)
    assert (block.op, block.mask) == ("IncreFlashAttention", wanted or "none"), block.reason
    (got,) = run(result, feeds)
    assert_same(got, formula(operator, feeds), 2e-3)


INFERENCE_REFUSED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "layout": ("Prompt", {"input_layout": "NSD"}, "ready_made", "layout"),
    "query lengths": ("Prompt", {"qlen": ("B", np.array([3, 4]))}, "ready_made", "lengths of the queries"),
    "float16 mask": ("Prompt", {"mask": ("S T", np.zeros((4, 6), np.float16))}, "dtype", "boolean"),
    "corner of lengths": (
        "Prompt",
        {"mask": ("2048 2048", TRIANGLE), "constants": ("mask",), "sparse_mode": 3, "klen": ("B", np.array([3, 5]))},
        "ready_made",
        "corner",
    ),
    "several rows": ("Incre", {"q": "B S 16"}, "shape", "single row"),
    "incremental layout": ("Incre", {"input_layout": "TND"}, "ready_made", "layout"),
    "lists": ("Incre", {"scale": ("1", np.zeros(1, np.float32))}, "ready_made", "lists"),
}


@pytest.mark.parametrize("name", INFERENCE_REFUSED)
def test_inference_refused(name: str) -> None:
    op_type, features, code, words = INFERENCE_REFUSED[name]
    got, reason = declined(inference(f"NPU{op_type}FlashAttention", **features))
    assert got == code
    assert words in reason


def test_ascend() -> None:
    """For a product the node becomes the operator itself, which needs no plug-in of ATC's."""
    operator = flash(mask=("1 1 S T", excluded(1, 1, 4, 6)), sparse_mode=1)
    result, report = fused(operator.model(operator.feeds()), "ascend")
    assert report.blocks[0].status == "fused", report.blocks[0].reason
    assert all(node.domain != "npu" for node in result.graph.node)
