"""Keys and values with room for more (EXT-KEY-LENGTH): what lies behind the last key is not read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fa_compiler import ops
from fa_compiler.op_registry.geometry import SEQUENCE_AXIS

from .problems import DTYPES, OP, OUTPUTS, TRIANGLE, Form, Inputs, check, mask
from .variants import thinned

pytestmark = pytest.mark.usefixtures("isa")

KEYS = 45
ROOMS = {"key": 70, "value": 61, "key_rope": 50}


def roomy(inputs: Inputs, layout: str, length: int = KEYS) -> Inputs:
    """The inputs with rows of NaN behind the keys, and their number."""
    axis = SEQUENCE_AXIS[layout]
    changed = {"actual_seq_kvlen": np.array([length], np.int64)}
    for name in ROOMS.keys() & inputs.keys():
        array = inputs[name]
        missing = [ROOMS[name] - size if own == axis else size for own, size in enumerate(array.shape)]
        changed[name] = np.concatenate([array, np.full(missing, np.nan, array.dtype)], axis)
    return inputs | changed


def extras(name: str, form: Form, rng: np.random.Generator) -> tuple[Inputs, dict[str, Any]]:
    """Inputs and attributes beside query, key and value; masks and biases are as wide as there are keys."""
    batch, heads, rows = form.batch, form.heads, form.queries
    match name:
        case "mask with empty rows":
            array = mask(rng, (batch, 1, rows, KEYS))
            array[0, :, 0] = True
            return {"atten_mask": array}, {"cpu_empty_rows": "mean"}
        case "causal from the last key":
            return {"atten_mask": TRIANGLE}, {"sparse_mode": 3}
        case "window":
            return {"atten_mask": TRIANGLE}, {"sparse_mode": 4, "pre_tockens": 7, "next_tockens": 0}
        case "bias":
            return {"real_shift": rng.standard_normal((1, heads, 1, KEYS), np.float32)}, {"pse_type": 0}
        case "score of masked keys":
            return {"atten_mask": mask(rng, (batch, 1, 1, KEYS))}, {"cpu_mask_value": -1.0}
        case "dropout":
            bits = rng.integers(0, 256, -(-batch * heads * rows * KEYS // 8), np.uint8)
            return {"drop_mask": bits}, {"keep_prob": 0.5}
    return {}, {}


EXTRAS = [
    "nothing",
    "mask with empty rows",
    "causal from the last key",
    "window",
    "bias",
    "score of masked keys",
    "dropout",
]


@thinned(layout=list(SEQUENCE_AXIS), dtype=list(DTYPES), queries=[1, 3, 33], extra=EXTRAS)
def test_rows_behind_the_keys_are_not_read(layout: str, dtype: str, queries: int, extra: str) -> None:
    """Bit for bit what the same keys give without room."""
    rng = np.random.default_rng(queries)
    form = Form(layout, dtype, heads=4, kv_heads=2, queries=queries, keys=KEYS)
    more, attrs = extras(extra, form, rng)
    inputs, attrs = form.inputs(rng) | more, form.all_attrs | attrs
    want = ops.run(OP, inputs, attrs, OUTPUTS)
    assert not np.isnan(want["attention_out"].astype(np.float32)).any()
    got = ops.run(OP, roomy(inputs, layout), attrs, OUTPUTS)
    for name in OUTPUTS:
        np.testing.assert_array_equal(got[name], want[name], name)


@pytest.mark.parametrize("layout", SEQUENCE_AXIS)
def test_the_reference_knows_it(layout: str) -> None:
    rng = np.random.default_rng(5)
    form = Form(layout, heads=4, kv_heads=2, queries=3, keys=KEYS, value_size=8)
    more = {"query_rope": Form(layout, heads=4, queries=3, size=4).inputs(rng)["query"]}
    more |= {"key_rope": Form(layout, heads=2, kv_heads=2, keys=KEYS, size=4).inputs(rng)["key"]}
    got = check(roomy(form.inputs(rng) | more, layout), form.all_attrs)
    assert not np.isnan(got["attention_out"]).any()


def test_no_keys() -> None:
    form = Form(queries=3, keys=0)
    got = check(roomy(form.inputs(np.random.default_rng(5)), "BNSD", 0), form.all_attrs)
    assert not got["attention_out"].any()
