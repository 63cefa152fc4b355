"""Random spellings for hypothesis.

Hypothesis likes small and repeated choices: of its own lists most are empty. So half of the spellings are drawn evenly
by a seed; the other half are built choice by choice and shrink well when they fail.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from tests.passes.patterns import PATTERNS, WRITTEN
from tests.passes.repeats import EXPLICIT, REPEATS
from tests.passes.softmaxes import SOFTMAXES
from tests.passes.spelling import FLOAT32_MIN, Mask, Spelling, consistent

Choices = Mapping[str, Sequence[Any]]

SIZES: Choices = {
    "B": [1, 2, 3],
    "N": [1, 2, 4, 6],
    "K": [1, 2, 3],
    "S": [1, 3, 5],
    "T": [1, 2, 6, 9],
    "D": [1, 4, 8],
    "E": [4, 8, 3],
    "P": [1, 4],
}
SCALES = ["none", "query", "query_div", "key", "both", "computed_both", "transposed_key", "mul", "div", "root"]
SCALES += ["computed", "after_mask", "alpha"]
MASK: Choices = {
    "form": [
        *("select", "select_drop", "add_where", "add_mul", "mul_add", "least", "chain", "add_triangle", "bias", "bias")
    ],
    "dims": ["B11T", "11ST", "B1ST", "BNST", "1NST", "ST", "T", "1ST", "B1S1", "B111"],
    "fill": [-math.inf, -math.inf, FLOAT32_MIN, FLOAT32_MIN, FLOAT32_MIN, -1e30, -1e9, -1e4],
    "source": ["input", "int", "const", "const_empty", *WRITTEN],
    "pattern": ["causal", *PATTERNS],
    "bound": [*[False] * 7, True],
    "padding": ["", "", "and", "times", "gather"],
    "infinite": [False, True],
    "anonymous": [False, False, True],
}
FIELDS: Choices = {
    "dtype": ["float32", "float32", "float16"],
    "symbolic": [True, False],
    "opset": [17, 9, 10, 11, 13, 14, 17, 18, 18, 21, 23, 26],
    "layout": ["BNSD", "BSND", "BSH", "SBH", "BNSD", "BSND", "BSH", "SBH", "BSD", "SD"],
    "packed": [*["none"] * 8, "split", "slice", "gather", "gather_first"],
    "cache": [False, False, True],
    "target": ["computed", "inferred", "constant"],
    "product": ["matmul", "matmul", "folded", "einsum", "fused", "gemm"],
    "key": ["0132", "0231", "rank3"],
    "transposed": [False, False, True],
    "gqa": ["none", *REPEATS],
    "gqa_values": [*[""] * 5, *EXPLICIT],
    "scale": SCALES,
    "factor": [0.5, 1 / math.sqrt(8), 2.5],
    "guard": ["none", "none", "nan", "cast_nan", "bias", "scores", "selection", "product"],
    "softmax": ["op", *SOFTMAXES],
    "sink": [*[False] * 7, True],
    "upcast": [False, False, False, False, False, True],
    "floor": [False, False, True],
    "dropout": [False, True],
    "identity": [False, True],
    "values": ["matmul", "einsum", "flipped"],
    "output": ["BNSD", "BSND", "BSH", "SBH"],
}
MASK_COUNTS = [0, 1, 1, 2]


def _chosen(choices: Choices) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({name: st.sampled_from(each) for name, each in choices.items()})


def even(seed: int) -> Spelling:
    rng = random.Random(seed)

    def draw(choices: Choices) -> dict[str, Any]:
        return {name: rng.choice(each) for name, each in choices.items()}

    masks = tuple(Mask(**draw(MASK)) for _ in range(rng.choice(MASK_COUNTS)))
    return consistent(Spelling(sizes=draw(SIZES), masks=masks, **draw(FIELDS)))


_MASKS = st.sampled_from(MASK_COUNTS).flatmap(lambda count: st.tuples(*[_chosen(MASK)] * count))
_STEPWISE = st.tuples(_chosen(SIZES), _MASKS, _chosen(FIELDS)).map(
    lambda drawn: consistent(Spelling(sizes=drawn[0], masks=tuple(Mask(**each) for each in drawn[1]), **drawn[2]))
)

SPELLINGS: st.SearchStrategy[Spelling] = st.one_of(st.integers(0, (1 << 32) - 1).map(even), _STEPWISE)


def training(rows: Sequence[int], keys: Sequence[int], **more: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Random fields of a Training (tape.py): S of `rows`, T of `keys`, and what else there is to choose."""
    lengths: Choices = {"B": [1, 2, 3], "N": [1, 2, 4, 6], "K": [1, 2, 3], "S": rows, "T": keys}
    widths: Choices = {"D": [4, 8], "E": [4, 8, 3]}
    forms = ["t - p*sum(t)", "p*(g - sum)", "(g - sum)*p", "negated", "einsum", "result", "quotient", "power"]
    choices: Choices = {
        "symbolic": [False, True],
        "layout": ["BNSD", "BSND", "BSH"],
        "product": ["matmul", "folded", "einsum", "fused"],
        "flipped": [False, True],
        "scale": ["none", "mul", "div", "query", "both"],
        "fill": [-math.inf, FLOAT32_MIN],
        "masked_gradient": [False, True],
        "softmax": ["op", "decomposed"],
        "form": forms,
        "gqa": ["none", "none", "expand", "broadcast"],
        "wanted": ["qkv", "qkv", "q", "k", "v", "qv", "kv", "qk"],
    }
    sizes = st.fixed_dictionaries({name: st.sampled_from(list(each)) for name, each in {**lengths, **widths}.items()})
    fields = {name: st.sampled_from(list(each)) for name, each in choices.items()}
    return st.fixed_dictionaries({"sizes": sizes, **fields, **more})
