"""The bodies of ChunkGatedDeltaRule and RecurrentGatedDeltaRule: ONNX functions that compute what
the operators do.

A file for Ascend holds these functions, as it does those of the operators around attention
(around_bodies.py). ONNX Runtime with the library takes the kernels and never looks at them. A body
is a Loop over the packed tokens, in float32: token t reads the state of one block, changes it, and
writes it to another. For ChunkGatedDeltaRule both are the block of its sequence. Results have the
types of the operators, by CastLike, which opset 15 has first.

A body reads the inputs that its nodes have. If nodes of one operator have different ones, the
operator has no body.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import onnx
from onnx import TensorProto, helper

from fa_compiler.lowering.onnx_file.writer import CAST_LIKE, FunctionWriter, declared
from fa_compiler.op_registry import DOMAIN, get

STATES = {"ChunkGatedDeltaRule": "initial_state", "RecurrentGatedDeltaRule": "state"}
"""The operators that have such a body, and their inputs that are states."""
RESULTS = ("out", "after")
"""The outputs of a function. The state of RecurrentGatedDeltaRule is an input and an output of one
name, which a function cannot have."""


def delta_bodies(nodes: Iterable[onnx.NodeProto], opset: int) -> list[onnx.FunctionProto]:
    """The functions of the operators among these nodes, in a model of this opset; none in an opset
    without CastLike."""
    found: dict[str, set[tuple[str, ...]]] = {}
    for node in nodes:
        if node.domain == DOMAIN and node.op_type in STATES:
            names = zip(get(node.op_type).input_names, node.input, strict=False)
            found.setdefault(node.op_type, set()).add(tuple(name for name, given in names if given))
    if opset < CAST_LIKE:
        return []
    return [
        _body(name, inputs, opset)
        for name, (inputs, *others) in sorted(found.items())
        if not others
    ]


def _body(op_type: str, inputs: tuple[str, ...], opset: int) -> onnx.FunctionProto:
    writer = _Body(op_type=op_type, inputs=inputs)
    writer.write()
    return writer.function(op_type, opset, ["scale_value"], RESULTS, inputs)


@dataclass
class _Body(FunctionWriter):
    op_type: str = field(kw_only=True)
    inputs: tuple[str, ...] = field(kw_only=True)

    def write(self) -> None:
        """The nodes of the function."""
        state = STATES[self.op_type]
        tokens = self.size("query", 0)
        rows = {
            "q": self.repeated("query"),
            "k": self.repeated("key"),
            "v": self.column(self.wide("value")),
            "b": self.column(self.column(self.wide("beta"))),
        }
        if self.op_type == "ChunkGatedDeltaRule":
            rows["read"] = rows["write"] = self.sequences(tokens)[0]
        else:
            rows["read"], rows["write"] = self.blocks(tokens)
        if "g" in self.inputs:
            rows["e"] = self.op("Exp", self.column(self.column(self.wide("g"))))
        if "gk" in self.inputs:
            rows["f"] = self.op("Exp", self.op("Unsqueeze", self.wide("gk"), self.ints(2)))
        count = self.op("Squeeze", tokens, self.ints(0))
        self.nodes.append(
            helper.make_node(
                "Loop", [count, "", self.wide(state)], ["last", "reads"], body=_token(rows)
            )
        )
        scaled = self.op("Mul", "reads", self.attribute("scale_value"))
        self.op(
            "CastLike",
            self.op("Reshape", scaled, self.op("Shape", "value")),
            "query",
            out=RESULTS[0],
        )
        self.op("CastLike", "last", state, out=RESULTS[1])

    def long(self, name: str) -> str:
        """An input in int64."""
        return self.op("Cast", name, to=TensorProto.INT64)

    def column(self, name: str) -> str:
        """A tensor with one more size of 1 at its end."""
        return self.op("Unsqueeze", name, self.ints(-1))

    def repeated(self, name: str) -> str:
        """query or key [T,Nk,Dk] in float32 as [T,Nv,1,Dk]: each head for as many heads of
        value."""
        size, heads = self.size(name, 2), self.size("value", 1)
        group = self.op("Div", heads, self.size(name, 1))
        one = self.ints(1)
        whole = self.op("Concat", self.size(name, 0), self.size(name, 1), group, size, axis=0)
        wide = self.op("Expand", self.op("Unsqueeze", self.wide(name), self.ints(2)), whole)
        return self.op(
            "Reshape", wide, self.op("Concat", self.size(name, 0), heads, one, size, axis=0)
        )

    def sequences(self, tokens: str) -> tuple[str, str]:
        """For each token the number of its sequence, and the first token of that."""
        lengths = self.long("actual_seq_lengths")
        ends = self.op("CumSum", lengths, self.scalar(0))
        place = self.op("Unsqueeze", self.places(tokens), self.ints(1))
        behind = self.op("Cast", self.op("GreaterOrEqual", place, ends), to=TensorProto.INT64)
        sequence = self.op("ReduceSum", behind, self.ints(1), keepdims=0)
        return sequence, self.op("Gather", self.op("Sub", ends, lengths), sequence)

    def places(self, tokens: str) -> str:
        """The numbers of the tokens."""
        zero, one = self.scalar(0), self.scalar(1)
        return self.op("Range", zero, self.op("Squeeze", tokens, self.ints(0)), one)

    def blocks(self, tokens: str) -> tuple[str, str]:
        """For each token the block that it reads, and the one that it writes."""
        sequence, first = self.sequences(tokens)
        place, one = self.places(tokens), self.scalar(1)
        start = first
        if "num_accepted_tokens" in self.inputs:
            accepted = self.op("Gather", self.long("num_accepted_tokens"), sequence)
            start = self.op("Sub", self.op("Add", first, accepted), one)
        before = self.op("Where", self.op("Equal", place, first), start, self.op("Sub", place, one))
        indices = self.long("ssm_state_indices")
        return self.op("Gather", indices, before), indices


def _token(rows: dict[str, str]) -> onnx.GraphProto:
    """The body of the Loop: one token. It has a row of each tensor, by its letter."""
    step = FunctionWriter(offset=1000)  # no name of the function
    row = {letter: step.op("Gather", name, "t") for letter, name in rows.items()}
    state = step.op("Gather", "states", row["read"])
    for decay in {"e", "f"} & row.keys():
        state = step.op("Mul", state, row[decay])
    key = step.op("Transpose", row["k"], perm=[0, 2, 1])
    change = step.op("Mul", step.op("Sub", row["v"], step.op("MatMul", state, key)), row["b"])
    state = step.op("Add", state, step.op("Mul", change, row["k"]))
    step.op("MatMul", state, step.op("Transpose", row["q"], perm=[0, 2, 1]), out="read_out")
    place = step.op("Reshape", row["write"], step.ints(1, 1))
    step.op("ScatterND", "states", place, step.op("Unsqueeze", state, step.ints(0)), out="next")
    step.op("Identity", "more", out="on")
    inputs = [
        declared("t", 0, TensorProto.INT64),
        declared("more", 0, TensorProto.BOOL),
        declared("states"),
    ]
    outputs = [declared("on", 0, TensorProto.BOOL), declared("next"), declared("read_out", 3)]
    return helper.make_graph(step.nodes, "token", inputs, outputs)
