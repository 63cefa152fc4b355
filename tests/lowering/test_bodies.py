"""The bodies of fused nodes give what the kernel and the float64 reference give, also for NaN and infinite inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

from fa_compiler import ops, reference
from fa_compiler.lowering.onnx_file.bodies import body_key, body_of
from fa_compiler.op_registry import FILE_DOMAIN, FILE_OP, NodeView, TensorInfo, dtypes, full_attrs, get, place_inputs
from fa_compiler.op_registry.geometry import SEQUENCE_AXIS

from .problems import OP, TRIANGLE, Form, Inputs, agree, bounds, mask

SPEC = get(OP)
OUT = "attention_out"
EMPTY = ("", "zero", "mean", "unmasked", "nan")
RELEASE = tuple(map(int, ort.__version__.split(".")[:2]))


def view_of(inputs: Inputs, attrs: Mapping[str, Any], width_only: bool = False, equal: bool = False) -> NodeView:
    """The node as the registry sees it. With `width_only` batch and lengths are symbols, as in most models. With
    `equal` those of equal sizes are one symbol, also in mask and bias."""

    def info(name: str, array: np.ndarray) -> TensorInfo:
        shape: tuple[int | str, ...] = array.shape
        if width_only and name in ("query", "key", "value"):
            folded = attrs["input_layout"] in ("BSH", "SBH")
            heads = None if folded else {"BSND": 2, "BNSD": 1}[attrs["input_layout"]]
            shape = tuple(
                size if axis in (heads, array.ndim - 1) else f"{name}_{axis}" for axis, size in enumerate(shape)
            )
            if equal:
                known = zip(shape, array.shape, strict=True)
                shape = tuple(f"size_{size}" if isinstance(told, str) else told for told, size in known)
        elif equal and name in ("atten_mask", "real_shift") and array is not TRIANGLE:
            shape = tuple(size if size == 1 else f"size_{size}" for size in array.shape)
        return TensorInfo(dtypes.from_numpy(array.dtype), shape, array if array.size == 1 else None)

    infos = {name: info(name, array) for name, array in inputs.items()}
    return NodeView(OP, "node", infos, {}, full_attrs(SPEC, attrs))


def model_of(inputs: Inputs, attrs: Mapping[str, Any], body: onnx.FunctionProto, opset: int) -> onnx.ModelProto:
    placed = [name or "" for name in place_inputs(SPEC, {name: name for name in inputs})]
    node = helper.make_node(FILE_OP, placed, [OUT], domain=FILE_DOMAIN, **full_attrs(SPEC, attrs))
    values = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in inputs.items()
    ]
    result = helper.make_tensor_value_info(OUT, values[0].type.tensor_type.elem_type, [None] * inputs["query"].ndim)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(FILE_DOMAIN, 1)]
    graph = helper.make_graph([node], "body", values, [result])
    return helper.make_model(graph, opset_imports=imports, functions=[body], ir_version=8)


def run_body(inputs: Inputs, attrs: Mapping[str, Any], opset: int, equal: bool, tame: bool = False) -> np.ndarray:
    """What ONNX Runtime without the library computes. `equal` tells which sizes the body knows to be one, and `tame`
    whether it knows that all numbers are finite and small."""
    key = body_key(view_of(inputs, attrs, width_only=True, equal=equal), opset, is_tame=tame)
    assert key is not None
    model = model_of(inputs, attrs, body_of(key), opset)
    onnx.checker.check_model(model, full_check=True)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, inputs)
    return np.asarray(result)


def are_tame(inputs: Inputs) -> bool:
    """Whether all numbers that are computed with are finite and small. Masks are no such numbers."""
    return all(array.dtype.kind != "f" or bool((np.abs(array) < 1e4).all()) for array in inputs.values())


def compare(inputs: Inputs, attrs: Mapping[str, Any], opset: int) -> None:
    want = reference.run(OP, inputs, attrs, [OUT])[OUT]
    allowed = bounds(inputs, {"pse_type": 1, "scale_value": 1.0, **attrs}).of(OUT)
    for equal, tame in ((False, False), (True, False), *([(True, True)] if are_tame(inputs) else [])):
        got = run_body(inputs, attrs, opset, equal, tame)
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        agree(got, want, "body and reference", *allowed)
    agree(ops.run(OP, inputs, attrs, [OUT])[OUT], want, "kernel and reference", *allowed)


def draw(seed: int, square: bool = False) -> tuple[Inputs, dict[str, Any], int]:
    """A random call that has a body, and an opset. With `square` there are as many rows as keys."""
    rng = np.random.default_rng(seed)

    def pick(*choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    kv_heads, group = pick(1, 2, 3), pick(1, 1, 2)
    form = Form(
        layout=pick("BSH", "SBH", "BSND", "BNSD"),
        dtype=pick("float32", "float32", "float16"),
        batch=pick(1, 2, 6),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        queries=pick(1, 5, 9),
        keys=pick(1, 6, 11),
        size=8,
        value_size=pick(None, None, 5),
    )
    if square:
        form = replace(form, queries=form.keys)
    inputs, attrs = form.inputs(rng), dict(form.all_attrs)
    full = (form.batch, form.heads, form.queries, form.keys)
    mode = pick(None, 0, 0, 1, 2, 3, 4)
    if mode is not None:
        attrs["sparse_mode"] = mode
        attrs |= {name: pick(2**31 - 1, 0, 2, 4) for name in ("pre_tockens", "next_tockens")}
        shape = tuple(pick(1, size) for size in full)
        if mode in (2, 3, 4):
            inputs["atten_mask"] = pick(TRIANGLE, mask(rng, (*shape[:2], 1, form.keys)))
        else:
            inputs["atten_mask"] = mask(rng, pick(full[2:], shape), pick(0.4, 0.9))
        rules = EMPTY
        if form.dtype == "float16" and rng.random() < 0.3:
            inputs["sink"] = rng.standard_normal(form.heads).astype(np.float32)
            rules = ("", "zero")
        elif rng.random() < 0.3:
            attrs["cpu_mask_value"] = pick(-3.0, -1e4)
            attrs["cpu_masked_values"] = pick("", "zero")
        attrs["cpu_empty_rows"] = pick(*rules)
    attrs["cpu_nan_rows"] = pick("", "zero", "infinite")
    if rng.random() < 0.2:
        attrs["cpu_softcap"] = 2.0
    if rng.random() < 0.5:
        dtype = pick(np.float32, inputs["query"].dtype)
        inputs["real_shift"] = rng.standard_normal(tuple(pick(1, size) for size in full)).astype(dtype)
        attrs["pse_type"] = 0 if "cpu_softcap" in attrs else pick(0, 1)
        if "cpu_mask_value" in attrs and attrs["cpu_masked_values"] == "":
            attrs["cpu_masked_bias"] = pick("", "added")
    if form.batch == 6 and all(inputs[name].ndim == 4 for name in ("atten_mask", "real_shift") if name in inputs):
        attrs["cpu_mask_batch"] = "repeated"
        windows = pick(2, 3)
        for name in ("atten_mask", "real_shift"):
            if name in inputs and inputs[name].shape[0] == 6:
                inputs[name] = inputs[name][:windows]
    if rng.random() < 0.4:
        for name in ("key", "value", "query"):
            flat = inputs[name].reshape(-1)
            flat[rng.integers(flat.size, size=2)] = pick(np.inf, -np.inf, np.nan)
    if form.dtype == "float32" and rng.random() < 0.2:
        for name in ("query", "key"):
            inputs[f"{name}_rope"] = rng.standard_normal(inputs[name].shape).astype(np.float32)
    if rng.random() < 0.2:
        axis = SEQUENCE_AXIS[form.layout]
        for name in ("key", "value", "key_rope"):
            if name in inputs:  # room for more keys, which nobody reads
                room = np.full_like(inputs[name], np.nan)
                inputs[name] = np.concatenate([inputs[name], room], axis=axis)
        inputs["actual_seq_kvlen"] = np.array([form.keys], np.int64)
    return inputs, attrs, pick(13, 14, 15, 17, 18, 21)


@pytest.mark.parametrize("seed", range(40))
def test_a_body_computes_what_the_kernel_computes(seed: int) -> None:
    compare(*draw(seed))


@pytest.mark.parametrize("seed", range(100, 125))
def test_a_body_that_knows_the_lengths(seed: int) -> None:
    """A mask whose last size is both lengths is computed in front of the branches."""
    compare(*draw(seed, square=True))


@pytest.mark.parametrize("scaled", [0, 1])
@pytest.mark.parametrize("rule", EMPTY)
@pytest.mark.parametrize("huge", [None, 3e38, -np.inf, np.nan])
def test_a_bias_beside_a_mask(scaled: int, rule: str, huge: float | None) -> None:
    """A bias as large as the scores of one sequence, as T5 has it; also with numbers that are lost in a mask's."""
    rng = np.random.default_rng(1)
    form = Form(layout="BSH", dtype="float32", batch=2, heads=2, kv_heads=2, queries=6, keys=6, size=8)
    inputs, attrs = form.inputs(rng), {**form.all_attrs, "pse_type": scaled, "cpu_empty_rows": rule}
    inputs["atten_mask"] = mask(rng, (2, 1, 1, 6))
    inputs["real_shift"] = rng.standard_normal((1, 2, 6, 6)).astype(np.float32)
    if huge is not None:
        inputs["real_shift"][0, 1, 2, 3] = huge
    compare(inputs, attrs, 17)


@pytest.mark.skipif(RELEASE < (1, 32), reason="older releases do not broadcast to sizes of 0")
@pytest.mark.parametrize("sizes", [(0, 3, 3), (2, 0, 3), (2, 3, 0), (2, 0, 0)])
@pytest.mark.parametrize(("layout", "rule"), [("BSH", ""), ("BNSD", "mean"), ("BNSD", "nan"), ("BSND", "unmasked")])
def test_sizes_of_zero(sizes: tuple[int, int, int], layout: str, rule: str) -> None:
    """The model declares them, so that ONNX Runtime infers shapes of the branch that is not taken."""
    rng = np.random.default_rng(2)
    batch, queries, keys = sizes
    form = Form(layout=layout, dtype="float32", batch=batch, heads=2, kv_heads=2, queries=queries, keys=keys, size=8)
    inputs, attrs = form.inputs(rng), {**form.all_attrs, "cpu_empty_rows": rule}
    inputs["atten_mask"] = (rng.random((batch, 1, 1, keys)) < 0.5).astype(np.uint8)
    inputs["real_shift"] = np.full((1, 2, 1, 1), np.nan, np.float32)
    compare(inputs, attrs, 14)


@pytest.mark.parametrize(("name", "places"), [("query", (0, 2)), ("key", (0, 1, 2)), ("value", (0, 1, 2))])
@pytest.mark.parametrize("rule", EMPTY)
@pytest.mark.parametrize("number", [-1e32, -np.inf, np.nan])
def test_a_number_beside_a_mask(name: str, places: tuple[int, ...], rule: str, number: float) -> None:
    """In a row with keys and in one without, and at a key that all rows with keys read, that some read, and none."""
    rng = np.random.default_rng(4)
    form = Form(layout="BNSD", dtype="float32", batch=1, heads=1, kv_heads=1, queries=4, keys=4, size=8)
    hidden = np.array([[0, 0, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 1, 1]], np.uint8)
    for place in places:
        inputs, attrs = form.inputs(rng), {**form.all_attrs, "cpu_empty_rows": rule}
        inputs["atten_mask"] = hidden[None, None]
        inputs[name][0, 0, place, 3] = number
        compare(inputs, attrs, 17)


@pytest.mark.parametrize(("mode", "opset"), [(0, 17), (2, 13), (2, 14), (3, 17), (4, 17)])
@pytest.mark.parametrize("after", [-1, 1])
@pytest.mark.parametrize("queries", [4, 6])
def test_a_band_alone(mode: int, opset: int, after: int, queries: int) -> None:
    """Beside a mask that hides no key, and one that hides all."""
    rng = np.random.default_rng(5)
    for hides, rule in ((0, "mean"), (1, "nan")):
        form = Form(layout="BNSD", dtype="float32", batch=2, heads=2, kv_heads=2, queries=queries, keys=6, size=8)
        inputs, attrs = form.inputs(rng), {**form.all_attrs, "cpu_empty_rows": rule, "sparse_mode": mode}
        attrs |= {"pre_tockens": 2**31 - 1, "next_tockens": after}
        inputs["atten_mask"] = np.full((1, 1, 1, 1), hides, np.bool_)
        compare(inputs, attrs, opset)
    inputs["atten_mask"][:] = 0
    inputs["key"][0, 0, 3, 1] = np.nan
    compare(inputs, attrs, opset)


@pytest.mark.parametrize("number", [0.5, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("guard", ["", "zero", "infinite"])
def test_a_sink_beside_a_mask(number: float, guard: str) -> None:
    rng = np.random.default_rng(2)
    form = Form(layout="BNSD", dtype="float16", batch=2, heads=2, kv_heads=2, queries=6, keys=6, size=8)
    inputs, attrs = form.inputs(rng), {**form.all_attrs, "sparse_mode": 3, "cpu_nan_rows": guard}
    inputs["atten_mask"] = mask(rng, (2, 1, 1, 6))
    inputs["sink"] = np.array([0.25, number], np.float32)
    compare(inputs, attrs, 17)


def test_equal_layers_share_a_mask() -> None:
    """It depends on the mask alone, so that ONNX Runtime computes it once for all layers, as the model did."""
    rng = np.random.default_rng(0)
    form = Form(layout="BSH", dtype="float32", batch=2, heads=2, kv_heads=2, queries=6, keys=6, size=8)
    inputs, attrs = form.inputs(rng), {**form.all_attrs, "sparse_mode": 3, "cpu_empty_rows": "mean"}
    inputs["atten_mask"] = mask(rng, (2, 1, 1, 6))
    key = body_key(view_of(inputs, attrs, width_only=True, equal=True), 17)
    assert key is not None
    body = body_of(key)
    (choice,) = (node for node in body.node if node.op_type == "If")
    assert {"LessOrEqual", "Where"} <= {node.op_type for node in body.node}
    branches = {each.name: sorted({node.op_type for node in each.g.node}) for each in choice.attribute}
    assert branches["then_branch"] == ["Identity"]
    assert "Range" not in branches["else_branch"]
    # A file has a few names for bodies. Where they do not suffice, nodes share a body that knows nothing of sizes.
    other = body_key(view_of(inputs, attrs, width_only=True), 17)
    assert other is not None
    assert key != other
    assert key.for_any_call() == other.for_any_call() == other


@pytest.mark.parametrize("name", ["atten_mask", "real_shift"])
@pytest.mark.parametrize("axis", [0, 2])
def test_a_mask_of_more_batches_or_rows_is_an_error(name: str, axis: int) -> None:
    """As in the kernel: standard operators would repeat query, key and value for it."""
    rng = np.random.default_rng(0)
    form = Form(layout="BSH", dtype="float32", batch=1, heads=2, kv_heads=2, queries=1, keys=6, size=8)
    inputs, attrs = form.inputs(rng), dict(form.all_attrs)
    shape = [1, 1, 1, 6]
    inputs[name] = mask(rng, tuple(shape)) if name == "atten_mask" else np.zeros(shape, np.float32)
    key = body_key(view_of(inputs, attrs, width_only=True), 17)
    assert key is not None
    model = model_of(inputs, attrs, body_of(key), 17)
    for each in model.graph.input[3].type.tensor_type.shape.dim:
        each.dim_param = ""
        each.ClearField("dim_value")
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    session.run(None, inputs)
    shape[axis] = 2
    inputs[name] = np.broadcast_to(inputs[name], shape).copy()
    with pytest.raises(Exception, match="reshape"):
        session.run(None, inputs)


MOVERS = ("MaxPool", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice")
"""What QDQPropagation of ONNX Runtime moves a DequantizeLinear through."""
IDLE = ("Cast", "Identity")
"""What may be removed before."""


@pytest.mark.parametrize("tame", [False, True])
def test_no_branch_reads_what_a_dequantize_linear_could_be_moved_to(tame: bool) -> None:
    """ONNX Runtime ends the process where it does so. Masks are not quantised."""
    branches = 0
    for seed in range(200):
        inputs, attrs, opset = draw(seed)
        key = body_key(view_of(inputs, attrs, width_only=True), opset, is_tame=tame)
        assert key is not None
        body = body_of(key)
        makers = {output: node for node in body.node for output in node.output}
        passed = (*MOVERS, *IDLE) if inputs["query"].dtype == np.float32 else MOVERS
        for name in read_in_branches(body.node) - {"atten_mask"}:
            branches += 1
            while name in makers and makers[name].op_type in passed:
                name = makers[name].input[0]
            assert name not in body.input, (seed, name)
    assert (branches == 0) == tame


def test_nothing_moves_what_a_dequantize_linear_makes() -> None:
    """ONNX Runtime would quantise it again behind the move, and does not load the model where it may not."""
    for seed in range(100):
        inputs, attrs, opset = draw(seed)
        key = body_key(view_of(inputs, attrs, width_only=True), opset, is_dequantised=True)
        assert key is not None and key.for_any_call().call.known.is_dequantised
        body = body_of(key)
        makers = {output: node for node in body.node for output in node.output}
        for node in (node for node in body.node if node.op_type in MOVERS):
            name = node.input[0]
            while name in makers and makers[name].op_type in IDLE:
                name = makers[name].input[0]
            assert name not in {*body.input} - {"atten_mask"}, (seed, name)


def read_in_branches(nodes: Sequence[onnx.NodeProto]) -> set[str]:
    """The names that the graphs of these nodes read from around them."""
    read: set[str] = set()
    for node in nodes:
        for graph in (attribute.g for attribute in node.attribute if attribute.HasField("g")):
            inside = {output for each in graph.node for output in each.output}
            read |= {name for each in graph.node for name in each.input} - inside
            read |= read_in_branches(graph.node) - inside
    return read - {""}
