"""Calls with arrays: their inputs are brought into one form, and the registry checks them.

The reference begins here, and so does the CPU kernel when it runs eagerly. Both therefore take the
same inputs and refuse the same calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fa_compiler.op_registry import dtypes
from fa_compiler.op_registry.diagnostic import Diagnostic
from fa_compiler.op_registry.errors import InputError, NodeError, suggestion
from fa_compiler.op_registry.node import NodeView, TensorInfo
from fa_compiler.op_registry.registry import operator
from fa_compiler.op_registry.spec import InputSpec, Kind, OpSpec
from fa_compiler.op_registry.verify import verify

Array = npt.NDArray[Any]
Arrays = dict[str, Array | list[Array]]
"""Inputs by name. Absent inputs are missing. A dynamic input is a list."""


def as_arrays(spec: OpSpec, inputs: Mapping[str, Any]) -> Arrays:
    """The inputs of a call as arrays in the machine's byte order. An input that is None is absent.

    An array that already has this byte order is not copied. Some operators treat an empty optional
    input as absent; such an input is left out. If the prototype allows only one type for an input,
    Python numbers and lists of numbers become arrays of that type, provided that their values fit.
    A dynamic input takes a sequence of tensors, or a single tensor.

    Raises NodeError for an unknown name. Raises its subclass InputError for an input that is not a
    tensor of numbers: a masked array with masked elements, objects, strings, or a list of arrays
    where one tensor is expected.
    """
    for name in inputs:
        if name not in spec.input_names:
            raise NodeError(
                f"{spec.name} has no input {name!r}{suggestion(name, spec.input_names)}"
            )
    drops_empty = operator(spec.name).rules.drops_empty
    found: Arrays = {}
    for entry in spec.inputs:
        value = inputs.get(entry.name)
        if value is None:
            continue
        if entry.kind is not Kind.DYNAMIC:
            array = _array(spec, entry, value, entry.name)
            if array.size or not drops_empty or entry.kind is not Kind.OPTIONAL:
                found[entry.name] = array
            continue
        tensors = list(value) if isinstance(value, (list, tuple)) else [value]
        if tensors:
            found[entry.name] = [
                _array(spec, entry, each, f"{entry.name}[{n}]") for n, each in enumerate(tensors)
            ]
    return found


def refusal(
    spec: OpSpec,
    arrays: Arrays,
    attrs: Mapping[str, Any],
    cann: str | None = None,
    doubles: bool = False,
) -> Diagnostic | None:
    """The first constraint that the call breaks and that no extension of the CPU kernel relaxes, or
    None.

    With `doubles`, float64 counts as float32, because the reference computes both in the same way.
    """

    def info(array: Array) -> TensorInfo:
        dtype = dtypes.from_numpy(array.dtype) or ""
        if doubles and dtype == "DT_DOUBLE":
            dtype = "DT_FLOAT"
        # The content of float tensors is left out: no call is refused because of it.
        return TensorInfo(dtype, array.shape, array if array.dtype.kind in "biu" else None)

    tensors = {
        name: [info(tensor) for tensor in value] if isinstance(value, list) else info(value)
        for name, value in arrays.items()
    }
    found = verify(NodeView(spec.name, spec.name, tensors, {}, attrs), cann=cann)
    return next((diagnostic for diagnostic in found if diagnostic.extension is None), None)


def _array(spec: OpSpec, entry: InputSpec, value: Any, name: str) -> Array:
    if np.ma.is_masked(value):
        raise InputError(
            spec.name,
            name,
            "is an array with masked elements, which have no value; fill them first",
        )
    if isinstance(value, (list, tuple)) and any(
        item is None or isinstance(item, np.ndarray) for item in value
    ):
        raise InputError(spec.name, name, f"is a list of {len(value)}, expected one tensor")
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(spec.name, name, f"is no array: {error}") from None
    if array.dtype.hasobject and not isinstance(value, np.ndarray):
        raise InputError(
            spec.name, name, f"is a {type(value).__name__}, expected an array of numbers"
        )
    if array.dtype.hasobject or dtypes.from_numpy(array.dtype) is None:
        raise InputError(spec.name, name, f"is an array of dtype {array.dtype}, which no input has")
    if not hasattr(value, "dtype"):
        array = _as_only_type(entry, array)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array


def _as_only_type(entry: InputSpec, array: Array) -> Array:
    """Converts an array of Python numbers to the only type that the input may have. The array is
    returned unchanged if the input may have several types, or if the numbers do not fit."""
    if len(entry.dtypes) != 1 or dtypes.lookup(entry.dtypes[0]).numpy is None:
        return array
    wanted = dtypes.to_numpy(entry.dtypes[0])
    if array.dtype.kind == "i" and wanted.kind in "iu":
        limits = np.iinfo(wanted)
        fits = array.size == 0 or (limits.min <= array.min() and array.max() <= limits.max)
        return array.astype(wanted) if fits else array
    if (array.dtype.kind == wanted.kind == "f") or array.size == 0:
        with np.errstate(over="ignore"):
            return array.astype(wanted)
    return array
