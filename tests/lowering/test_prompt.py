"""PromptFlashAttention and FusedInferAttentionScore on each kernel variant against the float64 reference, and what they
refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fa_compiler import ops, reference
from fa_compiler.reference import ReferenceInputError
from tests.prompt_problems import FIA, PFA, Form, Problem, drawn

# Rounding of the result to its own type, and of float32 sums of a few hundred terms.
TOLERANCES = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 2e-2}


def check(form: Form) -> None:
    """The kernel gives the reference's types, shapes and numbers, or both refuse the same input or attribute."""
    problem = Problem(form)
    outputs = ["attention_out"] + (["softmax_lse"] if form.op == FIA else [])
    try:
        expected = reference.run(form.op, problem.inputs, problem.attrs, outputs)
    except ReferenceInputError as error:
        with pytest.raises(ops.KernelError, match=error.name):
            ops.run(form.op, problem.inputs, problem.attrs, outputs)
        return
    found = ops.run(form.op, problem.inputs, problem.attrs, outputs)
    for name, want in expected.items():
        assert (found[name].dtype, found[name].shape) == (want.dtype, want.shape), name
        got, wanted = found[name].astype(np.float64), want.astype(np.float64)
        with np.errstate(invalid="ignore"):
            error = np.where((got == wanted) | (np.isnan(got) & np.isnan(wanted)), 0.0, np.abs(got - wanted))
        tolerance = TOLERANCES.get(form.dtype if name == "softmax_lse" else want.dtype.name, 0.0)
        allowed = np.ones_like(wanted) if want.dtype == np.int8 else tolerance * (1 + np.abs(wanted))
        if problem.chain is not None and name == "attention_out":
            # A probability between two integers may be rounded either way, which moves a row by a value; few are.
            largest = 128 * problem.chain[2] * (1 if problem.quant is None else problem.quant[0].max())
            assert np.count_nonzero((error > allowed).any(axis=-1)) <= 1 + 0.02 * (error.size // error.shape[-1])
            allowed = largest * (1 + tolerance) + allowed
        elif want.dtype == np.int8:
            # A result between two integers may be rounded either way; few are.
            assert np.count_nonzero(error) <= 1 + 0.02 * got.size
        assert (np.isfinite(error) & (error <= allowed)).all(), (name, float(error.max()))


LONG = {"rows": (40, 33), "keys": (70, 129), "s1": 40, "s2": 130}
FORMS = {
    "one row hears no mode": Form(rows=(1, 1), s1=1, mask="row", mask_rank=2, mode=3),
    "a long prompt": Form(op=PFA, **LONG, mask="constant", mode=3, layout="BNSD_BSND"),
    "a long packed prompt": Form(**LONG, layout="TND_NTD", mask="constant", mode=4, pre=20, next=3, lse=True),
    "half types": Form(**LONG, layout="BSH_NBSD", dtype="float16", mask="full", bias="full", lse=True, sink=True),
    "pages in units": Form(storage="pages5", d=32, dv=64, keys=(7, 40), rope=16, dtype="bfloat16", lengths=True),
    "pages of int8": Form(
        storage="pages4", keys=(70, 129), antiquant="channel", dtype="float16", block=32, lengths=True
    ),
    "a list": Form(storage="list", keys=(3, 9), s2=9, lengths=True, lse=True, layout="BSH"),
    "a list of int8": Form(storage="list", keys=(3, 9), s2=9, lengths=True, antiquant="head"),
    "a prefix": Form(prefix=3, prefix_room=5, mask="full", mask_rank=4, antiquant="tensor", joined=True, lse=True),
    "padding on the left": Form(s1=9, s2=12, query_behind=2, key_behind=1, lengths=True, mask="full", bias="full"),
    "scales of no keys": Form(antiquant="token", joined=True, storage="list", keys=(0, 0), s2=0, lengths=True),
    "scales by token": Form(antiquant="token", key_behind=2, s2=12, lengths=True),
    "int8 throughout": Form(op=PFA, **LONG, integers=True, quant="channel", offset=True, mask="constant", mode=2),
    "int8 queries": Form(**LONG, integers=True, mask="full", bias="full", empty=True, layout="BNSD_BSND"),
    "int8 pages": Form(storage="pages3", keys=(70, 40), block=32, integers=True, quant="tensor", lengths=True),
}


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_form(form: Form) -> None:
    check(form)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("op", [PFA, FIA])
def test_forms_at_random(op: str, isa: str) -> None:
    for seed in range(10):
        start = 1000 * len(isa) + 10 * seed  # others for each variant
        check(drawn(start, op, ("float32", "float16", "bfloat16")[seed % 3], most=40))


def run(form: Form, attrs: dict[str, Any] | None = None, **inputs: Any) -> dict[str, np.ndarray]:
    problem = Problem(form)
    return ops.run(form.op, {**problem.inputs, **inputs}, {**problem.attrs, **(attrs or {})})


REFUSED: dict[str, tuple[Form, dict[str, Any], dict[str, Any], str]] = {
    "unknown layout": (Form(op=PFA), {"input_layout": "TND"}, {}, r"input_layout.*TND.*\(PFA.2\)"),
    "heads": (Form(), {"num_key_value_heads": 3}, {}, r"num_key_value_heads is 3.*\(FIA.3\)"),
    "mode": (Form(mask="full"), {"sparse_mode": 5}, {}, r"sparse_mode is 5, expected 0 to 4 \(FIA.5\)"),
    "not the constant": (
        Form(mask="constant", mode=3),
        {},
        {"atten_mask": np.zeros((2048, 2048), np.bool_)},
        r"atten_mask of sparse_mode 3 differs in row 0.*\(FIA.5\)",
    ),
    "one row and the constant mask": (
        Form(rows=(1, 1), s1=1, mask="constant", mode=3),
        {},
        {},
        r"atten_mask has the shape \[2048,2048\].*every sparse_mode takes a mask of keys \(FIA.5\)",
    ),
    "scales of the query": (
        Form(),
        {"query_quant_mode": 3},
        {"dequant_scale_query": np.ones(1, np.float32)},
        "dequant_scale_query .* not",
    ),
    "4 bits": (
        Form(),
        {},
        {name: np.ones((2, 2, 7, 2), np.int32) for name in ("key", "value")},
        r"key.*\(FIA.\d\)",
    ),
    "int8 keys of a prompt": (
        Form(op=PFA),
        {},
        {name: np.ones((2, 2, 7, 16), np.int8) for name in ("key", "value")},
        r"key.*\(PFA.1\)",
    ),
    "a page that is not there": (
        Form(storage="pages3", lengths=True),
        {},
        {"block_table": np.array([[99], [0]], np.int32)},
        r"block_table names block 99 for batch entry 0, expected 0 to 2 \(FIA.9\)",
    ),
    "a page size beyond all": (Form(storage="pages3", lengths=True), {"block_size": 2**61}, {}, r"block_size.*FIA.9"),
    "a length beyond the room": (
        Form(),
        {},
        {"actual_seq_lengths_kv": np.array([7, 8])},
        r"actual_seq_lengths_kv.*8, expected 0 to 7",
    ),
    "lengths that fall": (
        Form(layout="TND"),
        {},
        {"actual_seq_lengths": np.array([5, 3])},
        r"actual_seq_lengths is \[5,3\], expected cumulative lengths",
    ),
    "padding beyond the rows": (
        Form(s1=9, query_behind=2, lengths=True),
        {},
        {"query_padding_size": np.array([2**62])},
        r"query_padding_size is 4611686018427387904 beside 5 rows",
    ),
    "rows without a key": (
        Form(op=PFA, quant="tensor", mask="full", next=-1),
        {},
        {},
        r"sparse_mode 0 leaves rows .*without a key.*\(PFA.4\)",
    ),
    "antiquantisation of pages": (
        Form(antiquant="tensor"),
        {"key_antiquant_mode": 4, "value_antiquant_mode": 4},
        {},
        r"antiquantisation of mode 4 is not computed \(FIA.16\)",
    ),
    "int8 results of lists": (
        Form(storage="list", keys=(7, 7), lengths=True),
        {},
        {"quant_scale2": np.ones(1, np.float32)},
        "input quant_scale2 is given beside a list of 2 keys, expected one key and one value",
    ),
}


@pytest.mark.parametrize(("form", "attrs", "inputs", "text"), REFUSED.values(), ids=REFUSED)
def test_refused(form: Form, attrs: dict[str, Any], inputs: dict[str, Any], text: str) -> None:
    with pytest.raises(ops.KernelError, match=text):
        run(form, attrs, **inputs)


def test_padding_beyond_the_keys_leaves_none() -> None:
    form = Form(s2=12, key_behind=1, lengths=True)
    out = run(form, kv_padding_size=np.array([2**62]))["attention_out"]
    assert not out.any()


@pytest.mark.parametrize("shape", [(0, 4, 5, 16), (2, 4, 0, 16)])
def test_nothing_to_compute(shape: tuple[int, ...]) -> None:
    form = Form(rows=(shape[2],) * shape[0], keys=(7,) * shape[0], s1=shape[2], lse=True)
    found = run(form)
    assert found["attention_out"].shape == shape
    assert found["softmax_lse"].shape == (*shape[:3], 1)


def test_padding_mask_of_the_first_variant_is_ignored() -> None:
    """In its place newer variants have the bias."""
    problem = Problem(Form(op=PFA))
    expected = ops.run(PFA, problem.inputs, problem.attrs)["attention_out"]
    given = problem.inputs | {"padding_mask": np.ones((2, 4, 5, 7), np.float32)}
    for compute in (ops.run, reference.run):
        found = compute(PFA, given, problem.attrs, cann="first_public")["attention_out"]
        np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("layout", ["BSH", "BNSD"])
def test_heads_of_no_size(layout: str) -> None:
    shape = (2, 5, 0) if layout == "BSH" else (2, 4, 5, 0)
    inputs = dict.fromkeys(("query", "key", "value"), np.zeros(shape, np.float32))
    attrs = {"num_heads": 4, "input_layout": layout, "softmax_lse_flag": True}
    for compute in (ops.run, reference.run):
        found = compute(FIA, inputs, attrs)
        assert found["attention_out"].shape == shape
        assert np.isposinf(found["softmax_lse"]).all()


def test_no_keys() -> None:
    found = run(Form(keys=(0, 0), s2=0, lse=True))
    assert not found["attention_out"].any()
    assert np.isposinf(found["softmax_lse"]).all()


def test_unused_memory_is_not_read() -> None:
    """What lies behind the keys, in other pages and in masked values may be anything."""
    form = Form(storage="pages3", keys=(7, 3), lengths=True, mask="full", mode=1)
    problem = Problem(form)
    expected = ops.run(FIA, problem.inputs, problem.attrs)["attention_out"]
    used = np.zeros(problem.inputs["key"].shape[:2], np.bool_)
    for b, count in enumerate(form.keys):
        used[problem.inputs["block_table"][b, 0], :count] = True
    spoilt = {name: np.where(used[..., None], problem.inputs[name], np.nan) for name in ("key", "value")}
    np.testing.assert_array_equal(ops.run(FIA, problem.inputs | spoilt, problem.attrs)["attention_out"], expected)
