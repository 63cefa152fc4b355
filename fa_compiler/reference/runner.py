"""Running one operator eagerly, by its REG_OP names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

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
from fa_compiler.reference.call import OPERATORS, Array, Call, ReferenceInputError


def run(
    op_type: str,
    inputs: Mapping[str, Any],
    attrs: Mapping[str, Any],
    outputs: Sequence[str] | None = None,
    dtype: str | None = None,
    cann: str | None = None,
) -> dict[str, Array]:
    """Runs `op_type` in float64 and returns its outputs by name, in the operator's dtypes.

    `inputs` maps REG_OP input names to arrays (a list of them for a dynamic input), as `ops.run` takes them and
    float64 besides; an absent input is None or missing. `outputs` asks for some outputs only; `dtype="float64"` for
    unrounded float64 results of pure float64 arithmetic. `cann` chooses the variant of the prototype (its names, and
    the defaults of missing attributes), the newest without.

    The registry is asked first, as for `ops.run`. Raises UnknownOp, UnknownVariant, NodeError (an attribute that is
    unknown, missing or of a wrong type), and ReferenceInputError for everything else that the operator, or this
    reference, does not take.
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
                op_type, name, f"is no output of this operator; they are {', '.join(output_names)}"
            )
    attributes, arrays = full_attrs(spec, attrs), _arrays(spec, inputs)
    broken = refusal(spec, arrays, attributes, cann, doubles=True)
    if broken is not None:
        problem = broken.message.removeprefix(f"{broken.tensor} ")
        raise ReferenceInputError(op_type, broken.tensor, f"{problem} ({broken.constraint})")
    results = function(Call(op_type, arrays, later_attrs(spec) | attributes, exact=dtype is not None))
    with np.errstate(over="ignore"):
        return {
            name: results[name].data if dtype else results[name].data.astype(results[name].dtype) for name in wanted
        }


def _arrays(spec: OpSpec, inputs: Mapping[str, Any]) -> Arrays:
    for name in inputs:
        if name not in spec.input_names:
            raise ReferenceInputError(
                spec.name, name, f"is no input of this operator; they are {', '.join(spec.input_names)}"
            )
    try:
        arrays = as_arrays(spec, inputs)
    except InputError as error:
        raise ReferenceInputError(spec.name, error.input, error.problem) from None
    for item in spec.inputs:
        if item.kind is not Kind.OPTIONAL and item.name not in arrays:
            raise ReferenceInputError(spec.name, item.name, "this input is needed and absent")
    return arrays
