"""llama.cpp's operators of linear attention: a helper process of linear.py, with a shared library of ggml.

    python -m bench.linear_ggml LIBRARY

LIBRARY exports the functions of ggml.h, ggml-backend.h and ggml-cpu.h. ggml is compiled for this machine by

    git clone https://github.com/ggml-org/ggml && cd ggml
    cmake -B build -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_BUILD_TESTS=OFF -DGGML_BUILD_EXAMPLES=OFF
    cmake --build build    # build/src/libggml.so

and by `pip install llama-cpp-python`, as llama_cpp/lib/libggml.so. The wheels of xllamacpp, whose xllamacpp.abi3.so
exports the functions, too, use no more than AVX2. ggml_gated_delta_net must be there and take the number of states that
it keeps, as it does in ggml 0.25.

It answers as peers.py says. The question for a case is that of linear_peers.py, and "convolution" and "layer" are
further cases. ggml takes float32 only, and has no operator for the rule without a correction.
"""

from __future__ import annotations

import ctypes
import math
import sys
from contextlib import ExitStack
from ctypes import c_bool, c_int, c_int64, c_size_t, c_void_p
from typing import Any

import numpy as np

from bench.peers import Peers, Run
from tools.processes import serve

NAME = "ggml"
FLOAT = 4
"""The bytes of a number."""
METADATA = 1 << 20
"""Bytes for the descriptions of the tensors and the graph."""


class Parameters(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ggml_init": (c_void_p, Parameters),
    "ggml_free": (None, c_void_p),
    "ggml_new_tensor_4d": (c_void_p, c_void_p, c_int, *[c_int64] * 4),
    "ggml_view_4d": (c_void_p, c_void_p, c_void_p, *[c_int64] * 4, *[c_size_t] * 4),
    "ggml_concat": (c_void_p, c_void_p, c_void_p, c_void_p, c_int),
    "ggml_ssm_conv": (c_void_p, c_void_p, c_void_p, c_void_p),
    "ggml_silu": (c_void_p, c_void_p, c_void_p),
    "ggml_gated_delta_net": (c_void_p, c_void_p, *[c_void_p] * 6, c_int64),
    "ggml_new_graph": (c_void_p, c_void_p),
    "ggml_build_forward_expand": (None, c_void_p, c_void_p),
    "ggml_get_data": (c_void_p, c_void_p),
    "ggml_backend_cpu_init": (c_void_p,),
    "ggml_backend_cpu_set_n_threads": (None, c_void_p, c_int),
    "ggml_backend_alloc_ctx_tensors": (c_void_p, c_void_p, c_void_p),
    "ggml_backend_buffer_free": (None, c_void_p),
    "ggml_backend_graph_compute": (c_int, c_void_p, c_void_p),
}
"""The result of each function, and its parameters."""


class Graph:
    """A graph of ggml, as it is built. A tensor is a pointer, and its sizes begin with that of neighbouring numbers."""

    def __init__(self, library: ctypes.CDLL, backend: int, freed: ExitStack) -> None:
        self.library, self.backend, self.freed = library, backend, freed
        self.context = library.ggml_init(Parameters(METADATA, None, True))
        freed.callback(library.ggml_free, self.context)
        self.given: list[tuple[int, np.ndarray]] = []

    def tensor(self, array: np.ndarray) -> int:
        """A tensor with these numbers, of at most four dimensions."""
        sizes = [*array.shape[::-1], 1, 1, 1][:4]
        made: int = self.library.ggml_new_tensor_4d(self.context, 0, *sizes)
        self.given.append((made, np.ascontiguousarray(array, np.float32)))
        return made

    def call(self, name: str, *operands: int) -> int:
        """The tensor that a function of ggml.h makes of others."""
        made: int = getattr(self.library, name)(self.context, *operands)
        return made

    def run(self, result: int, shape: tuple[int, ...]) -> Run:
        """A run that returns the numbers with which `result` begins, without a copy."""
        library, backend = self.library, self.backend
        graph = self.call("ggml_new_graph")
        library.ggml_build_forward_expand(graph, result)
        self.freed.callback(
            library.ggml_backend_buffer_free, library.ggml_backend_alloc_ctx_tensors(self.context, backend)
        )
        for tensor, array in self.given:
            ctypes.memmove(library.ggml_get_data(tensor), array.ctypes.data, array.nbytes)
        numbers = (ctypes.c_float * math.prod(shape)).from_address(library.ggml_get_data(result))
        found: np.ndarray = np.ctypeslib.as_array(numbers).reshape(shape)

        def run() -> np.ndarray:
            if library.ggml_backend_graph_compute(backend, graph):
                raise RuntimeError("ggml could not compute the graph")
            return found

        return run


class Ggml:
    """The library, and what the current case has allocated."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)
        for name, (result, *parameters) in SIGNATURES.items():
            function = getattr(self.library, name)
            function.restype, function.argtypes = result, parameters
        self.backend: int = self.library.ggml_backend_cpu_init()
        self.freed = ExitStack()

    def prepared(self, question: dict[str, Any]) -> dict[str, Run]:
        """The peer of a case, if there is one."""
        self.freed.close()
        make = {"gated_delta": rule, "convolution": convolution, "layer": layer}.get(question["case"])
        if make is None or question["type"] != "float32":
            return {}
        self.library.ggml_backend_cpu_set_n_threads(self.backend, question["threads"])
        with np.load(question["inputs"]) as file:
            given = {name: file[name] for name in file}
        return {NAME: make(Graph(self.library, self.backend, self.freed), given, question["heads"])}


def attention(graph: Graph, operands: list[int], given: dict[str, np.ndarray], heads: int) -> int:
    """The gated delta rule of query, key and value. ggml keeps the state transposed, and scales the query by its size
    to the power of -0.5. The result is followed by the new state."""
    tokens = given["decay"].shape[1]
    gates = [given[name].reshape(1, tokens, heads, -1) for name in ("decay", "beta")]
    states = given["past_state"].swapaxes(-1, -2)
    return graph.call("ggml_gated_delta_net", *operands, *map(graph.tensor, [*gates, states]), 1)


def rule(graph: Graph, given: dict[str, np.ndarray], heads: int) -> Run:
    """The operator by itself."""
    shape = given["value"].shape
    operands = [graph.tensor(given[name].reshape(*shape[:2], heads, -1)) for name in ("query", "key", "value")]
    return graph.run(attention(graph, operands, given, heads), shape)


def convolved(graph: Graph, given: dict[str, np.ndarray], state: str) -> int:
    """The convolution of the columns of this state and of the tokens, with SiLU. Its result has the channels last."""
    window = graph.call("ggml_concat", graph.tensor(given[state]), graph.tensor(given["input"]), 0)
    return graph.call("ggml_silu", graph.call("ggml_ssm_conv", window, graph.tensor(given["weight"][:, 0])))


def convolution(graph: Graph, given: dict[str, np.ndarray], heads: int) -> Run:
    """The convolution by itself. The transposition of its result is not computed in a run."""
    _, channels, tokens = given["input"].shape
    run = graph.run(convolved(graph, given, "past_state"), (1, tokens, channels))
    return lambda: run().swapaxes(1, 2)


def layer(graph: Graph, given: dict[str, np.ndarray], heads: int) -> Run:
    """Both. Query, key and value are views of the convolution's result."""
    _, channels, tokens = given["input"].shape
    size = channels // 3 // heads
    strides = [FLOAT * count for count in (size, channels, channels * tokens)]
    mixed = convolved(graph, given, "columns")
    operands = [
        graph.call("ggml_view_4d", mixed, size, heads, tokens, 1, *strides, FLOAT * part * heads * size)
        for part in range(3)
    ]
    return graph.run(attention(graph, operands, given, heads), (1, tokens, heads * size))


if __name__ == "__main__":
    serve(Peers(Ggml(sys.argv[1]).prepared).answer, {})
