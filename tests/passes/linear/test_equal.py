"""Layers that are copies of each other are proven once, whatever their weights hold, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx.compose
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from fa_compiler.passes import Report
from fa_compiler.passes.linear.equal import Form, form_of
from fa_compiler.passes.linear.proof import InputSizes, LinearMatch, Prover
from fa_compiler.passes.linear.regions import regions
from fa_compiler.passes.values.shapes import analyse
from tests.passes.linear.test_graphs import NEAR, TOLERANCE, feeds_of, load
from tests.passes.running import assert_same, fused, parse, random_feeds, run
from tests.passes.test_linear import calls

STEP, CHUNKS, CONSTANT = (
    "qwen3_next__rule_step_dynamo",
    "qwen3_next__rule_chunk16_dyn_dynamo",
    "minimax__rule_loop5_dynamo",
)
SCAN = "hand__scan_gated_delta_head_mulsum_axis2_s0False"
FLOAT = onnx.TensorProto.FLOAT
LAYERS = 4
TOKENS = 40
"""A number that the file of chunks takes."""


def beside(*models: onnx.ModelProto) -> onnx.ModelProto:
    """One graph that holds those of several models, without a common value."""
    named = [onnx.compose.add_prefix(model, f"layer{place}/") for place, model in enumerate(models)]
    whole = named[0]
    for each in named[1:]:
        whole = onnx.compose.merge_models(whole, each, io_map=[])
    return whole


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each proof that was tried found something."""
    tried: list[bool] = []
    prove = Prover.prove

    def counted(self: Prover) -> LinearMatch | None:
        match = prove(self)
        tried.append(match is not None)
        return match

    monkeypatch.setattr(Prover, "prove", counted)
    return tried


def compared(model: onnx.ModelProto) -> Report:
    """The report of a model whose results were compared."""
    result, report = fused(model)
    feeds = feeds_of(model, TOKENS)
    for name in feeds:
        if name.endswith(("/g", "/beta")):
            feeds[name] = (-np.abs(feeds[name]) if name.endswith("/g") else 1 / (1 + np.exp(feeds[name]))).astype("f")
    for got, wanted in zip(run(result, feeds), run(model, feeds), strict=True):
        assert_same(got, wanted, TOLERANCE)
    return report


def weighted(model: onnx.ModelProto, seed: int, content: np.ndarray | None = None) -> onnx.ModelProto:
    """A model whose log decays are multiplied by weights, as by e^A_log."""
    for node in model.graph.node:
        node.input[:] = ["weighted" if name == "g" else name for name in node.input]
    weights = np.random.default_rng(seed).random(4, np.float32) if content is None else content
    model.graph.initializer.append(numpy_helper.from_array(weights, "weights"))
    model.graph.node.insert(0, helper.make_node("Mul", ["g", "weights"], ["weighted"]))
    return model


@pytest.mark.parametrize("name", [STEP, CHUNKS, SCAN, CONSTANT])
def test_equal_layers_are_proven_once(name: str, proofs: list[bool]) -> None:
    assert compared(beside(*(load(name) for _ in range(LAYERS)))).count("fused") == LAYERS
    assert proofs == [True]


@pytest.mark.parametrize("name", [STEP, CHUNKS])
def test_the_weights_may_differ(name: str, proofs: list[bool]) -> None:
    """The proof with random numbers in the place of the weights is one for all of them."""
    models = [weighted(load(name), seed) for seed in range(LAYERS)]
    assert compared(beside(*models)).count("fused") == LAYERS
    assert proofs == [True]


def test_nothing_is_remembered_too(proofs: list[bool]) -> None:
    assert not fused(beside(*(load(NEAR[0]) for _ in range(LAYERS))))[1].count("fused")
    assert proofs == [False]


def test_constants_that_decay_are_proven_with_their_content(proofs: list[bool]) -> None:
    """Decays that are the same for all tokens are found by what they hold. Layers of equal decays share a proof."""
    models = [load(CONSTANT) for _ in range(3)]
    (decays,) = (each for each in models[2].graph.initializer if each.name == "exp")
    decays.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(decays) / 2, "exp"))
    assert compared(beside(*models)).count("fused") == 3
    assert proofs == [False, True, True]


def form(model: onnx.ModelProto) -> Form:
    """The form of the only region of a model."""
    graph = ir.from_proto(model).graph
    info = analyse(graph)
    (region,) = regions(graph, info)
    return form_of(Prover(region, info, InputSizes.of(graph, info)))


def node_of(graph: onnx.GraphProto, op_type: str) -> onnx.NodeProto:
    """The first node of an operator."""
    return next(node for node in graph.node if node.op_type == op_type)


def input_of(graph: onnx.GraphProto, name: str) -> onnx.TypeProto.Tensor:
    """The type of an input."""
    return next(value.type.tensor_type for value in graph.input if value.name == name)


def another_constant(graph: onnx.GraphProto) -> None:
    scale = next(each for each in graph.initializer if each.name == "val_20")
    scale.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(scale) * 2, scale.name))


def another_table(graph: onnx.GraphProto) -> None:
    """Integers are no weights: they say where elements come from."""
    indices = next(
        each for each in graph.initializer if len(each.dims) == 4 and each.data_type == onnx.TensorProto.INT64
    )
    indices.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(indices) - 1, indices.name))


def another_attribute(graph: onnx.GraphProto) -> None:
    node_of(graph, "Transpose").attribute[0].ints[:] = [0, 1, 2, 3]


def another_wiring(graph: onnx.GraphProto) -> None:
    node = node_of(graph, "Sub")
    node.input[:] = [node.input[1], node.input[0]]


def one_value_twice(graph: onnx.GraphProto) -> None:
    for node in graph.node:
        node.input[:] = ["q" if name == "k" else name for name in node.input]


def another_operator(graph: onnx.GraphProto) -> None:
    node_of(graph, "Sub").op_type = "Add"


def another_size(graph: onnx.GraphProto) -> None:
    input_of(graph, "beta").shape.dim[2].dim_value = 1


def an_open_size(graph: onnx.GraphProto) -> None:
    input_of(graph, "beta").shape.dim[2].dim_param = "n"


def another_type(graph: onnx.GraphProto) -> None:
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == FLOAT:
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    for each in graph.initializer:
        if each.data_type == FLOAT:
            each.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(each).astype(np.float16), each.name))


def another_exit(graph: onnx.GraphProto) -> None:
    inner = node_of(graph, "Sub").output[0]
    graph.output.append(helper.make_tensor_value_info(inner, FLOAT, None))


CHANGES = (
    *(another_constant, another_table, another_attribute, another_wiring, one_value_twice, another_operator),
    *(another_size, an_open_size, another_type, another_exit),
)


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_proof_reads_is_in_the_form(change: Callable[[onnx.GraphProto], None]) -> None:
    model = load(STEP)
    usual = form(model)
    assert form(onnx.compose.add_prefix(model, "other/")).entries == usual.entries
    change(model.graph)
    assert form(model).entries != usual.entries


def test_a_body_is_in_the_form() -> None:
    model = load(SCAN)
    usual = form(model)
    (body,) = (attr.g for node in model.graph.node for attr in node.attribute if attr.HasField("g"))
    assert form(onnx.compose.add_prefix(model, "other/")).entries == usual.entries
    another_operator(body)
    assert form(model).entries != usual.entries


def test_a_name_of_a_size_is_its_role() -> None:
    """A point gives the same size to all names of tokens, and another one to the batch."""
    model = load("hand__loop_linear_mulsum_axis1_scatter")
    usual = form(model)
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param += "_of_layer"
    assert form(model).entries == usual.entries


def test_weights_that_are_not_finite_are_no_random_numbers() -> None:
    usual, infinite = (form(weighted(load(STEP), 0, content)) for content in (np.ones(4, "f"), np.full(4, np.inf, "f")))
    assert usual.entries != infinite.entries


def test_a_layer_more_costs_the_same() -> None:
    """Counted in calls, which no other load disturbs."""
    counts = [calls(ir.from_proto(beside(*(load(STEP) for _ in range(layers))))) for layers in (3, 3, 13, 23)]
    _, few, some, many = counts  # the first run fills caches
    assert many - some == pytest.approx(some - few, rel=0.025)


def two_tokens(name: str) -> str:
    """Two tokens with one decay for each head, `d`, as a power."""
    body, state = "", f"s0{name}"
    for place in range(2):
        at = f"{name}{place}"
        body += f"i{at} = Constant<value_ints=[{place}]>() "
        body += "".join(f"{each}{at} = Gather<axis=2>({each}{name}, i{at}) " for each in "qkvd")
        body += (
            f"c{at} = Transpose<perm=[0,1,3,2]>(k{at}) u{at} = MatMul(c{at}, v{at}) m{at} = Mul({state}, d{at}) "
            f"s{at} = Add(m{at}, u{at}) o{at} = MatMul(q{at}, s{at}) "
        )
        state = f"s{at}"
    return body + f"y{name} = Concat<axis=2>(o{name}0, o{name}1) s{name} = Identity({state}) "


@pytest.mark.parametrize("second", ["uint8", "int8"])
def test_a_power_that_may_be_negative_has_no_logarithm(second: str) -> None:
    """The regions are equal. What stands in front of them tells which numbers are negative."""
    shapes = {"q": "float[2,3,2,4]", "k": "float[2,3,2,4]", "v": "float[2,3,2,6]", "s0": "float[2,3,4,6]"}
    given = [f"{shape} {each}{name}" for name in "ab" for each, shape in shapes.items()]
    body = "c = Constant<value_float=0.1>() "
    body += "".join(f"d{name} = DequantizeLinear(x{name}, c) {two_tokens(name)}" for name in "ab")
    inputs = ", ".join([*given, "uint8[2,3,2,1] xa", f"{second}[2,3,2,1] xb"])
    model = parse(body, inputs=inputs, outputs=", ".join(f"float[2,3,2,6] y{n}, float[2,3,4,6] s{n}" for n in "ab"))
    result, report = fused(model)
    assert report.count("fused") == (2 if second == "uint8" else 1)
    feeds = random_feeds(model, xa=np.full((2, 3, 2, 1), 7, np.uint8), xb=np.full((2, 3, 2, 1), -7).astype(second))
    for got, wanted in zip(run(result, feeds), run(model, feeds), strict=True):
        assert_same(got, wanted, TOLERANCE)
