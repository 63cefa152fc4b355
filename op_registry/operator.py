"""The record of one operator, which its file in `ops/` makes.

How to add an operator: write one file under `ops/`, named like the operator, that defines `OPERATOR`:

    rules = Rules("MO", typed=("x",))

    @rules(1)
    def types(call: CheckedNode) -> Iterator[Diagnostic]: ...

    def infer(inputs: Inputs, attrs: Attrs) -> Outputs: ...

    OPERATOR = Operator(variants=(V1, V2), infer=infer, rules=rules, kernel=CpuKernel(required_output="y"))

`macros.py` says how variants are written, `constraints/core.py` how rules are. The registry finds the file by itself;
the parser, the printer, the diff, the ONNX schema and the checks follow from it. The reference of the operator and its
kernel are files of their own: `tests/test_operators.py` says what is missing, and where it belongs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fa_compiler.op_registry.constraints.core import Rules
from fa_compiler.op_registry.cpu_kernel import CpuKernel
from fa_compiler.op_registry.node import TensorInfo
from fa_compiler.op_registry.spec import OpSpec

Inputs = Mapping[str, Any]
"""TensorInfo by the name of the input; of a dynamic input the list of its tensors. Absent inputs are missing."""

Attrs = Mapping[str, Any]
"""The value of every attribute by its name, the defaults filled in."""

Outputs = dict[str, TensorInfo]
"""What is known of the outputs, by name."""

ShapeFunction = Callable[[Inputs, Attrs], Outputs]


@dataclass(frozen=True)
class Operator:
    """Everything the registry knows of an operator.

    `variants` are its prototypes, oldest first; the last one is the newest in force. `infer` gives types and shapes of
    the outputs. `rules` are the numbered constraints. `kernel` describes the CPU kernel, None if there is none.
    """

    variants: tuple[OpSpec, ...]
    infer: ShapeFunction
    rules: Rules
    kernel: CpuKernel | None

    @property
    def name(self) -> str:
        """The operator's name in REG_OP."""
        return self.variants[-1].name
