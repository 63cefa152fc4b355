"""One call of one operator: its inputs and attributes by name, and the errors that name them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fa_compiler.op_registry.errors import FaCompilerError

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class ReferenceInputError(FaCompilerError, ValueError):
    """An invalid or unsupported input or attribute. The text names the operator and the input."""

    def __init__(self, op_type: str, name: str, problem: str, node: str = "") -> None:
        super().__init__(f"{f'node {node!r}: ' if node else ''}{op_type}: {name}: {problem}")
        self.op_type = op_type
        self.name = name
        self.problem = problem


class Output(NamedTuple):
    """A result in float64, and the dtype that the operator gives it."""

    data: Floats
    dtype: np.dtype[Any]


@dataclass(frozen=True)
class OpCall:
    """One call of an operator. `attrs` holds every attribute of its newest variant; an absent input
    is None.

    With `exact` all arithmetic is in float64. Otherwise results are rounded to float32 where this
    rounding is part of the operator's meaning (see `Attention.scores`).
    """

    op_type: str
    inputs: Mapping[str, Array | Sequence[Array] | None]
    attrs: Mapping[str, Any]
    exact: bool

    def error(self, name: str, problem: str) -> ReferenceInputError:
        """The error to raise about the input or attribute `name`."""
        return ReferenceInputError(self.op_type, name, problem)

    def optional(self, name: str) -> Array | None:
        """The tensor, or None if it is absent."""
        value = self.inputs.get(name)
        if value is None or isinstance(value, np.ndarray):
            return value
        raise self.error(name, f"expected one tensor, got a {type(value).__name__}")

    def tensor(self, name: str) -> Array:
        """The tensor. Raises ReferenceInputError if it is absent."""
        value = self.optional(name)
        if value is None:
            raise self.error(name, "this input is needed and absent")
        return value

    def tensors(self, name: str) -> Sequence[Array]:
        """The tensors of a dynamic input."""
        value = self.inputs.get(name)
        return [self.tensor(name)] if value is None or isinstance(value, np.ndarray) else value


Operator = Callable[[OpCall], dict[str, Output]]
OPERATORS: dict[str, Operator] = {}


def operator(op_type: str) -> Callable[[Operator], Operator]:
    """A decorator that registers a function as the reference of `op_type`."""

    def register(function: Operator) -> Operator:
        OPERATORS[op_type] = function
        return function

    return register
