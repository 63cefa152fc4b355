"""A merged decoder, an If with and without a past as optimum writes it, step by step as a server runs it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

import fa_compiler
from fa_compiler.command_line.main import main
from fa_compiler.passes import Report

HEADS, SIZE, WORDS, ROOM = 2, 8, 40, 12
WIDTH = HEADS * SIZE
CACHES = ("decoder.key", "decoder.value", "encoder.key", "encoder.value")

ATTEND = (
    "{0}_t = Transpose<perm=[0,1,3,2]>({2}) {0}_s = MatMul({1}, {0}_t) {0}_c = Mul({0}_s, scale) {4}"
    "{0}_p = Softmax<axis=-1>({5}) {0}_y = MatMul({0}_p, {3}) {0}_z = Transpose<perm=[0,2,1,3]>({0}_y) "
    "{0}_o = Reshape({0}_z, flat) "
)
CAUSAL = (
    "ids_shape = Shape({0}ids) {0}n = Gather(ids_shape, one) {0}r = Range(zero, {0}n, one) "
    "{0}col = Unsqueeze({0}r, ax1) {0}mask = LessOrEqual({0}r, {0}col) {0}m = Where({0}mask, {0}self_c, low) "
).replace("{0}ids", "input_ids")


def projected(name: str, value: str, weight: str) -> str:
    return (
        f"{name}_w = MatMul({value}, {weight}) {name}_r = Reshape({name}_w, heads) "
        f"{name} = Transpose<perm=[0,2,1,3]>({name}_r) "
    )


def branch(prefix: str, cached: bool) -> str:
    """The nodes of one branch. Self attention, then cross attention whose keys come from the encoder or the cache."""
    p = prefix
    text = f"{p}x = Gather(table, input_ids) "
    text += projected(f"{p}q", f"{p}x", "wq") + projected(f"{p}nk", f"{p}x", "wk") + projected(f"{p}nv", f"{p}x", "wv")
    if cached:
        text += f"{p}k = Concat<axis=2>(past_decoder_key, {p}nk) {p}v = Concat<axis=2>(past_decoder_value, {p}nv) "
        text += f"{p}ek = Constant<value=float[0,2,1,8] {{}}>() {p}ev = Constant<value=float[0,2,1,8] {{}}>() "
        keys, values = "past_encoder_key", "past_encoder_value"
    else:
        text += f"{p}k = Identity({p}nk) {p}v = Identity({p}nv) "
        text += projected(f"{p}ek", "encoder", "wk") + projected(f"{p}ev", "encoder", "wv")
        keys, values = f"{p}ek", f"{p}ev"
    mask = "" if cached else CAUSAL.replace("{0}", p).replace("ids_shape", f"{p}shape")
    score = f"{p}self_c" if cached else f"{p}m"
    text += ATTEND.format(f"{p}self", f"{p}q", f"{p}k", f"{p}v", mask, score)
    text += projected(f"{p}cq", f"{p}self_o", "wq")
    text += ATTEND.format(f"{p}cross", f"{p}cq", keys, values, "", f"{p}cross_c")
    return text + f"{p}sum = Add({p}self_o, {p}cross_o) {p}logits = MatMul({p}sum, out) "


def merged(swap: bool = False) -> onnx.ModelProto:
    """The model. With `swap` the branch with a past is the else_branch."""
    bodies = []
    for prefix, cached in (("a_", True), ("b_", False)):
        ranks = {"logits": 3, "k": 4, "v": 4, "ek": 4, "ev": 4}
        shapes = {name: ",".join(f"{name}{axis}" for axis in range(rank)) for name, rank in ranks.items()}
        outputs = ", ".join(f"float[{shape}] {prefix}{name}" for name, shape in shapes.items())
        bodies.append(f"{prefix}g () => ({outputs}) {{ {branch(prefix, cached)} }}")
    then, other = bodies[::-1] if swap else bodies
    cache = "float[batch,2,{0},8]"
    inputs = ", ".join(
        [
            "int64[batch,seq] input_ids",
            "float[batch,enc,16] encoder",
            *(
                f"{cache.format('past' if 'dec' in name else 'enc_past')} past_{name.replace('.', '_')}"
                for name in CACHES
            ),
            "bool[1] use_cache_branch",
        ]
    )
    results = ", ".join(f"{cache.format(name[0] + 'grown')} present_{name.replace('.', '_')}" for name in CACHES)
    presents = ", ".join(f"present_{name.replace('.', '_')}" for name in CACHES)
    condition = "flag = Not(use_cache_branch) " if swap else "flag = Identity(use_cache_branch) "
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> g ({inputs}) => (float[batch,seq,40] logits, {results}) '
        "<float scale = {0.35355338}, float low = {-3.4028234663852886e38}, int64 one = {1}, int64 zero = {0}, "
        "int64[1] ax1 = {1}, int64[4] heads = {0,-1,2,8}, int64[3] flat = {0,-1,16}> "
        f"{{ {condition} logits, {presents} = If (flag) <then_branch = {then}, else_branch = {other}> }}"
    )
    rng = np.random.default_rng(0)
    for name, shape in {"table": (WORDS, WIDTH), "wq": (WIDTH,) * 2, "wk": (WIDTH,) * 2, "wv": (WIDTH,) * 2,
                        "out": (WIDTH, WORDS)}.items():  # fmt: skip
        array = (rng.standard_normal(shape) / 2).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


def optimised(model: onnx.ModelProto, folder: Path) -> tuple[Path, Path, Report]:
    original, changed = folder / "decoder_model_merged.onnx", folder / "in_place.onnx"
    onnx.save(model, original)
    return original, changed, fa_compiler.optimize(original, changed, in_place_caches=True).report


def session(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.register_custom_ops_library(fa_compiler.custom_ops_library())
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("swap", [False, True])
def test_a_server_runs_it_in_place(swap: bool, tmp_path: Path) -> None:
    """A first step fills the buffers from their beginning, whatever was in them; a later one writes its rows only."""
    original, changed, report = optimised(merged(swap), tmp_path)
    assert [block.status for block in report.blocks] == ["fused"] * 4
    assert [(line.past, line.present, line.copied) for line in report.caches[:2]] == [
        (f"past_decoder_{kind}", f"present_decoder_{kind}", ()) for kind in ("key", "value")
    ]
    assert [line.reason for line in report.caches[2:]] == ["nothing is appended to it"] * 2
    rng, plain, bound = np.random.default_rng(1), session(original), session(changed)
    encoder = rng.standard_normal((3, 5, WIDTH)).astype(np.float32)
    names = [name.replace(".", "_") for name in CACHES]
    feeds: dict[str, np.ndarray] = {f"past_{name}": np.zeros((3, HEADS, 1, SIZE), np.float32) for name in names}
    buffers = {name: ort.OrtValue.ortvalue_from_numpy(np.full((3, HEADS, ROOM, SIZE), np.nan, np.float32))
               for name in names[:2]}  # fmt: skip
    cross = {name: np.zeros((3, HEADS, 1, SIZE), np.float32) for name in names[2:]}
    filled = 0
    for rows in (4, 1, 1, 2, 1, 4):  # the last step is the first one of another sequence
        first = rows == 4
        ids = rng.integers(0, WORDS, (3, rows))
        step = {"input_ids": ids, "encoder": encoder, "use_cache_branch": np.array([not first])}
        wanted = dict(zip([value.name for value in plain.get_outputs()], plain.run(None, step | feeds), strict=True))
        filled = 0 if first else filled
        before = {name: value.numpy().copy() for name, value in buffers.items()}
        binding = bound.io_binding()
        own = step | {f"past_{name}": array for name, array in cross.items()} | {"cache_length": np.array([filled])}
        for name, array in own.items():
            binding.bind_cpu_input(name, np.ascontiguousarray(array))
        for name, value in buffers.items():
            binding.bind_ortvalue_input(f"past_{name}", value)
            binding.bind_ortvalue_output(f"present_{name}", value)
        for name in ("logits", *(f"present_{name}" for name in cross)):
            binding.bind_output(name)
        bound.run_with_iobinding(binding)
        filled += rows
        found = dict(zip([*(f"present_{name}" for name in buffers), "logits", *(f"present_{name}" for name in cross)],
                         binding.get_outputs(), strict=True))  # fmt: skip
        np.testing.assert_allclose(found["logits"].numpy(), wanted["logits"], rtol=0, atol=1e-5)
        for name, value in buffers.items():
            assert found[f"present_{name}"].data_ptr() == value.data_ptr()
            after, grown = value.numpy(), wanted[f"present_{name}"]
            np.testing.assert_allclose(after[:, :, :filled], grown, rtol=0, atol=1e-6)
            same = (after == before[name]) | (np.isnan(after) & np.isnan(before[name]))
            assert set(np.nonzero(~same)[2]) <= set(range(filled - rows, filled)), "other rows were written"
            feeds[f"past_{name}"] = grown
        if first:  # constant from here on: the outputs of later steps are empty
            cross = {name: found[f"present_{name}"].numpy().copy() for name in cross}
            feeds |= {f"past_{name}": wanted[f"present_{name}"] for name in cross}


@pytest.mark.parametrize("cached", [True, False])
def test_verify_takes_both_branches(cached: bool, tmp_path: Path) -> None:
    """The past of a first step is longer than what the step gives, and is not looked at."""
    original, changed, _ = optimised(merged(), tmp_path)
    rng = np.random.default_rng(2)
    feeds: dict[str, np.ndarray] = {"input_ids": rng.integers(0, WORDS, (2, 3)), "use_cache_branch": np.array([cached])}
    feeds["encoder"] = rng.standard_normal((2, 5, WIDTH)).astype(np.float32)
    feeds |= {f"past_{name.replace('.', '_')}": rng.standard_normal((2, HEADS, 9, SIZE)).astype(np.float32)
              for name in CACHES}  # fmt: skip
    np.savez(tmp_path / "feeds.npz", **feeds)
    assert main(["verify", str(original), str(changed), "--inputs", str(tmp_path / "feeds.npz"), "--quiet"]) == 0


@pytest.mark.parametrize("place", [0, 1])
def test_a_fault_in_either_branch_is_found(place: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`verify` makes the inputs itself and runs both branches."""
    original, changed, _ = optimised(merged(), tmp_path)
    assert main(["verify", str(original), str(changed), "--quiet"]) == 0
    model = onnx.load(changed)
    nodes = next(node for node in model.graph.node if node.op_type == "If").attribute[place].g.node
    next(node for node in nodes if node.op_type == "Add" and node.output[0].endswith("sum")).op_type = "Sub"
    onnx.save(model, changed)
    capfd.readouterr()
    assert main(["verify", str(original), str(changed)]) == 1
    assert "of 5 outputs differ" in capfd.readouterr().out


REFUSED = {
    "the result is read": "what it grows to is not one output of the model that no node reads",
    "read outside of the If": "it is read within a subgraph",
    "read in the other branch": "it is read within a subgraph",
    "the other branch gives heads of another size": "the other branch of the If gives an output of other sizes",
}


def refused(name: str) -> onnx.ModelProto:
    """A merged decoder of which the cache of keys is no buffer."""
    model = merged()
    nodes, first = model.graph.node, model.graph.node[-1].attribute[1].g.node
    if name in ("the result is read", "read outside of the If"):
        source = "present_decoder_key" if "result" in name else "past_decoder_key"
        nodes.add(op_type="ReduceMax", input=[source], output=["top"])
        model.graph.output.append(helper.make_tensor_value_info("top", onnx.TensorProto.FLOAT, [1] * 4))
        return model
    place = next(index for index, node in enumerate(first) if node.output[0] == "b_k")
    if name == "read in the other branch":
        first[place].CopyFrom(helper.make_node("Sum", ["b_nk", "past_decoder_key"], ["b_k"]))
    else:
        first[place].CopyFrom(helper.make_node("Concat", ["b_nk", "b_nk"], ["b_k"], axis=3))
    return model


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    """The cache stays as it is, with the reason; that of the values becomes a buffer all the same."""
    model = refused(name)
    changed = fa_compiler.optimize(model, in_place_caches=True)
    key, value = changed.report.caches[:2]
    assert (key.present, key.reason) == (None, REFUSED[name])
    assert value.present == "present_decoder_value"
