"""Running one operator eagerly, by its REG_OP names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fa_compiler.op_registry import Kind, full_attrs, get, later_attrs
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

    `inputs` maps REG_OP input names to arrays (a list of them for a dynamic input); an absent input is None
    or missing. `outputs` asks for some outputs only; `dtype="float64"` for unrounded float64 results of pure
    float64 arithmetic. `cann` chooses the variant of the prototype (its names, and the defaults of missing
    attributes), the newest without.

    Raises ReferenceInputError for inputs the operator, or this reference, does not take.
    """
    spec = get(op_type, cann)
    function = OPERATORS.get(op_type)
    if function is None:
        raise ReferenceInputError(
            op_type, "operator", f"has no reference; there is one of {', '.join(sorted(OPERATORS))}"
        )
    if dtype not in (None, "float64"):
        raise ReferenceInputError(op_type, "dtype", f'must be None or "float64", got {dtype!r}')
    _check_names(op_type, "input", inputs, [item.name for item in spec.inputs])
    for item in spec.inputs:
        if item.kind is Kind.REQUIRED and inputs.get(item.name) is None:
            raise ReferenceInputError(op_type, item.name, "this input is needed and absent")
    output_names = [item.name for item in spec.outputs]
    wanted = output_names if outputs is None else list(outputs)
    _check_names(op_type, "output", wanted, output_names)
    call = Call(
        op_type,
        {name: _arrays(value) for name, value in inputs.items()},
        later_attrs(spec) | full_attrs(spec, dict(attrs)),
        exact=dtype is not None,
    )
    results = function(call)
    with np.errstate(over="ignore"):
        return {
            name: results[name].data if dtype else results[name].data.astype(results[name].dtype) for name in wanted
        }


def _arrays(value: Any) -> Array | list[Array] | None:
    if value is None:
        return None
    if isinstance(value, list | tuple):
        return [np.asarray(item) for item in value]
    return np.asarray(value)


def _check_names(op_type: str, what: str, names: Mapping[str, Any] | Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise ReferenceInputError(op_type, name, f"is no {what} of this operator; they are {', '.join(known)}")
