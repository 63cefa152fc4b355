"""A linear attention on Ascend: ChunkGatedDeltaRule or RecurrentGatedDeltaRule.

    output, present_state = LinearAttention(query, key, value, past_state, decay, beta)

query and key are [B,T,Nk*Dk], value is [B,T,Nv*Dv], and a state [B,Nv,Dk,Dv]. CANN's operators take
packed tokens [B*T,N,D] and states [B,Nv,Dv,Dk], so the tokens are reshaped, and the states
transposed. By number:

    1  The update_rule is gated_delta or delta. CANN has no operator for the others. delta has no
       decay.
    2  query and key have one number of heads, which divides that of the states. The operators
       repeat them as LinearAttention does.
    3  With one token in a sequence, or where the number is open and the user vouches for one
       (`--assume decode`), it is a RecurrentGatedDeltaRule, where each sequence has one block of
       states. It changes them in place: they are those that the Transpose makes, and GE copies a
       tensor that is constant or has other readers before an operator changes it (its
       mem_rw_conflict_optimize.cc).
    4  Otherwise it is a ChunkGatedDeltaRule. That has no decay for each key dimension, so such a
       decay is declined.
    5  A decay for each head is g, a decay for each key dimension gk. Both are float32.
    6  A beta of one number for each token is repeated for the heads.
    7  Without a past_state the states are 0.
    8  Tokens are bfloat16. Where the model has another type, the user has to agree
       (`--assume half-attention`). The states are float32 where the operator takes that on the
       product, and otherwise bfloat16.
    9  What the operators need of the numbers no graph proves, so the user has to vouch for it
       (`--assume unit-inputs`, and with a decay in chunks `--assume slow-decay`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from fa_compiler.op_registry import OpSpec, get, product, verify
from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.options import (
    DECODE,
    HALF_ATTENTION,
    SLOW_DECAY,
    UNIT_INPUTS,
    Options,
)
from fa_compiler.passes.answer.report import Code, other_target
from fa_compiler.passes.attention_ops.direct import TURNED
from fa_compiler.passes.attention_ops.linear_call import LinearCall
from fa_compiler.passes.emit.build import Builder
from fa_compiler.passes.rewrite.node_view import node_view, prototype, registry_node
from fa_compiler.passes.values.facts import Facts
from fa_compiler.passes.values.shapes import ShapeInfo

CHUNKS, STEPS = "ChunkGatedDeltaRule", "RecurrentGatedDeltaRule"
RULES = ("delta", "gated_delta")
FLOAT, BF16, INT32 = ir.DataType.FLOAT, ir.DataType.BFLOAT16, ir.DataType.INT32
TOKENS = ("query", "key", "value", "beta")
_BY_KEY = "CANN has a decay for each key dimension only for one token"


@dataclass(frozen=True)
class Sizes:
    """The sizes of a LinearAttention: B, T, Nk, Dk, Nv and Dv."""

    batch: Dim
    tokens: Dim
    key_heads: int
    size: int
    heads: int
    width: int


@dataclass(frozen=True)
class DeltaRule:
    """A linear attention that becomes an operator of CANN: what it reads, its sizes, and which
    operator it is."""

    call: LinearCall
    spec: OpSpec
    sizes: Sizes
    by_key: bool
    """Has each key dimension a decay of its own?"""
    state: ir.DataType
    """The type of the states in the operator."""
    assumed: tuple[str, ...]

    @property
    def is_step(self) -> bool:
        """Is it the operator for one token?"""
        return self.spec.name == STEPS


@dataclass(frozen=True)
class Replacement:
    """The operator, and the values that take the place of output and present_state; None for one
    that nothing reads."""

    node: ir.Node
    output: ir.Value
    present_state: ir.Value | None
    assumed: tuple[str, ...]


def convert(call: LinearCall, facts: Facts, builder: Builder) -> Replacement:
    """Add the operator of CANN and what stands around it to the graph. Raises Decline."""
    return _Build(_match(call, facts), facts, builder).replacement()


def _match(call: LinearCall, facts: Facts) -> DeltaRule:
    """What a linear attention becomes. Raises Decline."""
    options = facts.options
    if call.rule not in RULES:  # (1)
        raise _left(
            call,
            f"CANN has no operator for the rule {call.rule}",
            other_target("ort", "has an operator for it"),
        )
    sizes = _sizes(call, facts.info)
    by_key = _is_by_key(call, sizes, facts.info)
    is_step, assumed = _is_step(sizes.tokens, options)
    if by_key and not is_step:  # (4)
        if sizes.tokens.const is not None:
            raise _left(call, _BY_KEY)
        is_step, assumed = True, (DECODE,)
    spec = _spec(call.node, STEPS if is_step else CHUNKS, options)
    state, halved = _types(call, spec, facts)
    assumed += halved + _on_numbers(slow="decay" in call.inputs and not is_step)
    _check_vouched(call, spec, facts, assumed)
    return DeltaRule(call, spec, sizes, by_key, state, assumed)


def _sizes(call: LinearCall, info: ShapeInfo) -> Sizes:
    """The sizes. Raises Decline where they are not known, or are none of CANN's operators."""
    query, key, value = (info.shape(call.inputs[name]) for name in ("query", "key", "value"))
    if query is None or key is None or value is None:
        raise _left(call, "the ranks of its tensors are not known")
    key_heads, heads = call.heads
    size, width = _divided(query[-1], key_heads), _divided(value[-1], heads)
    if size is None or width is None:
        raise _left(call, "the sizes of its heads are not known")
    if key[-1].const != key_heads * size or heads % key_heads:  # (2)
        raise _left(
            call,
            "CANN has as many heads of key as of query, and their number divides that of the states",
        )
    return Sizes(query[0], query[1], key_heads, size, heads, width)


def _is_by_key(call: LinearCall, sizes: Sizes, info: ShapeInfo) -> bool:
    """Has each key dimension a decay of its own? Raises Decline where that is not known."""
    decay = call.inputs.get("decay")
    if decay is None:
        return False
    shape = info.shape(decay)
    found = None if shape is None else shape[-1].const
    if found not in (sizes.heads, sizes.heads * sizes.size):
        raise _left(call, "the width of its decay is not known")
    return found != sizes.heads  # (5)


def _left(call: LinearCall, reason: str, hint: str = "") -> Decline:
    """Without the usual advice for a ready-made operator, which is about attention with a
    softmax."""
    return call.decline(reason, hint, Code.ILLEGAL)


def _divided(whole: Dim, count: int) -> int | None:
    if whole.const is None or count < 1 or whole.const % count:
        return None
    return whole.const // count


def _is_step(tokens: Dim, options: Options) -> tuple[bool, tuple[str, ...]]:
    """Whether each sequence has one token, and what this rests on."""
    if tokens.const is None and DECODE in options.assume:  # (3)
        return True, (DECODE,)
    return tokens.const == 1, ()


def _spec(node: ir.Node, op_type: str, options: Options) -> OpSpec:
    """The prototype for the version of CANN. Raises Decline, also where the product does not have
    the operator."""
    chip = product(options.ascend_product)
    if not any(get(op_type).product(soc) for soc in chip.socs):
        raise Decline(Code.ILLEGAL, f"{op_type} is not available on {chip.title}", node)
    return prototype(op_type, options, node)


def _types(call: LinearCall, spec: OpSpec, facts: Facts) -> tuple[ir.DataType, tuple[str, ...]]:
    """The type of the states in the operator, and the assumption that the types rest on. Raises
    Decline."""
    info, options = facts.info, facts.options
    given = {name: info.dtype(value) for name, value in call.inputs.items()}
    if None in given.values():
        raise Decline(Code.DTYPE, "the type of one of its tensors is not known", call.node)
    of_state = given.get("past_state", given["query"])
    legal = spec.legal_types("state" if spec.name == STEPS else "initial_state")
    takes_float = "DT_FLOAT" in legal and (
        spec.name == STEPS or product(options.ascend_product).name == "950"
    )
    state = FLOAT if takes_float and of_state != BF16 else BF16  # (8)
    is_kept = all(given[name] == BF16 for name in TOKENS) and (state == FLOAT or of_state == BF16)
    if is_kept:
        return state, ()
    return state, (HALF_ATTENTION,)


def _on_numbers(slow: bool) -> tuple[str, ...]:
    """The assumptions about the numbers (9)."""
    return (UNIT_INPUTS, SLOW_DECAY) if slow else (UNIT_INPUTS,)


def _check_vouched(call: LinearCall, spec: OpSpec, facts: Facts, needed: Sequence[str]) -> None:
    """Raise a Decline that names all assumptions for which the user did not vouch."""
    missing = [word for word in needed if word not in facts.options.assume]
    if not missing:
        return
    of_model = (facts.info.dtype(value) for value in call.inputs.values())
    kind = next((dtype.numpy().name for dtype in of_model if dtype not in (None, BF16)), "")
    reasons = {
        DECODE: _BY_KEY,
        HALF_ATTENTION: f"{spec.name} computes in bfloat16, and this is {kind}",
        UNIT_INPUTS: "its query and key may be outside of -1 to 1, its beta outside of 0 to 1, its log decay above 0",
        SLOW_DECAY: f"its log decay may be below -1, where {CHUNKS} may overflow",
    }
    conditions = {
        DECODE: "every run decodes one token",
        HALF_ATTENTION: "its tensors may be cast to bfloat16",
        UNIT_INPUTS: "its numbers never are so",
        SLOW_DECAY: "its numbers never are so",
    }
    if missing == [HALF_ATTENTION]:
        hint = f"`--assume {HALF_ATTENTION}` casts its tensors; or convert the model to bfloat16"
    else:
        condition = " and ".join(dict.fromkeys(conditions[word] for word in missing))
        hint = f"--assume {','.join(missing)} if {condition}"
    code = Code.DTYPE if missing[0] == HALF_ATTENTION else Code.ILLEGAL
    raise Decline(code, "; ".join(reasons[word] for word in missing), call.node, hint)


@dataclass(frozen=True)
class _Build:
    rule: DeltaRule
    facts: Facts
    builder: Builder

    def replacement(self) -> Replacement:
        """The operator and its results in the place of those of LinearAttention. Raises Decline."""
        rule, builder = self.rule, self.builder
        scale = rule.call.scale or rule.sizes.size**-0.5
        made = registry_node(rule.spec, self._inputs(), {"scale_value": scale}, builder)
        for output, name in zip(made.outputs, rule.spec.output_names, strict=True):
            output.name = builder.names.new(f"{made.name}_{name}")
        target, cann = self.facts.options.ascend_product, self.facts.options.cann
        for violation in verify(node_view(made, builder.info), target, cann):
            raise Decline(Code.ILLEGAL, f"{target}: {violation}", rule.call.node)
        builder.graph.append(made)
        out, state = made.outputs
        out.dtype, state.dtype = BF16, rule.state
        output = builder.reshape(out, self._whole())
        return Replacement(made, self._as("query", output), self._present(state), rule.assumed)

    def _inputs(self) -> dict[str, ir.Value]:
        """The inputs of the operator by name."""
        rule, given, sizes = self.rule, self.rule.call.inputs, self.rule.sizes
        inputs = {
            "query": self._packed(given["query"], BF16, sizes.key_heads, sizes.size),
            "key": self._packed(given["key"], BF16, sizes.key_heads, sizes.size),
            "value": self._packed(given["value"], BF16, sizes.heads, sizes.width),
            "beta": self._packed(self._beta(), BF16, sizes.heads),
        }
        if rule.is_step:
            inputs |= {"state": self._states(), "actual_seq_lengths": self._each(Dim(1))}
            inputs["ssm_state_indices"] = self._places()
        else:
            inputs |= {
                "initial_state": self._states(),
                "actual_seq_lengths": self._each(sizes.tokens),
            }
        if "decay" in given and rule.by_key:
            inputs["gk"] = self._packed(given["decay"], FLOAT, sizes.heads, sizes.size)
        elif "decay" in given:
            inputs["g"] = self._packed(given["decay"], FLOAT, sizes.heads)
        return inputs

    def _packed(self, value: ir.Value, dtype: ir.DataType, *sizes: int) -> ir.Value:
        """[B,T,width] in a type as [B*T,sizes]."""
        builder = self.builder
        return builder.reshape(builder.cast(value, dtype), [-1, *sizes])

    def _beta(self) -> ir.Value:
        """beta with one number for each head."""
        beta, heads = self.rule.call.inputs["beta"], self.rule.sizes.heads
        shape = self.facts.info.shape(beta)
        if shape is not None and shape[-1].const == heads:
            return beta
        return self.builder.expand(beta, [1, 1, heads])  # (6)

    def _states(self) -> ir.Value:
        """The states in front of the tokens, as the operator has them."""
        rule, builder, past = self.rule, self.builder, self.rule.call.inputs.get("past_state")
        if past is not None:
            return builder.cast(builder.transpose(past, TURNED), rule.state)
        batch, sizes = rule.sizes.batch.const, rule.sizes
        shape = (1 if batch is None else batch, sizes.heads, sizes.width, sizes.size)
        if batch is not None:
            return builder.constant(np.zeros(shape, rule.state.numpy()), "state")  # (7)
        # ONNX Runtime expands no bfloat16.
        zeros = builder.constant(np.zeros(shape, np.float32), "state")
        every = [builder.dimension(rule.call.inputs["query"], 0), builder.ints(shape[1:])]
        whole = builder.expand(zeros, builder.concat(every, 0))
        return builder.cast(whole, rule.state)

    def _each(self, tokens: Dim) -> ir.Value:
        """The number of tokens, once for each sequence."""
        builder, query, batch = (
            self.builder,
            self.rule.call.inputs["query"],
            self.rule.sizes.batch.const,
        )
        if tokens.const is not None and batch is not None:
            return builder.constant(np.full(batch, tokens.const, np.int32), "lengths")
        if tokens.const is not None:
            one = builder.constant(np.array([tokens.const], np.int32), "length")
        else:
            one = builder.cast(builder.dimension(query, 1), INT32)
        return builder.expand(one, builder.dimension(query, 0))

    def _places(self) -> ir.Value:
        """The block of each sequence, which has its number."""
        builder, batch = self.builder, self.rule.sizes.batch.const
        if batch is not None:
            return builder.constant(np.arange(batch, dtype=np.int32), "blocks")
        return builder.cast(
            builder.range(builder.dimension(self.rule.call.inputs["query"], 0)), INT32
        )

    def _whole(self) -> ir.Value:
        """The shape of output, with -1 for one open size."""
        sizes, builder, query = self.rule.sizes, self.builder, self.rule.call.inputs["query"]
        batch, tokens, last = sizes.batch.const, sizes.tokens.const, sizes.heads * sizes.width
        if batch is not None or tokens is not None:
            return builder.ints([-1 if size is None else size for size in (batch, tokens)] + [last])
        every = [builder.dimension(query, 0), builder.dimension(query, 1), builder.ints([last])]
        return builder.concat(every, 0)

    def _as(self, name: str, value: ir.Value) -> ir.Value:
        """A result in the type of an input."""
        dtype = self.facts.info.dtype(self.rule.call.inputs[name])
        return value if dtype is None else self.builder.cast(value, dtype)

    def _present(self, state: ir.Value) -> ir.Value | None:
        """present_state, if something reads it."""
        if not self.rule.call.has_present:
            return None
        result = self._as("past_state" if "past_state" in self.rule.call.inputs else "query", state)
        return self.builder.transpose(result, TURNED)
