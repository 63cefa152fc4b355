"""Calls of the attention operators of ONNX and ONNX Runtime, in the installed onnxruntime and as a formula in float64.

A runtime has several kernels for one operator, and takes one of them by the call: how many rows, a past, the type, a
soft cap, the results that are wanted, the number of threads, what is switched off. A `Path` holds such choices.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from fa_compiler.op_registry.runtimes import ATTENTION, DOMAINS, GROUP_QUERY, MULTI_HEAD

Array = npt.NDArray[np.float64]

BATCH = 2
LOWEST = float(np.finfo(np.float32).min)
TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
TOLERANCES = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
FLASH_SWITCHES = ("ORT_DISABLE_FLASH_ATTENTION", "ORT_GQA_DISABLE_FLASH_ATTENTION")
"""Variables of the environment that switch kernels off. They are read when a session is made."""
OPSET = 24


@dataclass(frozen=True)
class Path:
    """What may choose the kernel: rows, keys in front of them, whether present keys are results, the threads of the
    session, whether flash kernels are allowed, and whether heads are grouped."""

    rows: int = 4
    past: int = 0
    presents: bool = False
    threads: int = 1
    flash: bool = True
    grouped: bool = False


@dataclass(frozen=True)
class Call:
    """One call. `mask` is none, boolean, float, keys (of a batch entry) or shared (by all heads and batch entries).
    `empty` is the number at all keys of the rows of batch entry 0; None where each row keeps a key."""

    operator: str
    path: Path = Path()
    dtype: str = "float32"
    mask: str = ""
    empty: float | None = None
    causal: bool = False
    window: int = 0
    cap: float = 0.0
    sink: bool = False
    width: int = 8
    value_width: int = 8
    more_keys: int = 0
    """So many more keys than rows, without a past."""
    open: bool = False
    """Are the sizes of the inputs open before the run?"""

    @property
    def heads(self) -> tuple[int, int]:
        """The heads of queries and of keys."""
        return 4, 2 if self.path.grouped else 4

    @property
    def batch(self) -> int:
        """GroupQueryAttention takes several rows behind a past for one batch entry only."""
        return 1 if self.operator == GROUP_QUERY and self.path.past and self.path.rows > 1 else BATCH

    @property
    def keys(self) -> int:
        return self.path.rows + self.path.past + self.more_keys


def arrays(call: Call) -> dict[str, Array]:
    """The inputs, in the layout [B, N, S, D], and the mask as numbers that are added."""
    rng = np.random.default_rng(0)
    heads, kv_heads = call.heads
    made = {
        "query": rng.standard_normal((call.batch, heads, call.path.rows, call.width)),
        "key": rng.standard_normal((call.batch, kv_heads, call.keys, call.width)),
        "value": rng.standard_normal((call.batch, kv_heads, call.keys, call.value_width)),
    }
    if call.sink:
        made["sink"] = rng.standard_normal(heads)
    if call.mask:
        shape = {
            "keys": (call.batch, 1, 1, call.keys),
            "shared": (1, 1, call.path.rows, call.keys),
        }.get(call.mask, (call.batch, heads, call.path.rows, call.keys))
        keep = rng.random(shape) < 0.7
        keep[..., 0] = True
        bias = np.where(keep, 0.0, -np.inf)
        if call.mask == "float":
            bias = np.where(keep, rng.standard_normal(shape), -1e4)
        if call.empty is not None:
            bias = np.where(keep, 0.0, call.empty)
            bias[0] = call.empty
        made["bias"] = bias
    return {name: array.astype(np.float32).astype(np.float64) for name, array in made.items()}


def formula(call: Call) -> Array:
    """The result in float64, [B, N, S, Dv]."""
    given = arrays(call)
    repeats = call.heads[0] // call.heads[1]
    key, value = (np.repeat(given[name], repeats, axis=1) for name in ("key", "value"))
    with np.errstate(all="ignore"):
        scores = np.einsum("bnsd,bntd->bnst", given["query"], key) / math.sqrt(call.width)
        if call.cap:
            scores = call.cap * np.tanh(scores / call.cap)
        if "bias" in given:
            # In float32 a score is lost in the lowest number.
            scores = np.where(given["bias"] <= LOWEST, given["bias"], scores + given["bias"])
        if call.causal:
            rows, columns = np.arange(call.path.rows)[:, None] + call.path.past, np.arange(call.keys)
            seen = (columns <= rows) & (columns > rows - call.window if call.window else True)
            scores = np.where(seen, scores, -np.inf)
        if call.sink:
            column = np.broadcast_to(given["sink"][None, :, None, None], (*scores.shape[:3], 1))
            scores = np.concatenate([scores, column], axis=-1)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.einsum("bnst,bnte->bnse", weights[..., : call.keys], value)


def model(call: Call) -> onnx.ModelProto:
    """The call as a model, whose inputs are float32. Its result is [B, N, S, Dv]."""
    kind, (heads, kv_heads) = TYPES[call.dtype], call.heads
    nodes, numbers = [], []

    def op(op_type: str, *inputs: str, **attrs: object) -> str:
        name = f"t{len(nodes)}"
        nodes.append(helper.make_node(op_type, inputs, [name], **attrs))
        return name

    def const(array: npt.NDArray[np.generic]) -> str:
        numbers.append(onnx.numpy_helper.from_array(array, f"c{len(numbers)}"))
        return str(numbers[-1].name)

    def flat(name: str) -> str:
        return op("Reshape", op("Transpose", name, perm=[0, 2, 1, 3]), const(np.array([0, 0, -1])))

    given = arrays(call)
    typed = {name: op("Cast", name, to=kind) for name in given}
    past = call.path.past
    new = {name: typed[name] for name in ("key", "value")}
    pasts = {"key": "", "value": ""}
    if past:
        ends = [const(np.array([number])) for number in (0, past, call.keys, 2)]
        pasts = {name: op("Slice", typed[name], ends[0], ends[1], ends[3]) for name in new}
        new = {name: op("Slice", typed[name], ends[1], ends[2], ends[3]) for name in new}
    bias = typed.get("bias", "")
    if call.mask == "boolean":
        bias = op("Cast", op("Equal", "bias", const(np.array(0, np.float32))), to=TensorProto.BOOL)
    padding = ""
    if call.mask == "keys" and call.operator == MULTI_HEAD:
        kept = op("Squeeze", op("Equal", "bias", const(np.array(0, np.float32))), const(np.array([1, 2])))
        padding, bias = op("Cast", kept, to=TensorProto.INT32), ""
    elif call.mask == "keys" and bias:
        bias = op("Expand", bias, const(np.array([call.batch, 1, call.path.rows, call.keys])))
    outputs = ["result", "present_key", "present_value"] if call.path.presents else ["result"]
    domain = DOMAINS[call.operator]
    attrs: dict[str, object] = {}
    if call.operator == ATTENTION:
        inputs = [typed["query"], new["key"], new["value"], bias, pasts["key"], pasts["value"]]
        attrs = {"is_causal": int(call.causal), "softcap": call.cap}
    elif call.operator == MULTI_HEAD:
        inputs = [*map(flat, (typed["query"], new["key"], new["value"])), "", padding, bias]
        attrs = {"num_heads": heads, "unidirectional": int(call.causal)}
        if padding:
            attrs["mask_filter_value"] = -math.inf if call.empty is None else call.empty
    else:
        lengths = [const(np.full(call.batch, call.keys - 1, np.int32)), const(np.array(call.keys, np.int32))]
        inputs = [*map(flat, (typed["query"], new["key"], new["value"])), pasts["key"], pasts["value"], *lengths]
        inputs += ["", "", "", bias, typed.get("sink", "")]
        attrs = {"num_heads": heads, "kv_num_heads": kv_heads, "softcap": call.cap}
        attrs |= {"local_window_size": call.window} if call.window else {}
        attrs |= {} if call.causal or (past and call.path.rows == 1) else {"causal": 0}
    while inputs and not inputs[-1]:
        inputs.pop()
    nodes.append(helper.make_node(call.operator, inputs, outputs, domain=domain, **attrs))
    result = "result"
    if call.operator != ATTENTION:
        apart = op("Reshape", result, const(np.array([0, 0, heads, -1])))
        result = op("Transpose", apart, perm=[0, 2, 1, 3])
    op("Cast", result, to=TensorProto.FLOAT)
    shapes = {
        name: [f"{name}{axis}" for axis in range(each.ndim)] if call.open else each.shape
        for name, each in given.items()
    }
    made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    last = helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "call", made, [last], numbers)
    imports = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def run(call: Call) -> Array:
    """What onnxruntime gives. Raises its exceptions."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = call.path.threads
    options.log_severity_level = 4
    with nullcontext() if call.path.flash else _without_flash():
        session = ort.InferenceSession(model(call).SerializeToString(), options, providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {name: array.astype(np.float32) for name, array in arrays(call).items()})
    return np.asarray(result, np.float64)


@contextmanager
def _without_flash() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in FLASH_SWITCHES}
    os.environ.update(dict.fromkeys(FLASH_SWITCHES, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def fault(call: Call, wanted: Array) -> str:
    """How the result differs from this one; empty where it does not."""
    try:
        got = run(call)
    except Exception as error:  # of onnxruntime: they share no class
        return f"fails: {' '.join(str(error).split())[:160]}"
    if got.shape != wanted.shape:
        return f"has the shape {got.shape}"
    with np.errstate(all="ignore"):
        near = np.abs(got - wanted) <= TOLERANCES[call.dtype]
    near |= np.isnan(got) & np.isnan(wanted)
    if near.all():
        return ""
    place = tuple(map(int, np.argwhere(~near)[0]))
    return f"{got[place]:g} instead of {wanted[place]:g}"
