"""OpenVINO's CPU plugin. It runs in an interpreter with OpenVINO, which otherwise needs only NumPy."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as op

from bench.speed.cases import Case
from bench.speed.peer import MASKED, Factory, NotOffered, Peer, Problem
from bench.speed.truth import OUTPUTS, Array, from_bits, heads_first, probabilities, to_bits, visible

TYPES = {"float32": ov.Type.f32, "float16": ov.Type.f16, "bfloat16": ov.Type.bf16}


@functools.cache
def _core() -> ov.Core:
    return ov.Core()


def tensor(array: Array, dtype: str) -> ov.Tensor:
    """The numbers of an array as an OpenVINO tensor."""
    if dtype == "bfloat16":
        made = ov.Tensor(ov.Type.bf16, list(array.shape))
        np.copyto(made.data.view(np.uint16), array)
        return made
    return ov.Tensor(np.ascontiguousarray(array), shared_memory=True)


def values(made: ov.Tensor) -> Array:
    """The numbers of a tensor in float32."""
    if made.get_element_type() == ov.Type.bf16:
        return from_bits(made.data.view(np.uint16), "bfloat16")
    return np.array(made.data).astype(np.float32)


def compiled(problem: Problem, model: ov.Model, dtype: str, **properties: Any) -> ov.CompiledModel:
    """The model, compiled for the least latency."""
    config = {
        "INFERENCE_PRECISION_HINT": TYPES[dtype],
        "INFERENCE_NUM_THREADS": problem.threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
    }
    return _core().compile_model(model, "CPU", config | properties)


def _computing(case: Case) -> str:
    """The type in which the CPU plugin computes: float32 for float16."""
    return "float32" if case.dtype == "float16" else case.dtype


def _operand(array: Array, dtype: str) -> tuple[Any, ov.Tensor]:
    return op.parameter(list(array.shape), TYPES[dtype]), tensor(array, dtype)


def _constant(numbers: int | list[int]) -> Any:
    return op.constant(np.array(numbers, np.int64))


def unfused(problem: Problem) -> Peer:
    """The exporter's spelling, with OpenVINO's own optimisations."""
    case = problem.case
    feeds = dict(problem.data)
    if case.mask == "pad":
        feeds["mask"] = to_bits(np.where(feeds["valid"], 0, MASKED).astype(np.float32), case.dtype)[:, None, None]
    if case.kind == "backward":
        feeds["p"] = to_bits(probabilities(case, problem.data), case.dtype)
    model = compiled(problem, _core().read_model(str(problem.folder / "unfused.onnx")), _computing(case))
    request = model.create_infer_request()
    kept = {port.get_any_name(): tensor(feeds[port.get_any_name()], case.dtype) for port in model.inputs}
    for name, given in kept.items():
        request.set_tensor(name, given)
    return Peer(request.infer, lambda: [values(request.get_tensor(name)) for name in OUTPUTS[case.kind]], kept)


def _sdpa(problem: Problem, computing: str) -> Peer:
    case, data = problem.case, problem.data
    if case.gradient:
        raise NotOffered("no gradient")
    names = {name: _operand(data[name], case.dtype) for name in "qkv"}

    def split(name: str) -> Any:
        node, heads = names[name][0], case.heads if name == "q" else case.kv_heads
        if case.kind != "decode" or name == "q":
            shape = _constant([case.batch, -1, heads, case.size])
            node = op.transpose(op.reshape(node, shape, False), _constant([0, 2, 1, 3]))
        return node if heads == case.heads else _repeated(case, node)

    operands = [split(name) for name in "qkv"]
    additive = _additive(problem)
    if additive is not None:
        names["mask"] = _operand(additive, case.dtype)
        operands.append(names["mask"][0])
    out = op.scaled_dot_product_attention(*operands, causal=case.mask == "causal")
    out = op.reshape(op.transpose(out, _constant([0, 2, 1, 3])), _constant([case.batch, case.rows, -1]), False)
    model = compiled(problem, ov.Model([out], [node for node, _ in names.values()], "sdpa"), computing)
    request = model.create_infer_request()
    for index, (_, given) in enumerate(names.values()):
        request.set_input_tensor(index, given)
    return Peer(request.infer, lambda: [values(request.get_output_tensor(0))], names)


def _repeated(case: Case, node: Any) -> Any:
    wide = [case.batch, case.kv_heads, case.heads // case.kv_heads, case.keys, case.size]
    flat = [case.batch, case.heads, case.keys, case.size]
    return op.reshape(op.broadcast(op.unsqueeze(node, _constant([2])), _constant(wide)), _constant(flat), False)


def _additive(problem: Problem) -> Array | None:
    case, data = problem.case, problem.data
    if case.mask == "pad":
        left = np.broadcast_to(data["valid"][:, None, None], (case.batch, 1, case.rows, case.keys))
        return to_bits(np.where(left, np.float32(0), np.float32(MASKED)), case.dtype)
    if case.mask == "window":
        band = visible(case, np.arange(case.rows))
        assert band is not None
        return to_bits(np.where(band, np.float32(0), np.float32(MASKED))[None, None], case.dtype)
    return data["bias"] if case.mask == "bias" else None


def sdpa(problem: Problem) -> Peer:
    """OpenVINO's ScaledDotProductAttention."""
    return _sdpa(problem, _computing(problem.case))


def sdpa_in_bf16(problem: Problem) -> Peer:
    """The same, but float32 tensors are computed in bfloat16: the default on processors with such products."""
    if problem.case.dtype != "float32" or problem.case.kind != "forward":
        raise NotOffered("float32 forward only")
    return _sdpa(problem, "bfloat16")


def cache(problem: Problem) -> Peer:
    """A decode step with the cache in OpenVINO's state, in the type of the case. Each call adds one key."""
    case, data = problem.case, problem.data
    if case.kind != "decode":
        raise NotOffered("decode only")
    float32 = ov.Type.f32
    query, key, value = (op.parameter([-1, -1, heads, case.size], float32)
                         for heads in (case.heads, case.kv_heads, case.kv_heads))  # fmt: skip
    beams, mask = op.parameter([-1], ov.Type.i32), op.parameter([-1, 1, -1, -1], float32)
    order = _constant([0, 2, 1, 3])
    sinks, full = [], []
    for name, new in (("past_k", key), ("past_v", value)):
        info = ov.op.util.VariableInfo()
        info.data_shape, info.data_type = ov.PartialShape([-1, case.kv_heads, -1, case.size]), float32
        info.variable_id = name
        variable = ov.op.util.Variable(info)
        batch = op.gather(op.shape_of(beams), _constant([0]), _constant(0))
        shape = op.concat([batch, _constant([case.kv_heads]), _constant([0]), _constant([case.size])], 0)
        past = ov.opset6.read_value(op.broadcast(op.constant(np.float32(0)), shape), variable)
        joined = op.concat([op.gather(past, beams, _constant(0)), op.transpose(new, order)], -2)
        sinks.append(ov.opset6.assign(joined, variable))
        if case.heads != case.kv_heads:
            wide = _constant([1, 1, case.heads // case.kv_heads, 1, 1])
            joined = op.broadcast(op.unsqueeze(joined, _constant(2)), wide, broadcast_spec="BIDIRECTIONAL")
            joined = op.reshape(joined, _constant([0, case.heads, -1, case.size]), True)
        full.append(joined)
    out = op.scaled_dot_product_attention(op.transpose(query, order), *full, mask, causal=False)
    model = ov.Model([op.result(op.transpose(out, order))], sinks, [query, key, value, beams, mask], "step")
    made = compiled(problem, model, _computing(case), KV_CACHE_PRECISION=TYPES[case.dtype])
    kinds = [node.get_rt_info()["layerType"].astype(str) for node in made.get_runtime_model().get_ordered_ops()]
    if not any("ScaledDot" in kind for kind in kinds):
        raise NotOffered("OpenVINO did not fuse the cache")
    request = made.create_infer_request()
    cached = {name: from_bits(data[name], case.dtype) for name in "kv"}
    for state in request.query_state():
        state.state = ov.Tensor(np.ascontiguousarray(cached["k" if "past_k" in state.name else "v"][:, :, :-1]))
    new = [heads_first(from_bits(data["q"], case.dtype), case, case.heads), cached["k"][:, :, -1:],
           cached["v"][:, :, -1:]]  # fmt: skip
    tensors = [ov.Tensor(np.ascontiguousarray(each.transpose(0, 2, 1, 3))) for each in new]
    tensors.append(ov.Tensor(np.arange(case.batch, dtype=np.int32)))
    for index, given in enumerate(tensors):
        request.set_input_tensor(index, given)
    return _growing(case, request, tensors)


def _growing(case: Case, request: Any, tensors: list[ov.Tensor]) -> Peer:
    """A peer that returns the result of its first call, because later calls have more keys."""
    keys = [case.keys]
    first: list[Array] = []

    def step() -> None:
        tensors[4:] = [ov.Tensor(np.zeros((case.batch, 1, 1, keys[0]), np.float32))]
        request.set_input_tensor(4, tensors[4])
        request.infer()
        keys[0] += 1
        if not first:
            first.append(values(request.get_output_tensor(0)))

    return Peer(step, lambda: [first[0].reshape(case.batch, case.rows, -1)])


def prepare(threads: int) -> None:
    """Nothing to prepare in the process: each compiled model gets the number of threads."""


PEERS: dict[str, Factory] = {"ov-unfused": unfused, "ov-sdpa": sdpa, "ov-cache": cache, "ov-sdpa*": sdpa_in_bf16}
VERSION = f"openvino {ov.__version__.split('-')[0]}"
