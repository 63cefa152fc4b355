"""How an attention can be written down: the dimensions along which real models differ, as data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tests.passes.patterns import BOUNDED, PATTERNS, SINCE, WRITTEN
from tests.passes.repeats import EXPLICIT
from tests.passes.writer import SYMBOLS

FLOAT32_MIN = float(np.finfo(np.float32).min)
FLOAT16_MIN = float(np.finfo(np.float16).min)
CONSTANT = ("const", "const_empty")
"""The sources of masks that are no inputs."""
MASKING = ("selection", "product")
"""Guards that mask the probabilities like the scores."""
MODERATE = -1e30
"""Above this a selected value is not taken for a mask (passes/masks/mask.py)."""


@dataclass(frozen=True)
class Mask:
    """One operation on the scores that masks or shifts them.

    form     select       Where(keep, s, fill)             select_drop   Where(drop, fill, s)
             add_where    s + Where(keep, 0, fill)         add_mul       s + (1 - float(keep)) * fill
             mul_add      s * float(keep) + (1 - float(keep)) * fill
             least        Min(s, Where(keep, inf, -inf))
             chain        x = 1 - float(keep); s + Where(bool(x), fill, x)
             add_triangle s + Trilu(fill everywhere)       bias          s + a float input
    source   "input" bool, "int" an int64 input of 0 and 1, "const" a triangle kept in the model, "const_empty" one with
             a row that is masked everywhere, or a writer of patterns.py, which computes a `pattern`
    padding  of a computed mask: "", "and" and "times" with an input [B, 1, 1, T], "gather" with an input [B, T]
    """

    form: str = "select"
    dims: str = "B11T"
    fill: float = -math.inf
    source: str = "input"
    infinite: bool = False
    """Does a bias hold -inf?"""
    anonymous: bool = False
    """Are the input's symbolic dimensions declared without names?"""
    pattern: str = "causal"
    bound: bool = False
    """Is the last key of a computed mask moved by an input, so that nothing is known of it?"""
    padding: str = ""

    @property
    def selects(self) -> bool:
        """Is the number put in place of the scores, and not added?"""
        return self.form in ("select", "select_drop", "mul_add", "least")

    @property
    def computed(self) -> bool:
        """Does it follow from positions?"""
        return self.source in WRITTEN and self.form != "bias"


@dataclass(frozen=True)
class Spelling:
    """How an attention is written down; every field has the plainest spelling as its default."""

    sizes: Mapping[str, int] = field(
        default_factory=lambda: {"B": 2, "N": 4, "K": 4, "S": 5, "T": 6, "D": 8, "E": 8, "P": 1}
    )
    dtype: str = "float32"
    symbolic: bool = True
    opset: int = 17
    layout: str = "BNSD"
    """Of the three inputs: BNSD, BSND, BSH, SBH, BSD (one head, rank 3), or SD (rank 2)."""
    packed: str = "none"
    """Query, key and value in one input: split, slice (BSH), gather (BSND), gather_first (BNSD)."""
    cache: bool = False
    """Keys and values of earlier steps in front of the new ones, T = P + S."""
    target: str = "computed"
    """Reshape targets: "computed" from Shape, "inferred" with 0 and -1, "constant" (static models)."""
    product: str = "matmul"
    """matmul, folded (rank 3), einsum, fused (FusedMatMul), gemm (rank 2)."""
    key: str = "0132"
    """Where the key is transposed: 0132, 0231 (at once, from where heads are behind rows), rank3 (through rank 3)."""
    transposed: bool = False
    """Everything upside down: K Q^T, softmax over axis -2, V^T P^T."""
    gqa: str = "none"
    """As repeats.py says; broadcast (one key head) and grouped (rank 5) repeat nothing."""
    gqa_values: str = ""
    """How the values are repeated if not like the keys: another order belongs to other heads."""
    scale: str = "mul"
    """none, query, query_div, key, both, computed_both, transposed_key, mul, div, root, computed, after_mask, alpha."""
    factor: float = 0.5
    masks: tuple[Mask, ...] = ()
    guard: str = "none"
    """none, scores (0 in a row of -inf), nan (Where(IsNaN(p), 0, p)), cast_nan (Where(IsNaN(Cast(p)), 0, p)), bias
    (Where(ReduceMax(bias) == -inf, 0, p), of a single addend), selection (Where(keep, p, 0), of the one selection on
    the scores), product (p times its keep)."""
    softmax: str = "op"
    """As softmaxes.py says."""
    sink: bool = False
    """One more score in each row, an input with a number for each head, whose probability is dropped."""
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
    for rule in (_operands, _products, _versions, _scales, _masks, _guards):
        spelling = rule(spelling)
    return spelling


def _operands(spelling: Spelling) -> Spelling:
    sizes = {"P": 1, **spelling.sizes}
    change: dict[str, Any] = {"sizes": sizes}
    layout, packed = spelling.layout, spelling.packed
    if packed != "none":
        layout = {"gather": "BSND", "gather_first": "BNSD"}.get(packed, "BSH")
    if layout in ("SD", "BSD"):
        sizes |= {"N": 1, "K": 1} | ({"B": 1} if layout == "SD" else {})
        change |= {"gqa": "none", "output": "BNSD", "key": "0132"}
    if packed != "none":
        sizes["T"] = sizes["S"]
        if packed.startswith("gather"):
            sizes |= {"K": sizes["N"], "E": sizes["D"]}
    cache = spelling.cache and packed == "none" and layout in ("BNSD", "BSND")
    if cache:
        sizes["T"] = sizes["P"] + sizes["S"]
    gqa = change.get("gqa", spelling.gqa)
    if gqa == "none" or sizes["N"] % sizes["K"]:
        sizes["K"] = sizes["N"]
        change["gqa"] = "none"
    elif gqa == "broadcast":
        if packed.startswith("gather"):
            change["gqa"] = "none"
        else:
            sizes["K"] = 1
    if change.get("gqa", gqa) not in EXPLICIT:
        change["gqa_values"] = ""
    return replace(spelling, **{"layout": layout, "cache": cache, **change})


def _products(spelling: Spelling) -> Spelling:
    product = spelling.product
    low = spelling.layout in ("SD", "BSD")
    if low and product in ("folded", "einsum"):
        product = "matmul"
    if product == "gemm" and (spelling.layout != "SD" or spelling.opset < 11):
        # Gemm had to have a third operand.
        product = "matmul"
    if product == "fused" and spelling.dtype != "float32":
        product = "matmul"
    if product == "folded" and (spelling.transposed or spelling.gqa in ("broadcast", "grouped")):
        product = "matmul"
    key = spelling.key
    if key == "0231":
        fits = spelling.layout in ("BSND", "BSH", "SBH") and product == "matmul" and not spelling.transposed
        key = "0231" if fits and spelling.gqa in ("none", "broadcast") else "0132"
    elif key == "rank3" and (low or spelling.gqa in ("broadcast", "grouped")):
        key = "0132"
    target = "inferred" if spelling.target == "constant" and spelling.symbolic else spelling.target
    return replace(spelling, product=product, key=key, target=target)


def _versions(spelling: Spelling) -> Spelling:
    opset = spelling.opset
    if "einsum" in (spelling.product, spelling.values) and opset < 12:
        opset = 13
    if spelling.transposed and opset < 13:
        # A Softmax of these opsets flattens: only the last axis means one axis.
        opset = 13
    # The scores of folded heads have no axis of heads for the sink; old Concats and Slices know no computed shape.
    sink = spelling.sink and spelling.product != "folded" and spelling.layout != "BSD"
    return replace(spelling, opset=opset, sink=sink)


def _scales(spelling: Spelling) -> Spelling:
    scale = spelling.scale
    if scale == "alpha" and spelling.product not in ("fused", "gemm"):
        scale = "mul"
    if scale == "transposed_key" and (spelling.product != "matmul" or spelling.transposed):
        scale = "key"
    if scale.startswith("computed") and spelling.packed != "none":
        scale = "both"
    if wider(spelling) == "float64" and scale in ("mul", "div", "root", "computed", "after_mask"):
        scale = "query"
    return replace(spelling, scale=scale)


def _masks(spelling: Spelling) -> Spelling:
    floor = spelling.floor and (spelling.dtype == "float32") != spelling.upcast
    masks = []
    for mask in spelling.masks:
        if mask.form == "mul_add" and (math.isinf(mask.fill) or masks or spelling.dtype == "bfloat16"):
            # 0 * -inf is NaN, for the number, which may be -inf in bfloat16, as for scores that are masked already.
            mask = replace(mask, form="select")
        if mask.form == "mul_add" and mask.source == "int":
            # Integers are not known to be 0 and 1.
            mask = replace(mask, source="input")
        if mask.form == "least":
            mask = replace(mask, fill=-math.inf)
        if mask.form == "add_mul" and math.isinf(mask.fill):
            # Such a mask holds NaN, which no floor changes.
            floor = False
        mask = _written(mask, spelling) if mask.computed else replace(mask, padding="", dims=_low(mask.dims, spelling))
        if mask.form == "add_triangle" and (not mask.computed or mask.padding):
            mask = replace(mask, form="add_where")
        if mask.source in CONSTANT and "B" in mask.dims:
            mask = replace(mask, source="input")
        if any(spelling.sizes[letter] == 1 for letter in mask.dims if letter in SYMBOLS):
            # A dimension that is not known beside scores of one row could enlarge them.
            mask = replace(mask, anonymous=False)
        masks.append(mask)
    identity = spelling.identity
    if spelling.dtype == "float16" and not spelling.upcast and spelling.product == "folded":
        # ONNX Runtime computes in float32 across one operator without arithmetic, and rounds to float16 between two.
        identity = False
    return replace(spelling, masks=tuple(masks), floor=floor, identity=identity)


def _low(dims: str, spelling: Spelling) -> str:
    """A mask's dimensions for scores of rank 2 or 3."""
    if spelling.layout == "SD":
        return "ST" if "S" in dims else "T"
    return dims[0] + dims[2:] if spelling.layout == "BSD" and len(dims) == 4 else dims


def _written(mask: Mask, spelling: Spelling) -> Mask:
    """A computed mask whose writer exists in the opset and knows the pattern."""
    pattern = PATTERNS[mask.pattern]
    if mask.padding == "gather" and spelling.opset < SINCE["range"]:
        mask = replace(mask, padding="and")
    if mask.bound and (mask.source not in BOUNDED or pattern.upper is None or mask.form == "add_triangle"):
        mask = replace(mask, bound=False)
    backward = pattern.at_end and spelling.sizes["T"] < spelling.sizes["S"]
    if mask.source.startswith("slice") and backward:
        # Exporters cut a triangle where there are no fewer keys than rows.
        mask = replace(mask, source="range")
    if mask.source == "slice_lifted" and spelling.layout in ("SD", "BSD"):
        mask = replace(mask, source="slice")
    if spelling.opset < SINCE.get(mask.source, 14):
        mask = replace(mask, source="range" if spelling.opset >= SINCE["range"] else "input")
        if mask.source == "input":
            return replace(mask, padding="", dims=_low("B11T", spelling))
    if mask.form == "add_triangle" and (spelling.opset < 14 or pattern.lower is not None):
        mask = replace(mask, form="add_where")
    if spelling.layout == "SD":
        return replace(mask, padding="", dims="ST")
    if mask.padding:
        return replace(mask, dims=_low("B1ST", spelling))
    lifted = mask.source == "slice_lifted" or mask.dims == "11ST"
    return replace(mask, dims=_low("11ST", spelling) if lifted else "ST")


def _guards(spelling: Spelling) -> Spelling:
    guard = spelling.guard
    if guard in MASKING:
        selections = [mask for mask in spelling.masks if mask.selects]
        single = len(selections) == 1 and selections[0].form not in ("mul_add", "least")
        guard = guard if single and spelling.product != "folded" else "none"
    if guard == "bias":
        added = len(spelling.masks) == 1 and not spelling.masks[0].selects
        # The peak runs along the last axis, and ONNX Runtime's ReduceMax does not pass NaN on in every type.
        single = added and not spelling.transposed and spelling.scale != "after_mask" and spelling.product != "folded"
        undefined = added and spelling.masks[0].form == "add_mul" and math.isinf(spelling.masks[0].fill)
        guard = "bias" if single and not undefined and spelling.opset >= 11 else "none"
    if guard == "scores" and (
        spelling.transposed
        or spelling.opset < 11
        or spelling.softmax in ("logarithm", "logarithm_written_out", "reciprocal")
    ):
        # Floats are compared since then, the guard runs along the last axis, and nobody writes it beside these.
        guard = "none"
    if spelling.sink and guard not in MASKING:
        # Beside a sink no row is undefined.
        guard = "none"
    return replace(spelling, guard=guard)


def wider(spelling: Spelling) -> str:
    """The type of the masked scores."""
    if not spelling.upcast:
        return spelling.dtype
    return {"float16": "float32", "bfloat16": "float32", "float32": "float64"}[spelling.dtype]


def may_decline(spelling: Spelling, target: str = "ort") -> set[str]:
    """The codes a decline of this spelling may have; empty when it has to be fused.

    For ONNX Runtime a mask's number of moderate size is kept where it stands alone, for a product it never is.
    """
    selects = [index for index, mask in enumerate(spelling.masks) if mask.selects]
    codes = set()
    if wider(spelling) == "float64" and (spelling.masks or spelling.sink):
        codes.add("cast")
    if spelling.guard == "bias" and spelling.floor:
        codes.add("probability_term")
    if spelling.guard in MASKING and (len(spelling.masks) > 1 or spelling.sink or target == "ascend"):
        codes.add("probability_term")
    if len(spelling.masks) > 1 and any(mask.form == "add_mul" and mask.source == "int" for mask in spelling.masks):
        # Of integers that nobody knows such a mask may hold the opposite of another's number.
        codes.add("mask_value")
    if any(not mask.selects and -1e30 < mask.fill <= -1e3 for mask in spelling.masks) and (
        len(spelling.masks) > 1 or spelling.floor or spelling.scale == "after_mask"
    ):
        # What rounds the scores is not mixed with other terms.
        codes.add("mask_value")
    behind_an_addend = any(mask.form == "least" for mask in spelling.masks[1:]) and not spelling.masks[0].selects
    if behind_an_addend and np.dtype(wider(spelling)) == np.float16:
        # Min has a kernel of 16 bits, which rounds what is added to the scores in front of it.
        codes.add("mask_value")
    if behind_an_addend and (spelling.masks[0].form == "add_mul" or spelling.masks[0].source == "int"):
        # A minimum keeps the NaN of 0 * -inf, and of what integers that nobody knows may make infinite.
        codes.add("score_term")
    biases = sum(mask.form == "bias" for mask in spelling.masks)
    beside = len(spelling.masks) > 1 and (target == "ascend" or spelling.floor or spelling.guard != "none")
    if biases > 1 or (biases and (beside or spelling.scale == "after_mask" or spelling.sink)):
        # Nor is a bias whose numbers nobody knows, but where masked keys keep a score to which it is added.
        codes.add("mask_value")
    kind = np.dtype(wider(spelling))
    later = spelling.factor if spelling.scale == "after_mask" else 1.0
    alone = (
        target == "ort"
        and len(spelling.masks) == 1
        and spelling.guard not in MASKING
        and not spelling.floor
        and later == 1.0
    )
    for index in selects:
        fill = spelling.masks[index].fill
        if math.isfinite(fill) and (kind == np.float16 or fill * later > MODERATE) and (not alone or spelling.sink):
            codes.add("mask_value")
    return codes
