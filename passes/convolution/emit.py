"""A proven causal convolution becomes one ShortConvolution.

The operator is with channels_last where x is transposed from [B,T,C] and the result back, and both
Transposes are then superfluous. A state that is cut from the transposed x is cut from x, and
transposed alone. In ONNX Runtime, 2,048 tokens of 4,096 channels take 58 ms as exported, 44 ms with
the Transposes and 17 ms without them; one token takes 0.42 ms as exported and 0.04 ms
(bench/convolution.py, one thread of an AMD EPYC with AVX2).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.known import if_known
from fa_compiler.passes.answer.decline import NEWER_OPSET, Decline
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.attention_ops.direct import Attributes, DirectConversion
from fa_compiler.passes.convolution.match import RANK, TOKENS, TURNED, Convolution, turned_source
from fa_compiler.passes.emit.build import Builder
from fa_compiler.passes.ir.nodes import (
    constant,
    data_readers,
    input_of,
    is_op,
    outputs_of,
    producer,
)
from fa_compiler.passes.values.facts import Facts

OP = "ShortConvolution"
END = np.iinfo(np.int64).max
SLICE_BY_INPUTS = 10
"""From this opset on a Slice has its places as inputs."""
MOST_LAST = 8
"""More weights than this are not for channels_last: 31 of them take 42 ms there, and 4 ms with the
channels first, beside 21 ms of the Conv (1,024 channels, 2,048 tokens)."""
AXES = 3
"""The place of the axes among them."""

Pairs = list[tuple[ir.Value, ir.Value]]
"""Old values, each with the new one."""


@dataclass(frozen=True)
class Emitter:
    """Makes the nodes of one convolution."""

    match: Convolution
    facts: Facts
    builder: Builder

    def emit(self) -> tuple[ir.Node, Pairs]:
        """The operator, which is in the graph then, and what takes the places of old values. Raises
        Decline."""
        match, result = self.match, self.match.result
        is_last = match.width <= MOST_LAST and (result.is_turned or bool(result.copies))
        source = turned_source(match.window.x, self.builder.graph) if is_last else None
        past = self._past()
        inputs = {
            "input": source or match.window.x,
            "weight": input_of(match.node, 1),
            "bias": input_of(match.node, 2),
            "past_state": past,
        }
        attrs: Attributes = {
            "activation": result.activation,
            "channels_last": int(source is not None),
        }
        # Both outputs have names: onnx's shape inference refuses a call of the file's function with
        # fewer of them.
        node = DirectConversion(match.node, self.facts, self.builder).registered(OP, inputs, attrs)
        output, present = node.outputs
        output.dtype = present.dtype = match.dtype
        self.builder.graph.append(node)
        pairs = self._results(output, source)
        if match.last_columns is not None:
            pairs.append((match.last_columns, present))
        if match.more_columns is not None and past is not None:
            joined = self.builder.concat([past, match.window.x], TOKENS)
            pairs.append((match.more_columns, joined))
        if source is not None:
            pairs += self._cuts(source)
        return node, pairs

    def _past(self) -> ir.Value | None:
        """The K - 1 columns before x; None where they are zeros. Raises Decline."""
        state, history = self.match.window.state, self.match.history
        if state is None or self.match.window.front == history:
            return state
        if self.builder.opset < SLICE_BY_INPUTS:
            raise Decline(
                Code.OPSET, "the state cannot be cut in this opset", self.match.node, NEWER_OPSET
            )
        return self.builder.slice(state, [-history], [END], [TOKENS])

    def _results(self, output: ir.Value, source: ir.Value | None) -> Pairs:
        """The old results with the new one: [B,T,C] where the operator reads the source of x."""
        result = self.match.result
        if source is None:
            return [(result.value, self._turned(output) if result.is_turned else output)]
        return [(value, output) for value in result.copies or (result.value,)]

    def _turned(self, value: ir.Value) -> ir.Value:
        return self.builder.transpose(value, tuple(TURNED))

    def _cuts(self, source: ir.Value) -> Pairs:
        """The Slices along the tokens of x, transposed alone; none where something else reads x,
        which then stays."""
        x = self.match.window.x
        own = {self.match.node, producer(self.match.node.inputs[0])}
        readers = [node for node in data_readers(x) if node not in own]
        if x.is_graph_output() or not all(map(self._cuts_tokens, readers)):
            return []
        axis = self.builder.ints([1])
        bounds = (
            [source, *node.inputs[1:AXES], axis, *node.inputs[AXES + 1 :]] for node in readers
        )
        cuts = (self.builder.op("Slice", given) for given in bounds)
        return list(zip(outputs_of(readers), map(self._turned, cuts), strict=True))

    def _cuts_tokens(self, node: ir.Node) -> bool:
        """Is a node a Slice along the tokens alone, which has its places as inputs?"""
        axes = if_known(np.ndarray.tolist, constant(input_of(node, AXES), limit=1))
        return (
            is_op(node, "Slice")
            and node.graph is self.builder.graph
            and axes in ([TOKENS], [TOKENS - RANK])
        )
