"""Bodies have no branch for numbers that cannot occur: what is proven of the operands, and what is not."""

from __future__ import annotations

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

import fa_compiler
from fa_compiler.lowering.onnx_file.magnitudes import Magnitudes, norms_of
from fa_compiler.passes.values.shapes import analyse

WIDTH, TOKENS = 16, 10
MEAN = ("mean = ReduceMean<axes=[-1]>(x)", "d = Sub(x, mean)", "s = Pow(d, two)", "v = ReduceMean<axes=[-1]>(s)")
NORMS = {
    "ready made": ("n = LayerNormalization<axis=-1, epsilon=1e-5>(x, gain, shift)",),
    "in nodes": (*MEAN, "e = Add(v, eps)", "r = Sqrt(e)", "h = Div(d, r)", "g = Mul(h, gain)", "n = Add(g, shift)"),
    "root mean square": (
        *("s = Pow(x, two)", "v = ReduceMean<axes=[-1]>(s)", "e = Add(v, eps)", "r = Sqrt(e)", "i = Reciprocal(r)"),
        *("h = Mul(x, i)", "n = Mul(gain, h)"),
    ),
}
"""From x to n."""
TABLE = ("x = Gather(table, ids)",)


def layer(source: str, number: int) -> tuple[str, ...]:
    """One attention with one head, from a source to o1 or o2; `far` is what the mask adds."""
    lines = (
        *(
            "q = MatMul(SOURCE, wq)",
            "k = MatMul(SOURCE, wk)",
            "p = MatMul(SOURCE, wv)",
            "t = Transpose<perm=[0, 2, 1]>(k)",
        ),
        *(
            "z = MatMul(q, t)",
            "zs = Mul(z, scale)",
            "zm = Add(zs, far)",
            "w = Softmax<axis=-1>(zm)",
            "o = MatMul(w, p)",
        ),
    )
    return tuple(
        re.sub(r"\b(q|k|p|t|z|zs|zm|w|o)\b", rf"\g<1>{number}", line).replace("SOURCE", source) for line in lines
    )


MASK = "far = Where(mask, nothing, lowest)"


def weights(rng: np.random.Generator) -> dict[str, np.ndarray]:
    def matrix(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    numbers = {"two": 2.0, "eps": 1e-5, "scale": 0.25, "nothing": 0.0, "lowest": float(np.finfo(np.float32).min)}
    return {
        **{name: matrix(WIDTH, WIDTH) for name in ("wq", "wk", "wv", "wo")},
        "table": matrix(TOKENS, WIDTH),
        "gain": matrix(WIDTH),
        "shift": matrix(WIDTH),
        **{name: np.array(number, np.float32) for name, number in numbers.items()},
    }


def model(lines: tuple[str, ...], given: dict[str, np.ndarray], output: str = "o1") -> onnx.ModelProto:
    """A model of these lines. Its inputs are token numbers `ids`, a `mask` of keys, and `floats`."""
    head = f"main (int64[b, s] ids, bool[b, 1, s] mask, float[b, s, {WIDTH}] floats) => (float[b, s, {WIDTH}] {output})"
    graph = onnx.parser.parse_graph(head + "{" + "\n".join(lines) + "}")
    graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in given.items())
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def run(built: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The outputs in ONNX Runtime without the library."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(built.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [np.asarray(output) for output in session.run(None, feeds)]


def has_branch(built: onnx.ModelProto | str) -> bool:
    """Whether the body of the only fused node has one."""
    fused = fa_compiler.optimize(built).model
    assert isinstance(fused, onnx.ModelProto)
    (body,) = fused.functions
    return any(node.op_type == "If" for node in body.node)


@pytest.mark.parametrize("norm", NORMS)
def test_what_is_computed_from_integers_needs_no_branch(norm: str) -> None:
    rng = np.random.default_rng(0)
    built = model((*TABLE, MASK, *NORMS[norm], *layer("n", 1)), weights(rng))
    assert not has_branch(built)
    fused = fa_compiler.optimize(built).model
    assert isinstance(fused, onnx.ModelProto)
    feeds = {"ids": rng.integers(0, TOKENS, (2, 5)), "mask": rng.random((2, 1, 5)) < 0.5}
    feeds["mask"][1] = False
    feeds["floats"] = np.zeros((2, 5, WIDTH), np.float32)  # which nothing reads
    results = [run(each, feeds)[0] for each in (built, fused)]
    np.testing.assert_allclose(results[1], results[0], rtol=0, atol=1e-5 * np.abs(results[0]).max())


def test_what_may_hold_anything_needs_the_branch() -> None:
    """A float input, also where a norm follows it."""
    given = weights(np.random.default_rng(0))
    for lines in (("n = Identity(floats)",), ("x = Identity(floats)", *NORMS["ready made"])):
        assert has_branch(model((*lines, MASK, *layer("n", 1)), given))


@pytest.mark.parametrize(
    ("name", "number"),
    [("table", np.nan), ("wv", np.inf), ("wk", np.nan), ("wq", 1e36), ("gain", 1e32), ("shift", -np.inf), ("eps", 0.0)],
)
def test_weights_that_are_not_finite_or_huge_need_the_branch(name: str, number: float) -> None:
    given = weights(np.random.default_rng(0))
    lines = (*TABLE, MASK, *NORMS["in nodes"], *layer("n", 1))
    assert not has_branch(model(lines, given))
    given[name].reshape(-1)[-1] = number
    assert has_branch(model(lines, given))


def test_a_second_layer_needs_the_branch_where_a_row_without_keys_is_nan() -> None:
    """The first one may make NaN of what the second one reads."""
    given = weights(np.random.default_rng(0))
    lines = (*TABLE, MASK, *NORMS["ready made"], *layer("n", 1), "m = MatMul(o1, wo)", *layer("m", 2))
    for lowest, wanted in ((given["lowest"], [False]), (np.array(-np.inf, np.float32), [False, True])):
        fused = fa_compiler.optimize(model(lines, {**given, "lowest": lowest}, "o2")).model
        assert isinstance(fused, onnx.ModelProto)
        assert [any(node.op_type == "If" for node in body.node) for body in fused.functions] == wanted


def test_what_is_known_of_numbers_makes_no_second_body_without_a_mask() -> None:
    """One layer reads tokens, and the other one what may hold anything."""
    lines = [*TABLE, *layer("x", 1), "m = Add(o1, floats)", *layer("m", 2)]
    unmasked = tuple(
        line.replace("Add(zs1, far)", "Identity(zs1)").replace("Add(zs2, far)", "Identity(zs2)") for line in lines
    )
    fused = fa_compiler.optimize(model(unmasked, weights(np.random.default_rng(0)), "o2")).model
    assert isinstance(fused, onnx.ModelProto)
    assert len(fused.functions) == 1


@pytest.mark.parametrize("name", ["wk", "gain", "eps"])
def test_weights_that_a_caller_may_replace_need_the_branch(name: str) -> None:
    given = weights(np.random.default_rng(0))
    built = model((*TABLE, MASK, *NORMS["in nodes"], *layer("n", 1)), given)
    built.graph.input.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, given[name].shape))
    assert has_branch(built)


def test_weights_in_other_files_are_not_read(tmp_path: Path) -> None:
    given = weights(np.random.default_rng(0))
    given["table"] = np.zeros((2000, WIDTH), np.float32)
    built = model((*TABLE, MASK, *NORMS["ready made"], *layer("n", 1)), given)
    inside, beside = tmp_path / "inside.onnx", tmp_path / "beside.onnx"
    onnx.save(built, inside)
    onnx.save(built, beside, save_as_external_data=True, location="weights.bin", size_threshold=1 << 10)
    assert (has_branch(str(inside)), has_branch(str(beside))) == (False, True)


STEPS = {
    "MatMul": ("y = MatMul(x, wq)",),
    "MatMul of a weight first": ("y = MatMul(wq, x)",),
    "MatMul of two": ("t = Transpose<perm=[0, 2, 1]>(x)", "y = MatMul(x, t)"),
    "Gemm": ("f = Reshape(x, rows)", "y = Gemm<alpha=2.0, beta=-3.0>(f, wq, shift)"),
    "Gemm, transposed": ("f = Reshape(x, rows)", "y = Gemm<transB=1>(f, wq)"),
    "Erf": ("y = Erf(x)",),
    "LayerNormalization": ("y = LayerNormalization<axis=-1>(x, gain, shift)",),
    "LayerNormalization of two axes": ("y = LayerNormalization<axis=-2>(x, square)",),
    "LayerNorm": (*NORMS["in nodes"][:-3], "y = Div(d, r)"),
    "SkipLayerNormalization": ("y = com.microsoft.SkipLayerNormalization<epsilon=1e-5>(x, x, gain, shift, shift)",),
    "SkipSimplifiedLayerNormalization": ("y = com.microsoft.SkipSimplifiedLayerNormalization(x, x, gain, shift)",),
    "a sum before a norm": ("n, a, b, y = com.microsoft.SkipLayerNormalization(x, x, gain, shift, shift)",),
    "RotaryEmbedding": (
        *("half = Constant<value_ints=[4]>()", "zero = Constant<value_ints=[0]>()", "one = Constant<value_ints=[1]>()"),
        *("some = Slice(wq, zero, half, one)", "y = com.microsoft.RotaryEmbedding<num_heads=2>(x, first, some, some)"),
    ),
    "FastGelu": ("y = com.microsoft.FastGelu(x, shift)",),
    "QuickGelu": ("y = com.microsoft.QuickGelu(x)",),
    "RMSNorm": (*NORMS["root mean square"][:-2], "y = Mul(x, i)"),
}
"""From x to y."""


def from_ids(steps: tuple[str, ...], given: dict[str, np.ndarray]) -> onnx.ModelProto:
    """A model of the steps from x to y."""
    text = f"main (int64[2, {WIDTH}] ids) => (float y)" + "{" + "\n".join((*TABLE, *steps)) + "}"
    graph = onnx.parser.parse_graph(text)
    graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in given.items())
    graph.output[0].type.tensor_type.ClearField("shape")
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def largest_of(built: onnx.ModelProto) -> float:
    """The largest number that y may hold."""
    read = ir.serde.deserialize_model(built)
    (value,) = read.graph.outputs
    info = analyse(read)
    return Magnitudes(info, norms=norms_of(read.graph, info)).largest(value)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_bounds_hold_what_a_run_gives(step: str, size: float) -> None:
    """Also at the row that a norm makes largest, in which one number is not 0."""
    rng = np.random.default_rng(3)
    given = weights(rng)
    given["table"] = (given["table"] * size).astype(np.float32)
    given["table"][0, 1:] = 0.0
    given |= {"rows": np.array([-1, WIDTH]), "first": np.array([0]), "square": np.full((WIDTH, WIDTH), 2.0, np.float32)}
    built = from_ids(STEPS[step], given)
    (got,) = run(built, {"ids": np.vstack([np.zeros(WIDTH, np.int64), rng.integers(0, TOKENS, WIDTH)])})
    largest = largest_of(built)
    assert np.abs(got).max() <= largest < np.inf
    assert size != 1.0 or largest <= 20 * np.abs(got).max()


@pytest.mark.parametrize(
    "step",
    [
        "n, m, y = LayerNormalization<axis=-1, epsilon=1e-30>(x, gain, shift)",  # the reciprocal of the deviation
        "y = LayerNormalization<axis=-1, epsilon=0.0>(x, gain, shift)",
        "y = LayerNormalization<axis=-1, epsilon=nan>(x, gain, shift)",
        "y = Gemm<transA=1>(f, f)",
        "y = com.microsoft.SkipLayerNormalization<epsilon=0.0>(x, x, gain, shift)",
        "n, a, y = com.microsoft.SkipLayerNormalization(x, x, gain, shift)",
        'y = Einsum<equation="bsd,bsd->bs">(x, x)',
        "y = com.microsoft.QuickGelu<alpha=inf>(x)",
        "n = Squeeze(one) y = LayerNormalization(n, n)",  # which has no axis
    ],
)
def test_nothing_is_known_of_other_results(step: str) -> None:
    given = weights(np.random.default_rng(3)) | {"rows": np.array([-1, WIDTH]), "one": np.ones(1, np.float32)}
    assert largest_of(from_ids(("f = Reshape(x, rows)", step), given)) == np.inf


def test_a_sum_that_overflows_may_be_nan() -> None:
    """What limits it does not limit NaN."""
    given = weights(np.random.default_rng(3)) | {"rows": np.array([-1, WIDTH])}
    given |= {"huge": np.full((WIDTH, WIDTH), 3e38, np.float32), "low": np.full(WIDTH, -3e38, np.float32)}
    given["table"][0] = 2.0
    built = from_ids(("f = Reshape(x, rows)", "m = Gemm<beta=2.0>(f, huge, low)", "y = Clip(m, two, two)"), given)
    (got,) = run(built, {"ids": np.zeros((2, WIDTH), np.int64)})
    assert np.isnan(got).all()
    assert largest_of(built) == np.inf


def test_products_of_integers_wrap_around() -> None:
    """The lowest integer has no absolute number of its type."""
    given = weights(np.random.default_rng(3)) | {"low": np.full((WIDTH, WIDTH), np.iinfo(np.int32).min, np.int32)}
    built = from_ids(("i = Cast<to=6>(ids)", "m = MatMul(i, low)", "y = Cast<to=1>(m)"), given)
    (got,) = run(built, {"ids": np.eye(2, WIDTH, dtype=np.int64)})
    assert 0 < np.abs(got).max() <= largest_of(built)


def test_weights_of_every_type_are_read() -> None:
    """What NumPy has no type of is converted."""
    given = weights(np.random.default_rng(3)) | {"b16": np.full((WIDTH, WIDTH), 3, ml_dtypes.bfloat16)}
    built = from_ids(("c = Cast<to=1>(b16)", "y = MatMul(x, c)"), given)
    assert 3 * WIDTH < largest_of(built) < 1e4
