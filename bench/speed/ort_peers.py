"""Our operators and ONNX Runtime's own ones, as sessions of the same ONNX Runtime."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
import onnx
import onnxruntime as ort

from bench.speed import graphs
from bench.speed.peer import FREE, MASKED, Factory, NotOffered, Peer, Problem, set_spinning
from bench.speed.truth import OUTPUTS, Array, aligned, from_bits, probabilities, to_bits, visible
from fa_compiler.lowering.ort import register_custom_ops


def session(model: onnx.ModelProto, threads: int) -> ort.InferenceSession:
    """A session with every optimisation and our operators. Its threads are pinned, see `prepare`."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    if others := _others(threads):
        numbers = ";".join(str(core + 1) for core in others)  # processors are numbered from 1 on
        options.add_session_config_entry("session.intra_op_thread_affinities", numbers)
    set_spinning(options)
    options.log_severity_level = 4
    register_custom_ops(options)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def bound(problem: Problem, model: onnx.ModelProto, feeds: Mapping[str, Array], shared: Mapping[str, str] | None = None,
          outputs: Mapping[str, Array] | None = None) -> Peer:  # fmt: skip
    """A peer whose inputs and outputs stay in the same memory in all calls.

    `feeds` may hold more arrays than the model needs. `shared` maps an output to the input whose memory it uses. The
    other outputs of the model use the arrays in `outputs`, or new arrays in the shapes of the truth.
    """
    case, shared = problem.case, shared or {}
    made = session(model, problem.threads)
    types = {value.name: value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)}
    shapes = {"out": problem.data["q"].shape, "dq": problem.data["q"].shape}
    shapes |= {"dk": problem.data["k"].shape, "dv": problem.data["v"].shape}
    results = dict(outputs or {})
    for value in made.get_outputs():
        if value.name not in results and value.name not in shared:
            results[value.name] = aligned(shapes.get(value.name) or value.shape, problem.data["q"].dtype)
    binding = made.io_binding()
    values = {v.name: _value(feeds[v.name], types[v.name]) for v in made.get_inputs()}
    for name, given in values.items():
        binding.bind_ortvalue_input(name, given)
    for value in made.get_outputs():
        if value.name in shared:
            binding.bind_ortvalue_output(value.name, values[shared[value.name]])
            continue
        array = results[value.name]
        shape = value.shape if all(isinstance(size, int) for size in value.shape) and value.shape else array.shape
        binding.bind_ortvalue_output(value.name, _value(array.reshape(shape), types[value.name]))

    def final() -> list[Array]:
        return [from_bits(results[name], case.dtype) for name in OUTPUTS[case.kind]]

    return Peer(lambda: made.run_with_iobinding(binding), final)


def _value(array: Array, kind: int) -> ort.OrtValue:
    """An OrtValue that uses the array's memory."""
    if kind == onnx.TensorProto.BFLOAT16:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, kind)
    return ort.OrtValue.ortvalue_from_numpy(array)


def ours(problem: Problem) -> Peer:
    """FlashAttentionScore and FlashAttentionScoreGrad. The gradient alone gets the saved results of a forward part."""
    case, feeds = problem.case, dict(problem.data)
    statistics = {name: np.empty((case.batch, case.heads, case.rows, 8), np.float32) for name in ("max", "sum")}
    if case.mask == "pad":
        feeds["hidden"] = ~feeds["valid"][:, None, None]
    if case.kind == "decode":
        feeds["q"] = feeds["q"].reshape(case.batch, case.heads, case.rows, case.size)
    if case.kind == "backward":
        out = aligned(feeds["q"].shape, feeds["q"].dtype)
        bound(problem, graphs.fused(case, "statistics"), feeds, outputs=statistics | {"out": out}).call()
        feeds |= statistics | {"out": out}
    return bound(problem, graphs.fused(case), feeds)


def rounded(problem: Problem) -> Peer:
    """FlashAttentionScore with the option to multiply float32 numbers as bfloat16, which is off by default."""
    if problem.case.kind != "forward" or problem.case.dtype != "float32":
        raise NotOffered("forward of float32 only")
    os.environ["FA_COMPILER_FLOAT32_PRODUCTS"] = "bfloat16"  # the kernels read it when a session is made
    try:
        return ours(problem)
    finally:
        del os.environ["FA_COMPILER_FLOAT32_PRODUCTS"]


def unfused(problem: Problem) -> Peer:
    """The exporter's spelling, with all of ONNX Runtime's optimisations."""
    case = problem.case
    feeds = problem.data | graphs.padding(case, problem.data)
    if case.dtype == "bfloat16":
        raise NotOffered("no bfloat16")
    if case.kind == "backward":
        feeds["p"] = to_bits(probabilities(case, problem.data), case.dtype)
    return bound(problem, graphs.unfused(case), feeds)


def multi_head(problem: Problem) -> Peer:
    """com.microsoft MultiHeadAttention."""
    feeds = problem.data | _masks(problem)
    if problem.case.mask == "pad":
        feeds["kpm"] = feeds["valid"].astype(np.int32)
    return bound(problem, graphs.multi_head(problem.case), feeds)


def group_query(problem: Problem) -> Peer:
    """com.microsoft GroupQueryAttention."""
    case, model, feeds = problem.case, graphs.group_query(problem.case), dict(problem.data)
    feeds["lengths"] = np.full(case.batch, case.keys - 1, np.int32)
    feeds["total"] = np.array([case.keys], np.int32)
    if case.kind != "decode":
        return bound(problem, model, feeds)
    for name in "kv":
        feeds[f"past_{name}"] = feeds[name].copy()
        feeds[name] = np.ascontiguousarray(feeds[name][:, :, -1]).reshape(case.batch, 1, -1)
        feeds[f"past_{name}"][:, :, -1] = 7  # shows a newest key at a wrong position
    return bound(problem, model, feeds, {"present_k": "past_k", "present_v": "past_v"})


def attention(problem: Problem) -> Peer:
    """ai.onnx Attention."""
    case, model, feeds = problem.case, graphs.attention(problem.case), problem.data | _masks(problem)
    if case.kind == "decode":
        feeds["q"] = feeds["q"].reshape(case.batch, case.heads, case.rows, case.size)
    return bound(problem, model, feeds)


def _masks(problem: Problem) -> dict[str, Array]:
    """The additive mask of full size, for operators without windows and padding."""
    case = problem.case
    if case.mask == "pad":
        left = np.broadcast_to(problem.data["valid"][:, None, None], (case.batch, 1, case.rows, case.keys))
    elif case.mask == "window":
        band = visible(case, np.arange(case.rows))
        assert band is not None
        left = band[None, None]
    else:
        return {}
    return {"wide": to_bits(np.where(left, np.float32(0), np.float32(MASKED)), case.dtype)}


PEERS: dict[str, Factory] = {
    "ours": ours,
    "ours*": rounded,
    "ort-unfused": unfused,
    "ort-mha": multi_head,
    "ort-gqa": group_query,
    "ort-attention": attention,
}
VERSION = f"onnxruntime {ort.__version__}"
_CORES = sorted(os.sched_getaffinity(0))


def prepare(threads: int) -> None:
    """Prepare a process once. Each session gets the number of threads.

    With several threads each has its own core; the calling thread has the first. Without pinning, the second thread of
    a pool that has slept sometimes wakes on the core of the first and stays there for many calls, which then take as
    long as with one thread. OpenVINO pins its threads itself. The environment of the workers pins those of torch.
    """
    if _others(threads):
        os.sched_setaffinity(0, {_CORES[0]})


def _others(threads: int) -> list[int]:
    """The cores of all threads but the calling one, if there are enough cores and threads are pinned."""
    return _CORES[1:threads] if threads <= len(_CORES) and FREE not in os.environ else []
