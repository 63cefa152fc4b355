"""The bodies of FlashLinearAttention and ShortConvolution: ONNX functions that compute the same in
standard operators.

FlashLinearAttention is a Scan over the tokens, in float32. Its body is made for float tensors of
known widths, without cu_seqlens. ShortConvolution is a Conv of the past state and the input
together. Results have the types of the operators, by CastLike, which opset 15 has first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx
from onnx import helper

from fa_compiler.lowering.onnx_file.writer import CAST_LIKE, FunctionWriter, declared
from fa_compiler.op_registry import NodeView, TensorInfo, full_attrs, get
from fa_compiler.op_registry.geometry import shape_of
from fa_compiler.op_registry.ops.flash_linear_attention import LOW_RANK


@dataclass(frozen=True)
class LinearKey:
    """What decides the body of a node: nodes of one operator with equal keys have equal bodies."""

    op_type: str
    opset: int
    inputs: tuple[str, ...]
    widths: tuple[int, ...]
    """The last sizes of the inputs, or of a convolution its channels and its columns."""
    attrs: tuple[tuple[str, Any], ...]
    given: tuple[str, ...]
    """The attributes that the node has."""


def linear_key(view: NodeView, opset: int) -> LinearKey | None:
    """What the body of a node depends on; None if it has no body. `opset` is that of the model."""
    writer = _WRITERS.get(view.op_type)
    tensors = {
        name: tensor for name, tensor in view.inputs.items() if isinstance(tensor, TensorInfo)
    }
    if writer is None or opset < CAST_LIKE or "cu_seqlens" in tensors:
        return None
    attrs = full_attrs(get(view.op_type), view.attrs)
    widths = writer.widths(tensors)
    if not all(isinstance(width, int) and width > 0 for width in widths):
        return None
    read = tuple(sorted((name, value) for name, value in attrs.items() if name != "scale"))
    return LinearKey(view.op_type, opset, tuple(tensors), widths, read, tuple(sorted(view.attrs)))


def linear_body(key: LinearKey) -> onnx.FunctionProto:
    """The body, as a function of the operator's name and domain. It has all inputs up to the last
    one of the node."""
    writer = _WRITERS[key.op_type](key=key)
    writer.write()
    return writer.function(
        key.op_type, key.opset, key.given, get(key.op_type).output_names, key.inputs
    )


@dataclass
class _Body(FunctionWriter):
    key: LinearKey = field(kw_only=True)

    @property
    def attrs(self) -> dict[str, Any]:
        return dict(self.key.attrs)

    def past(self, name: str, *sizes: int) -> str:
        """The past state, or zeros of these sizes for each row of an input."""
        if "past_state" in self.key.inputs:
            return self.wide("past_state")
        shape = self.op("Concat", self.size(name, 0), self.ints(*sizes), axis=0)
        return self.op("Expand", self.number(0.0), shape)

    def missing(self, tokens: str) -> str:
        """1 where there is no token, else 0. A Scan of no tokens ends the process (ONNX Runtime
        1.32), and a Conv of fewer columns than its weight has is an error. So each gets one token
        at least, whose results are dropped."""
        return self.op("Max", self.op("Sub", self.ints(1), tokens), self.ints(0))


@dataclass
class _Recurrence(_Body):
    """FlashLinearAttention. All tensors of tokens are [B,T,states,rows,columns], where a state is
    [Dk,Dv]."""

    @staticmethod
    def widths(tensors: Mapping[str, TensorInfo]) -> tuple[Any, ...]:
        return tuple(
            shape_of(tensor, 3)[-1] for name, tensor in tensors.items() if name != "past_state"
        )

    def write(self) -> None:
        rows = [name for name in self.key.inputs if name != "past_state"]
        attrs, width = self.attrs, dict(zip(rows, self.key.widths, strict=True))
        q_heads, heads = int(attrs["q_num_heads"]), int(attrs["kv_num_heads"])
        size, columns, out_heads = (
            width["query"] // q_heads,
            width["value"] // heads,
            max(q_heads, heads),
        )
        key_heads, rule = width["key"] // size, attrs["update_rule"]
        each = {
            "q": self._split(
                "query", q_heads, min(q_heads, heads), heads, (out_heads // heads, size)
            ),
            "k": self._split("key", key_heads, key_heads, heads, (1, size)),
            "v": self._split("value", heads, heads, heads, (1, columns)),
        }
        if "decay" in width:
            one = width["decay"] == heads
            each["e"] = self.op(
                "Exp", self._split("decay", heads, heads, heads, (1 if one else size, 1))
            )
        if "beta" in width:
            each["b"] = self.op("Reshape", self.wide("beta"), self.ints(0, 0, width["beta"], 1, 1))
        if rule in LOW_RANK:
            each["p"] = self._split("low_rank_write", heads, heads, heads, (size, 1))
            each["r"] = self._split("low_rank_read", heads, heads, heads, (1, size))
        first, tokens = self.past("query", heads, size, columns), self.size("query", 1)
        missing = self.missing(tokens)
        each = {name: self._one_at_least(value, missing) for name, value in each.items()}
        self.nodes.append(
            helper.make_node(
                "Scan",
                [first, *each.values()],
                ["last", "reads"],
                body=_step(tuple(each), rule == "dplr"),
                num_scan_inputs=len(each),
                scan_input_axes=[1] * len(each),
                scan_output_axes=[1],
            )
        )
        state = self.op("Where", self.op("Equal", tokens, self.ints(0)), first, "last")
        read = self.op("Slice", "reads", self.ints(0), tokens, self.ints(1))
        scaled = self.op("Mul", read, self._scale(size))
        shape = self.op(
            "Concat", self.size("query", 0), tokens, self.ints(out_heads * columns), axis=0
        )
        self.op("CastLike", self.op("Reshape", scaled, shape), "query", out="output")
        self.op(
            "CastLike",
            state,
            "past_state" if "past_state" in self.key.inputs else "query",
            out="present_state",
        )

    def _one_at_least(self, value: str, missing: str) -> str:
        """A value [B,T,..], followed by tokens of zeros."""
        sizes = self.op("Shape", value)
        last = self.op("Slice", sizes, self.ints(2), self.ints(5))
        shape = self.op("Concat", self.size("query", 0), missing, last, axis=0)
        return self.op("Concat", value, self.op("Expand", self.number(0.0), shape), axis=1)

    def _split(self, name: str, heads: int, groups: int, states: int, last: tuple[int, int]) -> str:
        """An input in float32 as [B,T,states,*last]. `heads` heads are `groups` groups, each for
        several states."""
        value = self.wide(name)
        if heads == states or groups == states:
            return self.op("Reshape", value, self.ints(0, 0, states, *last))
        value = self.op("Reshape", value, self.ints(0, 0, groups, 1, *last))
        value = self.op("Expand", value, self.ints(1, 1, 1, states // groups, 1, 1))
        return self.op("Reshape", value, self.ints(0, 0, states, *last))

    def _scale(self, size: int) -> str:
        """The scale; without one, or with 0, that of the head size."""
        own = self.number(size**-0.5)
        if "scale" not in self.key.given:
            return own
        given = self.attribute("scale")
        return self.op("Where", self.op("Equal", given, self.number(0.0)), own, given)


def _step(names: tuple[str, ...], reads_before_decay: bool) -> onnx.GraphProto:
    """The body of the Scan: one token. Its inputs are the state and the rows of these names."""
    step = FunctionWriter(offset=1000)  # no name of the function
    state = step.op("Mul", "state", "e") if "e" in names else "state"
    added = "v"
    if "b" in names:
        added = step.op("Mul", step.op("Sub", "v", step.op("MatMul", "k", state)), "b")
    column = step.op("Transpose", "k", perm=[0, 1, 3, 2])
    after = step.op("Add", state, step.op("Mul", column, added))
    if "r" in names:
        read = "state" if reads_before_decay else state
        after = step.op("Add", after, step.op("Mul", "p", step.op("MatMul", "r", read)))
    step.op("Identity", after, out="next")
    step.op("MatMul", "q", "next", out="out")
    inputs, outputs = (
        [declared(name) for name in group] for group in (("state", *names), ("next", "out"))
    )
    return helper.make_graph(step.nodes, "token", inputs, outputs)


@dataclass
class _Convolution(_Body):
    """ShortConvolution."""

    @staticmethod
    def widths(tensors: Mapping[str, TensorInfo]) -> tuple[Any, ...]:
        channels, _, columns = shape_of(tensors.get("weight"), 3)
        return channels, columns

    def write(self) -> None:
        (channels, columns), attrs = self.key.widths, self.attrs
        given = self.wide("input")
        if attrs["channels_last"]:
            given = self.op("Transpose", given, perm=[0, 2, 1])
        before = self.past("input", channels, columns - 1)
        tokens = self.size("input", 1 if attrs["channels_last"] else 2)
        shape = self.op(
            "Concat", self.size("input", 0), self.ints(channels), self.missing(tokens), axis=0
        )
        joined = self.op(
            "Concat", before, given, self.op("Expand", self.number(0.0), shape), axis=2
        )
        operands = [joined, self.wide("weight")]
        if "bias" in self.key.inputs:
            operands.append(self.wide("bias"))
        out = self.op("Conv", *operands, group=channels)
        if attrs["activation"] == "silu":
            out = self.op("Mul", out, self.op("Sigmoid", out))
        out = self.op("Slice", out, self.ints(0), tokens, self.ints(2))
        if attrs["channels_last"]:
            out = self.op("Transpose", out, perm=[0, 2, 1])
        self.op("CastLike", out, "input", out="output")
        last = self.op(
            "Slice", joined, tokens, self.op("Add", tokens, self.ints(columns - 1)), self.ints(2)
        )
        self.op("CastLike", last, "input", out="present_state")


_WRITERS: dict[str, type[_Recurrence] | type[_Convolution]] = {
    "FlashLinearAttention": _Recurrence,
    "ShortConvolution": _Convolution,
}

LINEAR = frozenset(_WRITERS)
"""The operators that have such a body."""
