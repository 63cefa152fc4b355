"""Runs one operator eagerly, with its REG_OP names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fa_compiler.errors import suggests_keywords
from fa_compiler.op_registry import (
    InputError,
    Kind,
    OpSpec,
    as_arrays,
    full_attrs,
    get,
    later_attrs,
    refusal,
)
from fa_compiler.op_registry.calls import Arrays
from fa_compiler.reference import ops  # noqa: F401  (registers the operators)
from fa_compiler.reference.call import OPERATORS, Array, OpCall, ReferenceInputError


@suggests_keywords
def run(
    op_type: str,
    inputs: Mapping[str, Any],
    attrs: Mapping[str, Any],
    outputs: Sequence[str] | None = None,
    dtype: str | None = None,
    cann: str | None = None,
) -> dict[str, Array]:
    """Run `op_type` in float64, and return its outputs by name in the operator's dtypes.

    Args:
        op_type: the operator.
        inputs: arrays by REG_OP input name, a list of arrays for a dynamic input. The dtypes are
            those of `ops.run` and float64. An absent input is None or missing.
        attrs: attributes by name; a missing one has its default.
        outputs: the names of the outputs to return; None returns all.
        dtype: "float64" gives unrounded float64 results of pure float64 arithmetic.
        cann: the variant of the prototype, which determines names and defaults; None is the newest.

    Raises:
        UnknownOp, UnknownVariant: the registry has no such operator or variant.
        NodeError: an attribute is unknown, missing or of a wrong type.
        ReferenceInputError: the operator or this reference does not take the inputs.
    """
    spec = get(op_type, cann)
    function = OPERATORS.get(op_type)
    if function is None:
        raise ReferenceInputError(
            op_type, "operator", f"has no reference; there is one of {', '.join(sorted(OPERATORS))}"
        )
    if dtype not in (None, "float64"):
        raise ReferenceInputError(op_type, "dtype", f'must be None or "float64", got {dtype!r}')
    output_names = [item.name for item in spec.outputs]
    wanted = output_names if outputs is None else list(outputs)
    for name in wanted:
        if name not in output_names:
            raise ReferenceInputError(
                op_type,
                name,
                f"is not an output of this operator; they are {', '.join(output_names)}",
            )
    attributes, arrays = full_attrs(spec, attrs), _arrays(spec, inputs)
    broken = refusal(spec, arrays, attributes, cann, doubles=True)
    if broken is not None:
        problem = broken.message.removeprefix(f"{broken.tensor} ")
        raise ReferenceInputError(op_type, broken.tensor, f"{problem} ({broken.constraint})")
    results = function(
        OpCall(op_type, arrays, later_attrs(spec) | attributes, exact=dtype is not None)
    )
    with np.errstate(over="ignore"):
        return {
            name: results[name].data if dtype else results[name].data.astype(results[name].dtype)
            for name in wanted
        }


def _arrays(spec: OpSpec, inputs: Mapping[str, Any]) -> Arrays:
    for name in inputs:
        if name not in spec.input_names:
            raise ReferenceInputError(
                spec.name,
                name,
                f"is not an input of this operator; they are {', '.join(spec.input_names)}",
            )
    try:
        arrays = as_arrays(spec, inputs)
    except InputError as error:
        raise ReferenceInputError(spec.name, error.input, error.problem) from None
    for item in spec.inputs:
        if item.kind is not Kind.OPTIONAL and item.name not in arrays:
            raise ReferenceInputError(spec.name, item.name, "this input is needed and absent")
    return arrays
