"""The library as ONNX Runtime meets it: symbols, registration, threads, memory, typed descriptors."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from fa_compiler import ops
from fa_compiler.lowering.ort import custom_ops_library, library, library_path, register_custom_ops
from fa_compiler.lowering.ort.eager import ORT_ERRORS, compute
from fa_compiler.op_registry import dtypes, full_attrs, get
from tests.kernel_variants import compiled, runs
from tests.systems import ELF, PEAK_MEMORY, SOURCES
from tools import descriptors

from .problems import OP, OUTPUTS, TRIANGLE, Form, agree, check
from .variants import AVAILABLE, VARIANTS

ROOT = Path(__file__).resolve().parents[2]
_AVX2 = {"avx2", "fma", "f16c"}
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
_AVX512BF16 = _AVX512 | {"avx512_bf16", "avx512_vnni"}
NEEDED = {
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512vnni": _AVX512 | {"avx512_vnni"},
    "avx512bf16": _AVX512BF16,
    "amx": _AVX512BF16 | {"amx_tile", "amx_bf16"},
}
"""What each variant for x86-64 needs of the processor, in the words of Linux."""
SYMBOLS = [
    "CreateEpFactories",
    "FaCompilerHaveOperators",
    "FaCompilerSetMatcher",
    "RegisterCustomOps",
    "ReleaseEpFactory",
]


@ELF
def test_the_library_shows_its_entry_points_and_needs_only_libc() -> None:
    shown = subprocess.run(
        ["nm", "-D", "--defined-only", library_path()], capture_output=True, text=True, check=True
    ).stdout.split()
    assert [word for word in shown if len(word) > 1 and not re.fullmatch("[0-9a-f]+", word)] == SYMBOLS
    dynamic = subprocess.run(["readelf", "-d", library_path()], capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"NEEDED.*\[(\S+?)\.so", dynamic))
    assert needed <= {"libc", "libm", "libpthread", "ld-linux-x86-64", "ld-linux-aarch64"}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_of_the_machine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skipped where it is missing; the tests of the kernels run on those that are there."""
    if name not in AVAILABLE:
        pytest.skip(f"this machine does not run the variant {name}")
    monkeypatch.setenv("FA_COMPILER_ISA", name)
    form = Form()
    check(form.inputs(np.random.default_rng(1)), form.all_attrs)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="other processors have one instruction set")
def test_the_library_has_all_variants() -> None:
    """The tests of the kernels run on those that it has. Old assemblers do not know the instructions of amx."""
    lacking = NEEDED.keys() - {"amx"} - {*compiled()}
    assert not lacking, f"the library was compiled for this machine alone, without {lacking}; make test compiles all"


@ELF
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have one instruction set")
def test_a_variant_runs_where_the_system_tells_of_its_instructions() -> None:
    """Not the baseline alone, as where a toolchain's question to the processor is always answered with no."""
    (flags, *_) = re.findall(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    for name in {*compiled()} - {"baseline", "reference"}:
        assert runs(name) == (NEEDED[name] <= set(flags.split())), name


def test_the_library_is_not_unloaded() -> None:
    """Destructors of static objects may be called at the end of the process, and have to be there."""
    code = f"""
import ctypes
import _ctypes
path = {library.library_path()!r}
loaded = ctypes.CDLL(path)
address = ctypes.cast(loaded.RegisterCustomOps, ctypes.c_void_p).value
if hasattr(_ctypes, "dlclose"):
    from pathlib import Path
    _ctypes.dlclose(loaded._handle)
    assert path in Path("/proc/self/maps").read_text(encoding="utf-8")
else:
    for _ in range(3):
        _ctypes.FreeLibrary(loaded._handle)
    ctypes.string_at(address, 16)  # an access violation if it is gone
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_both_names_give_an_absolute_path() -> None:
    assert library_path() == custom_ops_library()
    assert Path(library_path()).is_absolute()


def test_a_missing_library_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_FILE", "libnothing.so")
    monkeypatch.setattr(library, "_recorded", lambda: None)
    monkeypatch.setattr(library, "_built", list)
    library_path.cache_clear()
    try:
        with pytest.raises(library.LibraryNotBuilt, match="pip install"):
            library_path()
    finally:
        library_path.cache_clear()


UNUSABLE = {
    "no library": (b"no library", "cannot be loaded: "),
    "empty": (b"", "cannot be loaded: "),
    "of another release": (None, "lacks_this"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_library_that_cannot_be_loaded_says_so(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is damaged or made for another system, or it lacks a function that this release calls."""
    content, told = UNUSABLE[name]
    if content is not None:
        place = tmp_path / library._FILE
        place.write_bytes(content)
        monkeypatch.setattr(library, "library_path", lambda: str(place))
        with pytest.raises(library.LibraryNotLoaded, match="fa_compiler again") as raised:
            register_custom_ops(ort.SessionOptions())
        assert str(raised.value).count(str(place)) == 1
    with pytest.raises(library.LibraryNotLoaded, match=told):
        library.loaded_library("RegisterCustomOps", "lacks_this")


def test_an_error_of_registering_is_that_of_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library can be loaded, so it is not the library's fault."""

    class Options:
        def register_custom_ops_library(self, path: str) -> None:
            raise RuntimeError("two of a name")

    with pytest.raises(RuntimeError, match="two of a name"):
        register_custom_ops(Options())  # type: ignore[arg-type]


def test_only_installed_builds_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a library for sanitizers, nor one for another processor."""
    monkeypatch.setattr(library, "__file__", str(tmp_path / "lowering" / "ort" / "library.py"))
    for name in ("py3-none-linux_x86_64", "sanitize", "neon"):
        (tmp_path / "build" / name).mkdir(parents=True)
        (tmp_path / "build" / name / library._FILE).touch()
    assert [path.parent.name for path in library._built()] == ["py3-none-linux_x86_64"]


def test_registering_twice_is_harmless() -> None:
    options = ort.SessionOptions()
    for _ in range(2):
        register_custom_ops(options)
    for _ in range(2):
        ort.InferenceSession(_model().SerializeToString(), options, providers=["CPUExecutionProvider"])
    # Options that are gone must not be confused with new ones at the same address.
    for _ in range(20):
        options = ort.SessionOptions()
        register_custom_ops(options)
        ort.InferenceSession(_model().SerializeToString(), options, providers=["CPUExecutionProvider"])


def test_a_session_may_have_some_operators_only() -> None:
    """Those that an entry of its options names, and none whose name is a part of such a name."""
    for names, known in (("FlashAttentionScoreGrad,FlashAttentionScore", True), ("FlashAttentionScoreGrad", False)):
        options = ort.SessionOptions()
        options.add_session_config_entry(library.OPERATORS, names)
        register_custom_ops(options)
        model = _model().SerializeToString()
        if known:
            ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        else:
            with pytest.raises(ORT_ERRORS, match="FlashAttentionScore.* is not a registered function/op"):
                ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


@SOURCES
def test_descriptors_are_current() -> None:
    assert descriptors.PATH.read_text(encoding="utf-8") == descriptors.render(), "run python -m tools.descriptors"


@pytest.mark.parametrize(
    "row",
    descriptors.combinations(get(OP)),
    ids=lambda row: "-".join(row[name].removeprefix("DT_").lower() for name in ("query", "real_shift", "atten_mask")),
)
def test_every_type_combination(row: dict[str, str]) -> None:
    rng = np.random.default_rng(5)
    form = Form(dtype=dtypes.to_numpy(row["query"]).name, attrs={"pse_type": 0})
    inputs = form.inputs(rng) | {
        "real_shift": rng.standard_normal((1, 2, 33, 29)).astype(dtypes.to_numpy(row["real_shift"])),
        "atten_mask": (rng.random((33, 29)) < 0.3).astype(dtypes.to_numpy(row["atten_mask"])),
    }
    check(inputs, form.all_attrs)


@pytest.mark.parametrize("present", range(8))
def test_optional_inputs_and_outputs_absent_and_present(present: int) -> None:
    """A missing input in the middle and at the end, a missing output at the start: ONNX Runtime names them "" or
    leaves them off, and older versions crash when a library asks for their types."""
    rng = np.random.default_rng(6)
    form = Form(attrs={"pse_type": 1 - (present & 1)})
    inputs = form.inputs(rng)
    if present & 1:
        inputs["real_shift"] = rng.standard_normal((1, 2, 33, 29)).astype(np.float32)
    if present & 2:
        inputs["prefix"] = np.array([1, 2])  # of sparse_mode 5 and 6, taken and ignored in others
    if present & 4:
        inputs["atten_mask"] = rng.random((33, 29)) < 0.3
    for outputs in (("attention_out",), ("softmax_max", "attention_out"), OUTPUTS):
        check(inputs, form.all_attrs, outputs)


def test_ignored_inputs_do_not_matter() -> None:
    rng = np.random.default_rng(8)
    form = Form()
    inputs = form.inputs(rng)
    spec = get(OP)
    attrs = full_attrs(spec, form.all_attrs)
    plain = compute(spec, inputs, attrs, ["attention_out"])["attention_out"]
    ignored = {
        "drop_mask": np.zeros(7, np.uint8),  # keep_prob is 1
        "padding_mask": np.ones(3, np.float32),
        "prefix": np.array([1, 2]),  # of sparse_mode 5 and 6
        "q_start_idx": np.array([4]),  # of pse_type 2 and 3
        "kv_start_idx": np.array([5]),
    }
    got = compute(spec, inputs | ignored, attrs, ["attention_out"])["attention_out"]
    np.testing.assert_array_equal(got, plain)


def test_four_threads_share_one_session() -> None:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    register_custom_ops(options)
    session = ort.InferenceSession(_model().SerializeToString(), options, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(9)
    feeds = [
        dict(zip("qkv", rng.standard_normal((3, 1, 4, 64 + 16 * i, 32), np.float32), strict=True)) for i in range(8)
    ]
    alone = [session.run(None, feed)[0] for feed in feeds]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda feed: session.run(None, feed)[0], feeds * 10))
    for i, got in enumerate(together):
        np.testing.assert_array_equal(got, alone[i % len(feeds)])


# Many rows, which share packed keys; a span that packs for itself, and a few rows, whose keys are cut into chunks.
@pytest.mark.parametrize(("queries", "keys"), [(130, 300), (40, 3000), (2, 5000)])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_do_not_depend_on_the_number_of_threads(threads: int, queries: int, keys: int) -> None:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    register_custom_ops(options)
    session = ort.InferenceSession(_model().SerializeToString(), options, providers=["CPUExecutionProvider"])
    form = Form(batch=1, heads=4, kv_heads=4, queries=queries, keys=keys)
    inputs = form.inputs(np.random.default_rng(10))
    (got,) = session.run(None, {"q": inputs["query"], "k": inputs["key"], "v": inputs["value"]})
    want = ops.run(OP, inputs, form.all_attrs | {"scale_value": 1.0}, ["attention_out"])["attention_out"]
    np.testing.assert_array_equal(got, want)


# 197 and 1,003 rows end with a few rows beyond a unit and beyond a vector, 66 rows with a tail of their own.
@pytest.mark.parametrize("faulty", [False, True])
@pytest.mark.parametrize(("heads", "queries", "causal"), [(12, 197, False), (3, 1003, True), (9, 66, True)])
def test_small_tiles_give_the_bits_of_large_ones(heads: int, queries: int, causal: bool, faulty: bool) -> None:
    """A single thread takes whole tiles. Several ones cut the last tiles, once a call has shown how many they are."""
    form = Form(batch=1, heads=heads, kv_heads=heads, queries=queries, keys=queries)
    inputs = form.inputs(np.random.default_rng(11))
    if faulty:
        inputs["value"][0, 0, 40] = np.inf
        inputs["value"][0, 1] = 3e38  # the sums overflow, although their mean does not
        inputs["query"][0, 2, 50] = np.nan
    feeds = {"q": inputs["query"], "k": inputs["key"], "v": inputs["value"]}
    model = _model(heads, causal).SerializeToString()

    def session(threads: int) -> ort.InferenceSession:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        register_custom_ops(options)
        return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    (want,) = session(1).run(None, feeds)
    several = session(5)
    for _ in range(4):
        np.testing.assert_array_equal(several.run(None, feeds)[0], want)


@PEAK_MEMORY
def test_memory_does_not_grow_with_the_square_of_the_length() -> None:
    """At 8192 x 8192 the scores of two heads alone would take 512 MiB. In a process of its own: peak memory only
    ever rises."""
    code = """
import resource
import numpy as np
from fa_compiler import ops

def run(length):
    x = np.ones((1, 2, length, 16), np.float32)
    ops.run("FlashAttentionScore", {"query": x, "key": x, "value": x},
            {"head_num": 2, "input_layout": "BNSD"}, ["attention_out"])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

run(64)
before = run(64)
print((run(8192) - before) // 1024)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment, cwd=ROOT
    )
    # The tensors (four of 1 MiB), packed keys and values (2 MiB) and a worker's memory, each some times over.
    assert int(result.stdout) < 64


def test_a_fused_node_between_others_and_with_unknown_shapes() -> None:
    """The kernel has no shape inference of its own; ONNX Runtime must not need one."""
    node = helper.make_node(
        OP,
        ["q1", "k", "v"],
        ["m", "", "", "o"],
        name="attention",
        domain="ascend",
        head_num=2,
        input_layout="BNSD",
        scale_value=1.0,
    )
    nodes = [
        helper.make_node("Add", ["q", "q"], ["q1"]),
        node,
        helper.make_node("Neg", ["o"], ["out"]),
        helper.make_node("ReduceMax", ["m"], ["top"], keepdims=0),
    ]
    model = _graph(nodes, {"out": TensorProto.FLOAT, "top": TensorProto.FLOAT})
    options = ort.SessionOptions()
    register_custom_ops(options)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    form = Form()
    inputs = form.inputs(np.random.default_rng(11))
    feeds = {"q": inputs["query"] / 2, "k": inputs["key"], "v": inputs["value"]}
    out, top = session.run(["out", "top"], feeds)
    want = ops.run(OP, inputs, form.all_attrs | {"scale_value": 1.0})
    agree(out, -want["attention_out"], "out")
    agree(top, want["softmax_max"].max(), "top")


def _model(heads: int = 4, causal: bool = False) -> onnx.ModelProto:
    node = helper.make_node(
        OP,
        ["q", "k", "v", *(["", "", "", "mask"] if causal else [])],
        ["", "", "", "out"],
        name="attention",
        domain="ascend",
        head_num=heads,
        input_layout="BNSD",
        scale_value=1.0,
        sparse_mode=3 if causal else 0,
    )
    made = _graph([node], {"out": TensorProto.FLOAT})
    if causal:
        made.graph.initializer.append(numpy_helper.from_array(TRIANGLE, "mask"))
    return made


def _graph(nodes: list[onnx.NodeProto], outputs: dict[str, int]) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * 4) for name in "qkv"],
        [helper.make_tensor_value_info(name, dtype, None) for name, dtype in outputs.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ascend", 1)]
    return helper.make_model(graph, ir_version=8, opset_imports=opsets)


def test_options_and_not_a_session() -> None:
    with pytest.raises(TypeError, match="takes the SessionOptions that a session is made with, not str"):
        register_custom_ops("model.onnx")  # type: ignore[arg-type]
