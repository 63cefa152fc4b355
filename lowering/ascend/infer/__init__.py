"""Inference of types and shapes through a whole GE graph. The checker compares a file with its
result.

What an operator makes of its inputs follows from its meaning in ONNX, which `convert/backward`
states, and from ONNX's shape rules (`meaning.py`). `own.py` has the operators for which this does
not hold. The rules describe runs that succeed, so `misfits.py` says which inputs an operator
refuses. `graph.infer_model` goes through a model in the order of the edges. **Add an operator**:
its meaning in `convert/backward`, and what it refuses in `misfits.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from fa_compiler.lowering.ascend.graph import Attr, Op
from fa_compiler.lowering.ascend.infer import meaning, misfits, own
from fa_compiler.lowering.ascend.infer.facts import Fact, InferenceError, OpFacts

__all__ = ["Fact", "InferenceError", "can_infer", "infer"]


def can_infer(op_type: str) -> bool:
    """Whether something is known of the results of an operator."""
    return op_type in own.RULES or meaning.is_known(op_type)


def infer(op: Op, inputs: Mapping[str, Fact]) -> list[Fact]:
    """The facts of an operator's outputs in order, from those of its present inputs by name.

    The list is empty if nothing is known of them: inputs that decide about their shape are unknown,
    or an attribute has a value without a meaning in ONNX.

    Raises:
        InferenceError: the operator cannot take these inputs.
    """
    if any(fact.value is not None for fact in inputs.values()):
        return _infer(OpFacts(op, inputs))
    return list(_repeated(op.type, tuple(op.attrs.items()), tuple(inputs.items())))


@lru_cache(1 << 12)
def _repeated(
    op_type: str, attrs: tuple[tuple[str, Attr], ...], inputs: tuple[tuple[str, Fact], ...]
) -> Sequence[Fact]:
    """The facts of a call without known numbers: the layers of a model repeat most of its calls."""
    return _infer(OpFacts(Op("", op_type, attrs=dict(attrs)), dict(inputs)))


def _infer(call: OpFacts) -> list[Fact]:
    misfits.check(call)
    rule = own.RULES.get(call.op.type, meaning.infer)
    return list(rule(call))
