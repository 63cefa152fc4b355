"""Where ONNX Runtime rounds numbers of 16 bits.

Its CPU kernels of most operators are of float32 (op_registry/sixteen_bit_kernels.py). The operators
between casts to float32 and back then compute unrounded numbers, one after the other. It has 16-bit
kernels only for the operators that move elements, a Cast to the same type included, and for Max,
Min, Clip and a few others. Such a kernel rounds what it reads. But a single operator that moves
elements is computed in float32 where it stands between two operators that are.
"""

from __future__ import annotations

import onnx_ir as ir

from fa_compiler.op_registry.sixteen_bit_kernels import (
    GIVE_FLOAT32,
    MOVED_AS_FLOAT32,
    READ_16_BITS,
    READ_FLOAT32,
)
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.ir.nodes import SIXTEEN_BITS, int_attr, is_op, producer, source_through
from fa_compiler.passes.ops.elementwise import FOUR_OPERATIONS
from fa_compiler.passes.ops.movers import MOVES
from fa_compiler.passes.ops.numbers import LIMITS
from fa_compiler.passes.values.shapes import ShapeInfo

MOVED_AS_16_BITS = tuple(op_type for op_type in MOVES if op_type not in MOVED_AS_FLOAT32)
SCORING = (*FOUR_OPERATIONS, "Where")
"""Operators that scores go through after a term. Their kernels compute 16-bit types in float32."""


def is_rounded_behind(base: ir.Value, value: ir.Value, info: ShapeInfo) -> bool:
    """Do the operators that move 16-bit numbers from `base`, where they are computed, to `value`
    round them? After a Cast from float32 the first such operator does. Raises Decline where that is
    not known."""
    emitter = value.producer()
    if base is value or emitter is None or info.dtype(value) == ir.DataType.FLOAT:
        return False
    if is_op(base.producer(), "Cast"):
        return True
    if not is_op(base.producer(), *GIVE_FLOAT32):
        return False
    _check_moves(base, value)
    return not (emitter.inputs[0] is base and _has_unrounded_readers(value, info))


def _check_moves(base: ir.Value, value: ir.Value) -> None:
    """Raise Decline where one of the operators between two values is computed in float32: what
    stands beside it may round nothing."""
    while (
        value is not base
        and (mover := value.producer()) is not None
        and mover.inputs[0] is not None
    ):
        if is_op(mover, *MOVED_AS_FLOAT32):
            raise _unknown(value, mover)
        value = mover.inputs[0]


def _unknown(value: ir.Value, node: ir.Node) -> Decline:
    """What is not known of a value that a node reads or moves."""
    reason = f"whether ONNX Runtime rounds {value.name!r} to 16 bits is not known, as {node.op_type} reads it"
    return Decline(Code.MASK_VALUE, reason, node)


def is_moved_unrounded(value: ir.Value, info: ShapeInfo) -> bool:
    """Is the value moved by a single operator between two operators that ONNX Runtime computes in
    float32?"""
    emitter = value.producer()
    if not is_op(emitter, *MOVES):
        return False
    maker = producer(emitter.inputs[0])
    if is_op(maker, *MOVED_AS_FLOAT32) and info.dtype(value) in SIXTEEN_BITS:
        raise _unknown(value, emitter)
    return is_op(maker, *GIVE_FLOAT32) and _has_unrounded_readers(value, info)


def _has_unrounded_readers(value: ir.Value, info: ShapeInfo) -> bool:
    """Is a value read only by operators that ONNX Runtime computes in float32? Raises Decline where
    it is not known of a reader."""
    others = [reader for reader in value.consumers() if not is_op(reader, *READ_FLOAT32)]
    known = MOVED_AS_16_BITS if info.dtype(value) in SIXTEEN_BITS else MOVES
    for reader in others:
        if not is_op(reader, *known, *READ_16_BITS):
            raise _unknown(value, reader)
    return not value.is_graph_output() and not others


def is_rounded_on_the_way(value: ir.Value) -> bool:
    """Does ONNX Runtime round a 16-bit sum to 16 bits on its way to the softmax?

    A single moving operator between others is computed in float32. Two in a row are not, nor is a
    Concat whose first operand comes from a 16-bit kernel, such as an Expand that makes a sink. Max,
    Min and Clip round what they read.
    """
    pending = [(value, False)]  # a value, and whether a moving operator makes it
    seen: set[tuple[ir.Value, bool]] = set()
    while pending:
        current, moved = pending.pop()
        if (current, moved) in seen:
            continue
        seen.add((current, moved))
        for reader in current.consumers():
            if is_op(reader, *SCORING, *MOVED_AS_FLOAT32):
                pending.append((reader.outputs[0], False))
            elif is_op(reader, *LIMITS):
                return True
            elif _moves_16_bits(reader):
                moves = not is_op(reader, "Identity")
                if moves and (moved or _follows_16_bits(reader, current)):
                    return True
                pending.append((reader.outputs[0], moved or moves))
    return False


def _moves_16_bits(node: ir.Node) -> bool:
    """Does an operator move elements, for which ONNX Runtime has 16-bit kernels?"""
    return is_op(node, *MOVED_AS_16_BITS, "Concat") or (
        is_op(node, "Cast") and int_attr(node, "to", 0) in SIXTEEN_BITS
    )


def _follows_16_bits(node: ir.Node, beside: ir.Value) -> bool:
    """Does a 16-bit kernel make the first operand of a node, which is not `beside`?"""
    first = node.inputs[0]
    return first is not None and first is not beside and _is_of_16_bits(first)


def _is_of_16_bits(value: ir.Value) -> bool:
    """Does a 16-bit kernel make the value?"""
    return is_op(source_through(value, "Identity").producer(), *MOVED_AS_16_BITS, *LIMITS, "Concat")
