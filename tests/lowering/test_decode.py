"""IncreFlashAttention on each kernel variant against the float64 reference, and what it refuses.

Lengths lie around vectors (4, 8, 16), pages and the steps the kernel takes (16 to 512 tokens, 4096 with few query
heads); groups around the 8 query heads it takes at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper

from fa_compiler import ops, reference
from fa_compiler.lowering.ort import register_custom_ops
from tests.examples import examples

from .decoding import DTYPES, OP, Form, Inputs, check
from .refusals import refused
from .variants import AVAILABLE

LENGTHS = st.one_of(st.integers(0, 40), st.sampled_from([63, 64, 65, 127, 128, 129, 250, 257, 515]))
SIZES = st.one_of(st.integers(1, 20), st.sampled_from([31, 32, 33, 64, 80, 128]))


@pytest.fixture(params=AVAILABLE)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the variants that have a kernel of their own for decoding alone."""
    monkeypatch.setenv("FA_COMPILER_ISA", request.param)


@dataclass(repr=False)
class Problem:
    inputs: Inputs
    attrs: dict[str, Any]

    def __repr__(self) -> str:
        shown = {
            name: [x.shape for x in a] if isinstance(a, list) else f"{a.dtype}{list(a.shape)}"
            for name, a in self.inputs.items()
        }
        return f"{shown} {self.attrs}"


def _quantise(draw: st.DrawFn, rng: np.random.Generator, form: Form, inputs: Inputs) -> None:
    """Scales a head and number of INT8 caches, offsets, and INT8 results."""
    n1, n2, d = form.heads, form.key_heads, form.size
    if form.int8_cache:
        shape = draw(st.sampled_from([(2,), (2, n2, 1, d), (2, n2, d), (2, n2 * d)]))
        inputs["antiquant_scale"] = rng.uniform(0.01, 0.03, shape).astype(DTYPES[form.dtype])
        if draw(st.booleans()):
            inputs["antiquant_offset"] = rng.normal(size=shape).astype(DTYPES[form.dtype])
    # With lists ONNX Runtime cannot tell the type of the result: refused, see below.
    if form.storage != "list" and draw(st.integers(0, 3)) == 0:
        shape = draw(st.sampled_from([(1,), (1, n1, 1, d), (1, 1, n1, d), (n1 * d,)]))
        inputs["quant_scale2"] = rng.uniform(10, 100, shape).astype(np.float32)
        if draw(st.booleans()):
            inputs["quant_offset2"] = rng.normal(size=shape).astype(np.float32)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    layout = draw(st.sampled_from(["BSH", "BSND", "BNSD"]))
    storage = draw(st.sampled_from(["plain", "plain", "list", "pages", *(["pages_by_head"] * (layout == "BNSD"))]))
    batch = draw(st.integers(2, 3)) if storage == "list" else draw(st.integers(1, 3))
    key_heads = draw(st.integers(1, 3))
    int8_cache = draw(st.booleans())
    form = Form(
        layout,
        draw(st.sampled_from(list(DTYPES))),
        batch,
        key_heads * draw(st.sampled_from([1, 2, 4, 7, 8, 9, 17])),
        key_heads,
        draw(LENGTHS.filter(bool)),
        draw(SIZES),
        storage,
        draw(st.sampled_from([32, 96, 128] if int8_cache else [16, 48, 128])),
        int8_cache,
        tuple(draw(st.lists(LENGTHS, min_size=batch, max_size=batch))),
        {
            "scale_value": draw(st.sampled_from([0.125, 0.4, -0.2, 0.0])),
            "cpu_softcap": draw(st.sampled_from([0.0, 0.0, 0.1, 2.0, 50.0])),
        },
    )
    inputs = form.inputs(rng)
    columns = max(form.room)
    if storage.startswith("pages") or draw(st.booleans()):
        lengths = [draw(st.integers(0, room)) for room in form.room]
        inputs["actual_seq_lengths"] = np.array(lengths, np.int64)
        if storage == "plain" and draw(st.booleans()):
            inputs["kv_padding_size"] = np.array([draw(st.integers(-1, 5))], np.int64)
        if storage.startswith("pages"):
            for row, length in zip(inputs["block_table"], lengths, strict=True):
                row[-(-length // form.block_size) :] = draw(st.sampled_from([-1, 2**31 - 1]))
    if draw(st.booleans()):
        mask = rng.random((batch, *(1,) * draw(st.integers(0, 2)), columns + draw(st.integers(0, 3))))
        mask = mask < draw(st.sampled_from([0.1, 0.9]))
        mask[rng.integers(batch)] |= draw(st.booleans())
        inputs["atten_mask"] = mask.astype(draw(st.sampled_from([np.bool_, np.int8, np.uint8])))
    if draw(st.booleans()):
        shape = (draw(st.sampled_from([1, batch])), form.heads, 1, columns + draw(st.integers(0, 3)))
        inputs["pse_shift"] = rng.normal(size=shape).astype(DTYPES[form.dtype])
    _quantise(draw, rng, form, inputs)
    return Problem(inputs, form.all_attrs)


# The fixture only sets an environment variable, which holds for all examples of a test.
@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(problem=problems())
@pytest.mark.usefixtures("isa")
def test_random_problems(problem: Problem) -> None:
    check(problem.inputs, problem.attrs)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(("heads", "length"), [(64, 1100), (4, 4300)])
def test_several_steps_of_one_head(heads: int, length: int) -> None:
    """Steps of 512 tokens where 64 query heads have scores to keep, of 4096 where 4 have."""
    form = Form(heads=heads, key_heads=1, length=length, size=8, batch=1)
    check(form.inputs(np.random.default_rng(4)), form.all_attrs)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(("group", "size"), [(2, 64), (3, 128), (4, 64), (9, 128)])
@pytest.mark.parametrize(("layout", "storage"), [("BNSD", "plain"), ("BSND", "plain"), ("BNSD", "pages_by_head")])
def test_an_int8_cache_in_whole_vectors(group: int, size: int, layout: str, storage: str) -> None:
    """Some variants multiply bytes: in steps of 128 tokens, for four query rows at a time."""
    form = Form(layout, heads=2 * group, length=3 * 128 + 37, size=size, storage=storage, int8_cache=True)
    rng = np.random.default_rng(group)
    inputs = form.inputs(rng)
    inputs["actual_seq_lengths"] = np.array([form.length, 130], np.int64)
    check(inputs, form.all_attrs)
    inputs["atten_mask"] = rng.random((2, max(form.room))) < np.array([[0.5], [1.0]])
    inputs["pse_shift"] = rng.normal(scale=30, size=(2, form.heads, 1, max(form.room))).astype(np.float32)
    inputs["antiquant_offset"] = rng.normal(size=2).astype(np.float32)
    check(inputs, form.all_attrs | {"cpu_softcap": 2.0})


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("storage", ["plain", "pages_by_head"])
def test_many_short_int8_caches(storage: str) -> None:
    """More than 24 tasks: a thread prefetches the first keys of its next one, if its entry is long enough for bytes."""
    form = Form(heads=8, batch=30, length=300, size=64, storage=storage, int8_cache=True)
    inputs = form.inputs(np.random.default_rng(7))
    inputs["actual_seq_lengths"] = np.array([300, 128, 5, 0, 129, 256] * 5, np.int64)
    check(inputs, form.all_attrs)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("storage", ["pages", "pages_by_head"])
def test_short_pages(dtype: str, storage: str) -> None:
    """While a head's rows in a page are read, those of another head or page are prefetched, but none past the table."""
    layout = "BNSD" if storage == "pages_by_head" else "BSH"
    form = Form(layout, dtype, heads=12, key_heads=3, length=150, size=128, storage=storage, block_size=16)
    inputs = form.inputs(np.random.default_rng(8))
    inputs["actual_seq_lengths"] = np.array([150, 37], np.int64)
    inputs["block_table"][1, 3:] = -1
    check(inputs, form.all_attrs)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("number", [np.nan, np.inf, 1e25, 1e-40, 0.0])
def test_queries_without_digits_beside_an_int8_cache(number: float) -> None:
    """Numbers that are not finite, or that no fixed-point number holds."""
    form = Form(heads=4, key_heads=1, length=200, size=64, int8_cache=True)
    inputs = form.inputs(np.random.default_rng(5))
    inputs["query"][0, 1] *= 0 if np.abs(number) < 1 else 1
    inputs["query"][0, 1, 0, 7] = number
    inputs["query"][1] *= np.float32(1e-30)
    check(inputs, form.all_attrs)


@pytest.mark.usefixtures("isa")
def test_weights_far_below_the_largest_one_beside_an_int8_cache() -> None:
    """One token has most of the weight, and many have a small one: their values must not be lost."""
    form = Form(heads=4, key_heads=1, batch=1, length=4096, size=64, int8_cache=True)
    inputs = form.inputs(np.random.default_rng(6))
    inputs["value"][:] = 100
    inputs["value"][:, :, 0] = 0
    inputs["query"][:] *= 0
    inputs["pse_shift"] = np.full((1, 4, 1, 4096), -18.0, np.float32)
    inputs["pse_shift"][..., 0] = 0
    check(inputs, form.all_attrs)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("storage", ["plain", "pages_by_head"])
def test_an_int8_query(storage: str) -> None:
    rng = np.random.default_rng(0)
    form = Form(length=300, size=20, storage=storage, int8_cache=True)
    inputs = form.inputs(rng)
    del inputs["antiquant_scale"]
    inputs["query"] = rng.integers(-128, 128, inputs["query"].shape, dtype=np.int8)
    inputs |= {
        "dequant_scale1": np.array([int(np.float32(2e-4).view(np.uint32)) | 7 << 40], np.uint64),
        "quant_scale1": np.array([127.0], np.float32),
        "dequant_scale2": np.array([1e-2], np.float32),
        "pse_shift": rng.normal(size=(1, form.heads, 1, max(form.room))).astype(np.float16),
        "atten_mask": rng.random((form.batch, max(form.room))) < 0.3,
    }
    assert check(inputs, form.all_attrs).dtype == np.float16
    inputs["quant_scale2"] = np.array([20.0], np.float32)
    assert check(inputs, form.all_attrs | {"cpu_softcap": 1.5}).dtype == np.int8


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_masked_and_unused_memory_is_not_read(dtype: str) -> None:
    """NaN at masked keys, beyond the lengths and in blocks no entry uses."""
    form = Form(dtype=dtype, storage="pages_by_head", length=90, block_size=16, heads=10, key_heads=1)
    inputs = form.inputs(np.random.default_rng(1))
    inputs["actual_seq_lengths"] = np.array([90, 21], np.int64)
    mask = np.zeros((2, 96), np.bool_)
    mask[0, 3:40] = True
    inputs["atten_mask"] = mask
    table = inputs["block_table"]
    table[1, 2:] = -7
    used = np.zeros((len(inputs["key"]), 16), np.bool_)
    for entry, length in ((0, 90), (1, 21)):
        for token in range(length):
            used[table[entry, token // 16], token % 16] = not mask[entry, token]
    for name in ("key", "value"):
        inputs[name][~np.broadcast_to(used[:, None, :, None], inputs[name].shape)] = np.nan
    assert np.isfinite(check(inputs, form.all_attrs).astype(np.float64)).all()


@pytest.mark.usefixtures("isa")
def test_scores_below_those_of_masked_keys() -> None:
    """A masked key has a score of -1e12: beside lower ones it is all that counts."""
    form = Form(length=20)
    inputs = form.inputs(np.random.default_rng(2))
    inputs["atten_mask"] = np.arange(20)[None] < np.array([[4], [0]])
    inputs["pse_shift"] = np.full((2, 4, 1, 20), -1e30, np.float32)
    got = check(inputs, form.all_attrs)
    np.testing.assert_allclose(got[0, 1, 0], inputs["value"][0, 0, :4].mean(axis=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("storage", ["plain", "list", "pages_by_head"])
@pytest.mark.parametrize("layout", ["BNSD", "BSND"])
@pytest.mark.parametrize("int8_cache", [False, True])
def test_the_same_bits_for_any_number_of_threads(storage: str, layout: str, int8_cache: bool) -> None:
    if layout == "BSND" and storage == "pages_by_head":
        storage = "pages"
    dtype = "float32" if int8_cache else "float16"
    form = Form(layout, dtype, 2, length=5000, size=64, storage=storage, block_size=128, int8_cache=int8_cache,
                lists=(5000, 1700))  # fmt: skip
    inputs = form.inputs(np.random.default_rng(3))
    results = []
    for threads in (1, 2, 5):
        session, feeds = _session(form, inputs, threads)
        results.append(session.run(None, feeds)[0])
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])
    check(inputs, form.all_attrs)


def _session(form: Form, inputs: Inputs, threads: int) -> tuple[ort.InferenceSession, dict[str, np.ndarray]]:
    """A session of one node, and its feeds; lists are laid out as the node form has them."""
    from fa_compiler.op_registry import count_attrs, get, place_inputs

    spec = get(OP)
    feeds, names = {}, []
    for i, array in enumerate(place_inputs(spec, inputs)):
        names.append("" if array is None else f"x{i}")
        if array is not None:
            feeds[f"x{i}"] = array
    attrs = {**form.all_attrs, **count_attrs(spec, inputs)}
    node = helper.make_node(OP, names, ["out"], domain="ascend", **attrs)
    infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(a.dtype), None) for name, a in feeds.items()
    ]
    out = helper.make_tensor_value_info("out", helper.np_dtype_to_tensor_dtype(inputs["query"].dtype), None)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ascend", 1)]
    model: onnx.ModelProto = helper.make_model(
        helper.make_graph([node], "g", infos, [out]), ir_version=8, opset_imports=opsets
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    register_custom_ops(options)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"]), feeds


FORM = Form()
ONE = np.ones(1, np.float32)


def _paged(**changes: Any) -> tuple[Inputs, dict[str, Any]]:
    form = Form(storage="pages_by_head")
    return form.inputs(np.random.default_rng(0)) | changes, form.all_attrs


def _int8(**changes: Any) -> Inputs:
    return Form(int8_cache=True).inputs(np.random.default_rng(0)) | changes


F16, F32 = np.float16, np.float32
REFUSED: list[tuple[int, Inputs, dict[str, Any]]] = [
    (1, {"key": np.ones((2, 2, 40, 16), F16), "value": np.ones((2, 2, 40, 16), F16)}, {}),
    (1, {"value": np.ones((2, 2, 40, 16), np.int8)}, {}),
    (2, {}, {"input_layout": "SBH"}),
    (2, {"query": np.ones((2, 4, 2, 16), F32)}, {}),
    (2, {"key": np.ones((2, 40, 32), F32), "value": np.ones((2, 40, 32), F32)}, {}),
    (3, {}, {"num_heads": 0}),
    (3, {}, {"num_heads": 8}),
    (3, {}, {"num_key_value_heads": 3}),
    (3, {"query": np.ones((2, 65, 1, 16), F32)}, {"num_heads": 65, "num_key_value_heads": 1}),
    (4, {"query": np.ones((1, 1, 1, 520), F32)}, {"num_heads": 1, "num_key_value_heads": 1}),
    (5, {"value": np.ones((2, 2, 39, 16), F32)}, {}),
    (5, {"key": np.ones((3, 2, 40, 16), F32), "value": np.ones((3, 2, 40, 16), F32)}, {}),
    (5, {"key": np.ones((2, 2, 40, 8), F32), "value": np.ones((2, 2, 40, 8), F32)}, {}),
    (5, {"key": [np.ones((1, 2, 40, 16), F32)] * 3, "value": [np.ones((1, 2, 40, 16), F32)] * 3}, {}),
    (5, {"key": [np.ones((1, 2, 40, 16), F32)] * 2}, {}),
    (6, {"atten_mask": np.zeros((2, 40), F32)}, {}),
    (6, {"atten_mask": np.zeros((2, 39), np.bool_)}, {}),
    (6, {"atten_mask": np.zeros((1, 40), np.bool_)}, {}),
    (7, {"pse_shift": np.zeros((1, 4, 1, 40), F16)}, {}),
    (7, {"pse_shift": np.zeros((1, 1, 1, 40), F32)}, {}),
    (8, {"actual_seq_lengths": np.array([41], np.int64)}, {}),
    (8, {"actual_seq_lengths": np.array([-1, 3], np.int64)}, {}),
    (8, {"actual_seq_lengths": np.array([1, 2, 3], np.int64)}, {}),
    (8, {"actual_seq_lengths": np.array([4], np.int32)}, {}),
    (9, *_paged(actual_seq_lengths=None)),
    (9, *_paged(block_table=np.array([[0, 99], [1, 2]], np.int32))),
    (9, *_paged(block_table=np.zeros((3, 2), np.int32))),
    (9, *_paged(kv_padding_size=np.zeros(1, np.int64))),
    (9, _paged()[0], {"block_size": 24}),
    (9, _paged()[0], {"block_size": 64}),
    (10, {"kv_padding_size": np.zeros(1, np.int64)}, {}),
    (10, {"kv_padding_size": np.zeros(2, np.int64), "actual_seq_lengths": np.array([3], np.int64)}, {}),
    (11, _int8(antiquant_scale=None), {}),
    (11, _int8(antiquant_scale=np.ones(2, F16)), {}),
    (11, _int8(antiquant_scale=np.ones((2, 4, 16), F32)), {}),
    (11, _int8(antiquant_offset=np.ones((2, 2, 16), F32)), {}),
    (11, {"antiquant_scale": np.ones(2, F32)}, {}),
    (12, {"quant_offset2": ONE}, {}),
    (12, {"quant_scale2": np.ones((2, 16), F32)}, {}),
    (12, {"quant_scale2": ONE, "quant_offset2": np.ones((4, 16), F32)}, {}),
    (12, {"dequant_scale1": ONE}, {}),
    (14, {}, {"inner_precise": 2}),
    (15, {}, {"cpu_softcap": 1e7}),
]


@pytest.mark.parametrize(("constraint", "changes", "attrs"), REFUSED)
def test_each_limit_is_refused_by_its_number(constraint: int, changes: Inputs, attrs: dict[str, Any]) -> None:
    given = FORM.inputs(np.random.default_rng(0)) | changes
    said, text = refused(OP, given, FORM.all_attrs | attrs)
    assert said.endswith((f"(IFA.{constraint})", "(G0)")), said
    assert text.startswith(f"node '{OP}' ({OP}): "), text
    assert text.endswith(f"(IFA.{constraint})"), text


def test_the_type_of_results_beside_lists() -> None:
    """INT8 results need quant_scale2 in its place, which lists move: the limit is told, not overrun."""
    form = Form(storage="list", lists=(5, 7))
    inputs = form.inputs(np.random.default_rng(4)) | {"quant_scale2": ONE}
    with pytest.raises(ops.KernelError, match="input quant_scale2 is given beside a list of 2 keys"):
        ops.run(OP, inputs, form.all_attrs)


def test_long_lists() -> None:
    lengths = tuple(range(32))
    form = Form(batch=32, storage="list", lists=lengths, int8_cache=True, dtype="float16")
    inputs = form.inputs(np.random.default_rng(5))
    inputs["actual_seq_lengths"] = np.array(lengths, np.int64)
    check(inputs, form.all_attrs)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize(("layout", "order"), [("SBH", ""), ("TND", ""), ("TND", "TND")])
def test_ring_updates(dtype: str, layout: str, order: str) -> None:
    rng = np.random.default_rng(6)
    out = (9, 2, 64) if layout == "TND" else (5, 3, 2 * 16)
    rows = (9, 2, 8) if layout == "TND" else (3, 2, 5, 8)
    inputs: Inputs = {}
    for part in ("prev", "cur"):
        inputs[f"{part}_attn_out"] = rng.normal(size=out).astype(DTYPES[dtype])
        for kind in ("max", "sum"):
            numbers = rng.uniform(0.5, 3, rows[:-1])[..., None]
            inputs[f"{part}_softmax_{kind}"] = np.repeat(numbers, 8, axis=-1).astype(np.float32)
    if layout == "TND":
        inputs["actual_seq_qlen"] = np.array([0, 3, 3, 8], np.int64)
    attrs = {"input_layout": layout, "input_softmax_layout": order}
    got = ops.run("RingAttentionUpdate", inputs, attrs)
    want = reference.run("RingAttentionUpdate", inputs, attrs)
    tolerance = {"float32": 1e-6, "float16": 2**-10, "bfloat16": 2**-7}[dtype]
    for name, array in want.items():
        assert got[name].dtype == array.dtype
        allowed = tolerance if name == "attn_out" else 1e-6
        np.testing.assert_allclose(got[name].astype(np.float64), array.astype(np.float64), rtol=allowed, atol=1e-6)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("ranks", [1, 2, 3, 16])
def test_updates_of_ranks(dtype: str, ranks: int) -> None:
    rng = np.random.default_rng(7)
    lse, go = rng.normal(size=(ranks, 5)), rng.normal(size=(ranks, 5, 6))
    if ranks > 1:
        lse[1, 2], go[1, 2] = np.inf, np.nan  # a rank without keys for the row
    inputs = {"lse": [*lse.astype(np.float32)], "go": [*go.astype(DTYPES[dtype])]}
    for update_type in (0, 1):
        attrs = {"update_type": update_type, "sp": ranks}
        got = ops.run("AttentionUpdate", inputs, attrs)
        want = reference.run("AttentionUpdate", inputs, attrs)
        tolerance = {"float32": 1e-6, "float16": 2**-10, "bfloat16": 2**-7}[dtype]
        for name, array in want.items():
            assert got[name].dtype == array.dtype
            np.testing.assert_allclose(
                got[name].astype(np.float64), array.astype(np.float64), rtol=tolerance, atol=2e-6
            )


@pytest.mark.parametrize(
    ("op", "inputs", "attrs", "constraint"),
    [
        ("AttentionUpdate", {"lse": [ONE], "go": [ONE[None]]}, {"update_type": 2, "sp": 1}, "AU.3"),
        ("AttentionUpdate", {"lse": [ONE], "go": [ONE[None]]}, {"update_type": 1, "sp": 2}, "AU.2"),
        ("AttentionUpdate", {"lse": [ONE], "go": [np.ones((2, 1), F32)]}, {"update_type": 1, "sp": 1}, "AU.5"),
    ],
)
def test_merges_are_refused_by_number(op: str, inputs: Inputs, attrs: dict[str, Any], constraint: str) -> None:
    with pytest.raises(ops.KernelError) as error:
        ops.run(op, inputs, attrs)
    assert str(error.value).endswith(f"({constraint})")


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("layout", ["SBH", "TND"])
def test_rings_keep_what_is_not_a_number(layout: str, dtype: str) -> None:
    """A NaN among the statistics of either side is one of the result, also beside -inf and +inf."""
    rng = np.random.default_rng(3)
    specials = np.array([0.5, np.nan, np.inf, -np.inf], np.float32)
    pairs = [(a, b) for a in specials for b in specials]
    rows = len(pairs)
    shape = (rows, 1, 64) if layout == "TND" else (rows, 1, 8)
    statistic = (rows, 1, 8) if layout == "TND" else (1, 1, rows, 8)
    inputs: Inputs = {}
    for side, name in enumerate(("prev", "cur")):
        inputs[f"{name}_attn_out"] = rng.standard_normal(shape).astype(DTYPES[dtype])
        column = np.array([pair[side] for pair in pairs], np.float32)[:, None]
        inputs[f"{name}_softmax_max"] = np.broadcast_to(column, (rows, 8)).reshape(statistic).copy()
        inputs[f"{name}_softmax_sum"] = np.ones(statistic, np.float32)
    if layout == "TND":
        inputs["actual_seq_qlen"] = np.array([0, rows])
    attrs = {"input_layout": layout}
    got, want = (run("RingAttentionUpdate", inputs, attrs) for run in (ops.run, reference.run))
    for name, value in want.items():
        np.testing.assert_array_equal(np.isnan(got[name]), np.isnan(value), name)
        np.testing.assert_array_equal(np.isinf(got[name]), np.isinf(value), name)
    assert np.isnan(got["softmax_max"]).any()


def test_ranks_keep_what_is_not_a_number() -> None:
    specials = np.array([0.5, np.nan, -np.inf], np.float32)
    pairs = np.array([(a, b) for a in specials for b in specials], np.float32)
    inputs = {"lse": [pairs[:, 0].copy(), pairs[:, 1].copy()], "go": [np.ones((len(pairs), 4), np.float32)] * 2}
    attrs = {"update_type": 1, "sp": 2}
    got, want = (run("AttentionUpdate", inputs, attrs) for run in (ops.run, reference.run))
    for name, value in want.items():
        np.testing.assert_array_equal(np.isnan(got[name]), np.isnan(value), name)
