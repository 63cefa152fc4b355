"""Products of one operand, which one product by the joined weights computes, with the near misses that stay apart."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

import fa_compiler
from fa_compiler.fuse_pass import FuseAttention
from fa_compiler.passes import Report
from fa_compiler.passes.answer.report import Around, Code
from tests.passes.around.running import Array, assert_equal, fused, others, parse, run

RNG = np.random.default_rng(7)
NORM = "p = Mul(x, x) m = ReduceMean<keepdims=1>(p, last) g1 = Add(m, e) h = Sqrt(g1) n0 = Div(x, h) n = Mul(n0, w) "
"""A norm in front of the products: a model in which nothing else is fused stays as it is."""
SHAPES = "int64[1] last = {-1}, int64[4] four = {0,0,-1,4}, int64[4] eight = {0,0,-1,8}"
HEADS = "a = Reshape(a0, four) b = Reshape(b0, four) c = Reshape(c0, four) "
THREE = "a0 = MatMul(n, wa) b0 = MatMul(n, wb) c0 = MatMul(n, wc) "
ADDED = "a0 = MatMul(n, wa) b0 = MatMul(n, wb) c1 = MatMul(n, wc) c0 = Add(c1, bc) "
OUTS = "float[B,S,N,D] y0, float[B,S,M,F] y1, float[B,S,L,G] y2"
FLAT = "float[B,S,8] y0, float[B,S,4] y1, float[B,S,4] y2"
END = "y0 = Neg(a) y1 = Neg(b) y2 = Neg(c)"
TWO = "float[B,S,8] y0, float[B,S,4] y1"
FLAT_END = "y0 = Neg(a0) y1 = Neg(b0) y2 = Neg(c0)"
GATED = "s = Sigmoid(a0) t = Mul(a0, s) y = Mul(t, b0)"


def weights(dtype: type = np.float32) -> dict[str, Array]:
    shapes = {"wa": (8, 8), "wb": (8, 4), "wc": (8, 4), "ta": (8, 8), "tb": (4, 8), "ba": (8,), "bb": (4,), "bc": (4,)}
    return {name: RNG.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def model(body: str, outputs: str = OUTS, inputs: str = "float[B,S,8] x", **given: Array) -> onnx.ModelProto:
    """A model in which a norm of x is multiplied by the weights that the body names."""
    proto = parse(NORM + body, inputs, outputs, 20, SHAPES)
    for name, array in {**weights(), **given}.items():
        if any(name in node.input for node in proto.graph.node):
            proto.graph.initializer.append(numpy_helper.from_array(array, name))
    return proto


def lines(report: Report) -> list[Around]:
    return [line for line in report.around if line.op != "RmsNorm"]


SPELLINGS = {
    "1, 3 and 6": (THREE + HEADS + END, OUTS, ["MatMul", "Reshape", "Split"]),
    "1, 3 and 7": (THREE + FLAT_END, FLAT, ["MatMul", "Split"]),
    "4, one of three": (ADDED + HEADS + END, OUTS, ["MatMul", "Add", "Reshape", "Split"]),
    "4, two": (
        "a1 = MatMul(n, wa) a0 = Add(ba, a1) b1 = MatMul(n, wb) b0 = Add(b1, bb) y0 = Neg(a0) y1 = Neg(b0)",
        TWO,
        ["MatMul", "Add", "Split"],
    ),
    "7, heads of different sizes": (
        THREE + HEADS.replace("(a0, four)", "(a0, eight)") + END,
        OUTS,
        ["MatMul", "Split", "Reshape", "Reshape", "Reshape"],
    ),
    "7, one part is read elsewhere": (
        THREE + HEADS + END + " y3 = Neg(c0)",
        OUTS + ", float[B,S,4] y3",
        ["MatMul", "Split", "Reshape", "Reshape", "Reshape"],
    ),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_products_that_are_divided(spelling: str) -> None:
    body, outputs, made = SPELLINGS[spelling]
    proto = model(body, outputs)
    result, report = fused(proto)
    assert sorted(op for op in others(result) if op != "Neg") == sorted(made)
    (line,) = lines(report)
    assert (line.status, line.op, line.added) == ("fused", "MatMul", len(made) - made.count("Reshape") // 3 * 3)
    assert len([tensor for tensor in result.graph.initializer if len(tensor.dims) == 2]) == 1
    assert_equal(proto, result, odd=False)


def test_gate_and_up() -> None:
    proto = model("a0 = MatMul(n, wb) b1 = MatMul(n, wc) b0 = Add(b1, bc) " + GATED, "float[B,S,4] y")
    result, report = fused(proto)
    assert others(result) == ["MatMul", "Add"]
    assert [line.op for line in lines(report)] == ["SwiGlu", "MatMul"]
    assert_equal(proto, result, odd=False)


@pytest.mark.parametrize("transposed", [0, 1])
def test_gemm(transposed: int) -> None:
    names = ("ta", "tb") if transposed else ("wa", "wb")
    body = (
        f"f = Reshape(n, rows) a0 = Gemm<transB={transposed}>(f, {names[0]}, ba) "
        f"b0 = Gemm<transB={transposed}>(f, {names[1]}) c0 = Gemm<transB=0>(f, wc, bc) d0 = Gemm<transB=1>(f, td) "
        "y0 = Neg(a0) y1 = Neg(b0) y2 = Neg(c0) y3 = Neg(d0)"
    )
    outputs = "float[R,8] y0, float[R,4] y1, float[R,4] y2, float[R,4] y3"
    proto = model(body, outputs, rows=np.array([-1, 8]), td=weights()["tb"])
    result, _ = fused(proto)
    assert others(result).count("Gemm") == 2
    assert others(result).count("Split") == 1
    assert_equal(proto, result, odd=False)


def test_products_of_a_product() -> None:
    """The operand of the second group is a part of the first one."""
    second = "d0 = MatMul(a0, td) f0 = MatMul(a0, te) h0 = MatMul(a0, tf) z0 = Neg(d0) z1 = Neg(f0) z2 = Neg(h0)"
    given = {name: weights()["wb"] for name in ("td", "te", "tf")}
    proto = model(THREE + FLAT_END + " " + second, f"{FLAT}, {FLAT.replace('y', 'z').replace('8', '4')}", **given)
    result, _ = fused(proto)
    assert others(result).count("MatMul") == 2
    assert_equal(proto, result, odd=False)


@pytest.mark.parametrize("large", [False, True])
def test_bfloat16(large: bool, tmp_path: Path) -> None:
    """ONNX Runtime multiplies no bfloat16 on every machine: the weight alone is looked at."""
    columns = 8192 if large else 8
    given = {name: RNG.standard_normal((8, columns)).astype(ml_dtypes.bfloat16) for name in ("wa", "wb", "wc")}
    outputs = ", ".join(f"bfloat16[B,S,{columns}] y{number}" for number in range(3))
    proto = model("k = Cast<to=16>(n) " + THREE.replace("(n", "(k") + FLAT_END, outputs, **given)
    onnx.save(proto, tmp_path / "model.onnx")
    fa_compiler.optimize(tmp_path / "model.onnx", tmp_path / "fused.onnx", target="ascend")
    written = onnx.load(tmp_path / "fused.onnx")
    (weight,) = (tensor for tensor in written.graph.initializer if len(tensor.dims) == 2)
    assert weight.raw_data == np.concatenate(list(given.values()), axis=1).tobytes()


def test_weights_in_constant_nodes() -> None:
    proto = model(THREE + FLAT_END, FLAT)
    for tensor in [tensor for tensor in proto.graph.initializer if tensor.name in ("wa", "wb")]:
        proto.graph.node.insert(0, onnx.helper.make_node("Constant", [], [tensor.name], value=tensor))
        proto.graph.initializer.remove(tensor)
    result, _ = fused(proto)
    assert others(result).count("MatMul") == 1
    assert_equal(proto, result, odd=False)


def test_layers_that_share_weights() -> None:
    second = THREE.replace("n,", "n2,").replace("a0", "d0").replace("b0", "f0").replace("c0", "h0")
    body = THREE + "n2 = Neg(n) " + second + FLAT_END + " z0 = Neg(d0) z1 = Neg(f0) z2 = Neg(h0)"
    proto = model(body, f"{FLAT}, {FLAT.replace('y', 'z')}")
    result, _ = fused(proto)
    assert others(result).count("MatMul") == 2
    assert len([tensor for tensor in result.graph.initializer if len(tensor.dims) == 2]) == 1
    assert_equal(proto, result, odd=False)


def test_a_bias_of_one_part_changes_no_sign_of_zero() -> None:
    zero = {"wa": np.zeros((8, 8), np.float32), "wb": np.zeros((8, 4), np.float32)}
    proto = model(ADDED + FLAT_END, FLAT, **zero)
    result, _ = fused(proto)
    x = {"x": -np.ones((1, 2, 8), np.float32)}
    for one, two in zip(run(proto, x), run(result, x), strict=True):
        np.testing.assert_array_equal(np.signbit(one), np.signbit(two))


def test_half_precision() -> None:
    proto = model(
        "k = Cast<to=10>(n) a0 = MatMul(k, wa) b0 = MatMul(k, wb) c0 = MatMul(k, wc) " + FLAT_END,
        FLAT.replace("float", "float16"),
        **{name: array for name, array in weights(np.float16).items() if name.startswith("w")},
    )
    result, _ = fused(proto)
    assert others(result).count("MatMul") == 1
    assert_equal(proto, result, odd=False)


LOW_RANK = "l1 = MatMul(n, wb) l2 = MatMul(l1, wd) a = Add(a0, l2) y0 = Neg(a) y2 = Neg(c0)"
APART: dict[str, tuple[str, str, dict[str, Array], str | None]] = {
    "two products save no kernel": (
        "a0 = MatMul(n, wa) b0 = MatMul(n, wb) y0 = Neg(a0) y1 = Neg(b0)",
        TWO,
        {},
        None,
    ),
    "a low rank beside a product (LoRA)": (
        "a0 = MatMul(n, wa) c0 = MatMul(n, wc) " + LOW_RANK,
        "float[B,S,8] y0, float[B,S,4] y2",
        {"wd": np.ones((4, 8), np.float32)},
        None,
    ),
    "weights of other sizes": (
        "a0 = MatMul(n, wa) b0 = MatMul(n, wb) c0 = MatMul(x, wc) " + FLAT_END,
        FLAT,
        {},
        None,
    ),
    "a factor": (
        "f = Reshape(n, rows) a0 = Gemm<alpha=2.0>(f, wa) b0 = Gemm<alpha=2.0>(f, wb) c0 = Gemm<alpha=2.0>(f, wc) "
        + FLAT_END,
        "float[R,8] y0, float[R,4] y1, float[R,4] y2",
        {"rows": np.array([-1, 8])},
        None,
    ),
    "products that are outputs": ("y0 = MatMul(n, wa) y1 = MatMul(n, wb) y2 = MatMul(n, wc)", FLAT, {}, None),
    "a weight is read elsewhere": (
        THREE + FLAT_END + " z = Neg(wb)",
        FLAT + ", float[8,4] z",
        {},
        "is not read by them alone",
    ),
    "one weight twice": (
        "f = Reshape(n, rows) a0 = Gemm(f, wa, ba) b0 = Gemm(f, wb, bb) c0 = Gemm(f, wb, bc) " + FLAT_END,
        "float[R,8] y0, float[R,4] y1, float[R,4] y2",
        {"rows": np.array([-1, 8])},
        "two of them read one weight",
    ),
    "double": (
        "k = Cast<to=11>(n) a0 = MatMul(k, da) b0 = MatMul(k, db) c0 = MatMul(k, dc) "
        + FLAT_END.replace("Neg", "Cast<to=1>"),
        FLAT.replace("8", "4"),
        {name: RNG.standard_normal((8, 4)) for name in ("da", "db", "dc")},
        "is of the type DOUBLE",
    ),
    "quantised weights": (
        "v = DequantizeLinear(q, scale) a0 = MatMul(n, v) b0 = MatMul(n, wb) c0 = MatMul(n, wc) " + FLAT_END,
        FLAT,
        {"q": np.ones((8, 8), np.int8), "scale": np.array(0.5, np.float32)},
        "is quantised",
    ),
}


@pytest.mark.parametrize("miss", APART)
def test_what_stays_apart(miss: str) -> None:
    body, outputs, given, reason = APART[miss]
    proto = model(body, outputs, **given)
    result, report = fused(proto)
    products = ("MatMul", "Gemm")
    assert sum(op in products for op in others(result)) == sum(op in products for op in others(proto))
    found = lines(report)
    assert [line.code for line in found] == ([Code.WEIGHTS] if reason else [])
    assert all(reason in str(line.reason) for line in found if reason)
    assert_equal(proto, result, odd=False)


def test_a_weight_that_a_caller_may_replace() -> None:
    proto = model(THREE + FLAT_END, FLAT)
    proto.graph.input.append(onnx.helper.make_tensor_value_info("wb", onnx.TensorProto.FLOAT, [8, 4]))
    _, report = fused(proto)
    (line,) = lines(report)
    assert "a caller may replace the weight 'wb'" in str(line.reason)
    assert str(line.hint).startswith("export again with weights that are constants")


def test_weights_of_an_old_file_are_inputs_too() -> None:
    proto = model(THREE + FLAT_END, FLAT)
    proto.ir_version = 3
    for tensor in proto.graph.initializer:
        proto.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    _, report = fused(proto)
    (line,) = lines(report)
    assert "the weight 'wa' is not read by them alone" in str(line.reason)


def test_a_branch_reads_weights_of_the_graph_around_it() -> None:
    proto = model("t = Constant<value=bool[1] {1}>() u = Squeeze(t) y0 = Neg(n)", "float[B,S,8] y0")
    branch = model(THREE + "k0 = Add(b0, c0) k1 = Add(a0, k2) k2 = Concat<axis=-1>(k0, k0)", "float[B,S,8] k1")
    start = next(place for place, node in enumerate(branch.graph.node) if node.op_type == "MatMul")
    nodes = [*branch.graph.node[start:-2], branch.graph.node[-1], branch.graph.node[-2]]
    inner = onnx.helper.make_graph(nodes, "branch", [], branch.graph.output)
    proto.graph.node.append(onnx.helper.make_node("If", ["u"], ["y1"], then_branch=inner, else_branch=inner))
    proto.graph.output.append(onnx.helper.make_tensor_value_info("y1", onnx.TensorProto.FLOAT, ["B", "S", 8]))
    held = {tensor.name for tensor in proto.graph.initializer}
    proto.graph.initializer.extend(tensor for tensor in branch.graph.initializer if tensor.name not in held)
    result, report = fused(proto)
    assert {line.code for line in lines(report)} == {Code.WEIGHTS}
    assert_equal(proto, result, odd=False)


def test_nothing_is_joined_where_nothing_is_fused() -> None:
    proto = parse("a0 = MatMul(x, wa) b0 = MatMul(x, wb) c0 = MatMul(x, wc) " + FLAT_END, "float[B,S,8] x", FLAT)
    proto.graph.initializer.extend(numpy_helper.from_array(weights()[name], name) for name in ("wa", "wb", "wc"))
    _, report = fused(proto)
    assert not report.is_changed


def test_none() -> None:
    result, report = fused(model(THREE + FLAT_END, FLAT), join_weights="none")
    assert others(result).count("MatMul") == 3
    assert not lines(report)
    with pytest.raises(fa_compiler.InputError, match='`join_weights` needs target="ascend"'):
        fa_compiler.optimize(model(THREE + FLAT_END, FLAT), join_weights="all")
    with pytest.raises(
        fa_compiler.InputError, match="unknown value 'some' of `join_weights`: use one of own, all, none"
    ):
        fused(model(THREE + FLAT_END, FLAT), join_weights="some")
    with pytest.raises(fa_compiler.InputError, match="unknown value 'norms' of `only`: use 'attention'"):
        fused(model(THREE + FLAT_END, FLAT), only="norms")


def in_files(folder: Path, columns: int = 4096) -> Path:
    """A model whose weights lie in a file beside it, with one that only it reads."""
    given = {name: RNG.standard_normal((8, columns)).astype(np.float32) for name in ("wa", "wb", "wc", "wd")}
    outputs = ", ".join(f"float[B,S,{columns}] y{number}" for number in range(4))
    body = THREE + "d0 = MatMul(x, wd) " + FLAT_END + " y3 = Neg(d0)"
    folder.mkdir()
    proto, path = model(body, outputs, **given), folder / "model.onnx"
    onnx.save(proto, path, save_as_external_data=True, location="weights.bin", size_threshold=1024)
    return path


def test_weights_in_other_files_stay_where_they_are(tmp_path: Path) -> None:
    path = in_files(tmp_path / "in")
    report = fa_compiler.optimize(path, tmp_path / "in" / "fused.onnx", target="ascend").report
    (line,) = lines(report)
    assert "lies in a file beside the model's" in str(line.reason)
    assert line.hint == "--join-weights all writes them anew"
    assert {file.name for file in (tmp_path / "in").iterdir()} == {"model.onnx", "weights.bin", "fused.onnx"}


@pytest.mark.parametrize("folder", ["in", "out"])
def test_weights_of_other_files_are_joined_in_another_file(tmp_path: Path, folder: str) -> None:
    path, size = in_files(tmp_path / "in"), 8 * 4096 * 4
    (tmp_path / "out").mkdir()
    output = tmp_path / folder / "fused.onnx"
    fa_compiler.optimize(path, output, target="ascend", join_weights="all")
    written = onnx.load(output, load_external_data=False)
    joined = [tensor for tensor in written.graph.initializer if list(tensor.dims) == [8, 3 * 4096]]
    assert len(joined) == 1
    assert onnx.external_data_helper.uses_external_data(joined[0])
    data = (tmp_path / folder / "fused.onnx.data").stat().st_size
    assert data == (3 if folder == "in" else 4) * size  # the weight that stays is read where it was, or copied alone
    assert_equal(onnx.load(path), onnx.load(output), odd=False)


def test_weights_in_the_model_file_are_joined_there(tmp_path: Path) -> None:
    path = in_files(tmp_path / "in")
    onnx.save(onnx.load(path), tmp_path / "model.onnx")
    result = fa_compiler.optimize(tmp_path / "model.onnx", tmp_path / "fused.onnx", target="ascend")
    assert [line.op for line in lines(result.report)] == ["MatMul"]
    assert {file.name for file in tmp_path.iterdir()} == {"in", "model.onnx", "fused.onnx"}
    assert_equal(onnx.load(tmp_path / "model.onnx"), onnx.load(tmp_path / "fused.onnx"), odd=False)
    assert result.model == onnx.load(tmp_path / "fused.onnx")


def test_transposed_weights_in_files(tmp_path: Path) -> None:
    """The rows of the parts follow each other."""
    given = {name: RNG.standard_normal((2048, 8)).astype(np.float32) for name in ("wa", "wb", "wc")}
    body = "f = Reshape(n, rows) " + THREE.replace("MatMul(n", "Gemm<transB=1>(f") + FLAT_END
    outputs = ", ".join(f"float[R,2048] y{number}" for number in range(3))
    onnx.save(model(body, outputs, rows=np.array([-1, 8]), **given), tmp_path / "model.onnx")
    fa_compiler.optimize(tmp_path / "model.onnx", tmp_path / "fused.onnx", target="ascend")
    written = onnx.load(tmp_path / "fused.onnx")
    (weight,) = (numpy_helper.to_array(tensor) for tensor in written.graph.initializer if len(tensor.dims) == 2)
    np.testing.assert_array_equal(weight, np.concatenate(list(given.values())))


def test_a_model_in_memory() -> None:
    proto = model(THREE + FLAT_END, FLAT)
    held = ir.from_proto(proto)
    result = FuseAttention(target="ascend")(held)
    assert result.modified
    assert_equal(proto, ir.to_proto(result.model), odd=False)
