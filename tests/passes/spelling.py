"""How an attention can be written down: the dimensions along which real models differ, as data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

FLOAT32_MIN = float(np.finfo(np.float32).min)
FLOAT16_MIN = float(np.finfo(np.float16).min)
SYMBOLS = "BST"
"""The sizes that are symbols in a model that is not static."""
CONSTANT = ("const", "const_empty")
"""The sources of masks that are no inputs."""
MODERATE = -1e30
"""Above this a selected value is not taken for a mask (passes/mask.py)."""


@dataclass(frozen=True)
class Mask:
    """One operation on the scores that masks or shifts them.

    form     select       Where(keep, s, fill)             select_drop   Where(drop, fill, s)
             add_where    s + Where(keep, 0, fill)         add_mul       s + (1 - float(keep)) * fill
             chain        x = 1 - float(keep); s + Where(bool(x), fill, x)
             bias         s + a float input
    source   "input" bool, "int" an int64 input of 0 and 1, "const" a triangle kept in the model, "const_empty" one with
             a row that is masked everywhere
    """

    form: str = "select"
    dims: str = "B11T"
    fill: float = -math.inf
    source: str = "input"
    infinite: bool = False
    """Does a bias hold -inf?"""
    anonymous: bool = False
    """Are the input's symbolic dimensions declared without names?"""


@dataclass(frozen=True)
class Spelling:
    """How an attention is written down; every field has the plainest spelling as its default."""

    sizes: Mapping[str, int] = field(default_factory=lambda: {"B": 2, "N": 4, "K": 4, "S": 5, "T": 6, "D": 8, "E": 8})
    dtype: str = "float32"
    symbolic: bool = True
    opset: int = 17
    layout: str = "BNSD"
    """Of the three inputs: BNSD, BSND, BSH, SBH, or SD (one head, rank 2)."""
    target: str = "computed"
    """Reshape targets: "computed" from Shape, "inferred" with 0 and -1, "constant" (static models)."""
    product: str = "matmul"
    """matmul, folded (rank 3), einsum, fused (FusedMatMul), gemm (rank 2)."""
    key: str = "0132"
    """Where the key is transposed: 0132, 0231 (from BSND), rank3 (through a rank 3 Reshape)."""
    transposed: bool = False
    """Everything upside down: K Q^T, softmax over axis -2, V^T P^T."""
    gqa: str = "none"
    """none, expand (consecutive heads), interleave and tile (heads in turns, by Expand or by Tile), broadcast (one key
    head), grouped (rank 5)."""
    scale: str = "mul"
    """none, query, key, both, transposed_key, mul, div, computed, after_mask, alpha."""
    factor: float = 0.5
    masks: tuple[Mask, ...] = ()
    guard: str = "none"
    """none, nan (Where(IsNaN(p), 0, p)), bias (Where(ReduceMax(bias) == -inf, 0, p), of a single addend), selection
    (Where(keep, p, 0), of the one selection on the scores)."""
    softmax: str = "op"
    """op, op_positive (axis written as a positive number), decomposed, shifted (by each row's own maximum)."""
    upcast: bool = False
    """Softmax and masks in the next wider type."""
    floor: bool = False
    """Max(s, finfo.min) behind the masks; in float32 only."""
    dropout: bool = False
    identity: bool = False
    values: str = "matmul"
    """The second product: matmul, einsum, flipped (V^T P^T)."""
    output: str = "BNSD"
    """BNSD, BSND, BSH, SBH."""


def consistent(spelling: Spelling) -> Spelling:
    """The nearest spelling whose fields go together."""
    sizes = dict(spelling.sizes)
    change: dict[str, Any] = {}
    if spelling.layout == "SD":
        sizes |= {"B": 1, "N": 1, "K": 1}
        change |= {"gqa": "none", "output": "BNSD", "key": "0132"}
        change["masks"] = tuple(replace(mask, dims="ST" if "S" in mask.dims else "T") for mask in spelling.masks)
        change["product"] = "matmul" if spelling.product in ("folded", "einsum") else spelling.product
    elif spelling.product == "gemm":
        change["product"] = "matmul"
    if spelling.gqa == "none" or sizes["N"] % sizes["K"]:
        sizes["K"] = sizes["N"]
        change["gqa"] = "none"
    elif spelling.gqa == "broadcast":
        sizes["K"] = 1
    spelling = replace(spelling, sizes=sizes, **change)
    change = {}
    if spelling.product == "fused" and spelling.dtype != "float32":
        change["product"] = "matmul"
    if spelling.product == "folded" and (spelling.transposed or spelling.gqa in ("broadcast", "grouped")):
        change["product"] = "matmul"
    spelling = replace(spelling, **change)
    change = {}
    if spelling.key == "0231":
        fits = spelling.layout == "BSND" and spelling.product == "matmul" and not spelling.transposed
        change["key"] = "0231" if fits and spelling.gqa in ("none", "broadcast") else "0132"
    if spelling.scale == "alpha" and spelling.product not in ("fused", "gemm"):
        change["scale"] = "mul"
    if spelling.scale == "transposed_key" and (spelling.product != "matmul" or spelling.transposed):
        change["scale"] = "key"
    if spelling.target == "constant" and spelling.symbolic:
        change["target"] = "inferred"
    if spelling.floor and (spelling.dtype == "float16") != spelling.upcast:
        change["floor"] = False
    if spelling.dtype == "float16" and not spelling.upcast and spelling.product == "folded":
        # ONNX Runtime computes in float32 across one operator without arithmetic, and rounds to float16 between two.
        change["identity"] = False
    if spelling.transposed and spelling.opset < 13:
        # A Softmax of these opsets flattens: only the last axis means one axis.
        change["opset"] = 13
    if spelling.guard == "selection":
        selections = [mask for mask in spelling.masks if mask.form.startswith("select")]
        change["guard"] = "selection" if len(selections) == 1 and spelling.product != "folded" else "none"
    if spelling.guard == "bias":
        added = len(spelling.masks) == 1 and not spelling.masks[0].form.startswith("select")
        # The peak runs along the last axis, and ONNX Runtime's ReduceMax does not pass NaN on in every type.
        single = added and not spelling.transposed and spelling.scale != "after_mask" and spelling.product != "folded"
        undefined = added and spelling.masks[0].form == "add_mul" and math.isinf(spelling.masks[0].fill)
        change["guard"] = "bias" if single and not undefined else "none"
    if "einsum" in (spelling.product, spelling.values) and spelling.opset < 12:
        change["opset"] = 13
    masks = []
    for mask in spelling.masks:
        if mask.form == "add_mul" and math.isinf(mask.fill):
            # Such a mask holds NaN, which no floor changes.
            change["floor"] = False
        if mask.source in CONSTANT and "B" in mask.dims:
            mask = replace(mask, source="input")
        if any(sizes[letter] == 1 for letter in mask.dims if letter in SYMBOLS):
            # A dimension that is not known beside scores of one row could enlarge them.
            mask = replace(mask, anonymous=False)
        masks.append(mask)
    spelling = replace(spelling, masks=tuple(masks), **change)
    if wider(spelling) == "float64" and spelling.scale in ("mul", "div", "computed", "after_mask"):
        return replace(spelling, scale="query")
    return spelling


def wider(spelling: Spelling) -> str:
    """The type of the masked scores."""
    return {"float16": "float32", "float32": "float64"}[spelling.dtype] if spelling.upcast else spelling.dtype


def may_decline(spelling: Spelling) -> set[str]:
    """The codes a decline of this spelling for ONNX Runtime may have; empty when it has to be fused."""
    selects = [index for index, mask in enumerate(spelling.masks) if mask.form.startswith("select")]
    codes = set()
    if wider(spelling) == "float64" and spelling.masks:
        codes.add("cast")
    if spelling.guard == "bias" and spelling.floor:
        codes.add("probability_term")
    if spelling.guard == "selection" and len(spelling.masks) > 1:
        codes.add("probability_term")
    if any(not mask.form.startswith("select") and -1e30 < mask.fill <= -1e3 for mask in spelling.masks) and (
        len(spelling.masks) > 1 or spelling.floor or spelling.scale == "after_mask"
    ):
        # What rounds the scores is not mixed with other terms.
        codes.add("mask_value")
    if not selects:
        return codes
    kind = np.dtype(wider(spelling))
    later = spelling.factor if spelling.scale == "after_mask" else 1.0
    for index in selects:
        fill = spelling.masks[index].fill
        if math.isfinite(fill) and (kind == np.float16 or fill * later > MODERATE):
            codes.add("mask_value")
    same_fill = len({spelling.masks[index].fill for index in selects}) == 1
    if len(selects) < len(spelling.masks) or not same_fill:
        codes.add("empty_rows")
    return codes
