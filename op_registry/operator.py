"""The record of one operator, which its file in `ops/` makes.

To add an operator, write one file under `ops/`, named like the operator, that defines `OPERATOR`:

    rules = Rules("MO", typed=("x",))

    @rules(1)
    def types(call: CheckedNode) -> Iterator[Diagnostic]: ...

    def infer(inputs: Inputs, attrs: Attrs) -> Outputs: ...

    OPERATOR = Operator(variants=(V1, V2), infer=infer, rules=rules,
    kernel=CpuKernel(required_output="y"))

An output may have the name of an input, as in REG_OP: the operator changes this tensor in place.
Whoever names tensors of both kinds at once has to tell the two apart, as a function of ONNX, where
their names are one space.

`macros.py` says how to write variants, `constraints/core.py` how to write rules. The registry finds
the file by itself; the parser, the printer, the diff, the ONNX schema and the checks need no
further code. The reference and the kernel of the operator are separate files:
`tests/test_operators.py` says what is missing and where it belongs.
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
"""TensorInfo by input name. A dynamic input is the list of its tensors. Absent inputs are
missing."""

Attrs = Mapping[str, Any]
"""The value of every attribute by name, with the defaults filled in."""

Outputs = dict[str, TensorInfo]
"""What is known of the outputs, by name."""

ShapeFunction = Callable[[Inputs, Attrs], Outputs]


@dataclass(frozen=True)
class Operator:
    """Everything the registry knows about an operator.

    `variants` are its prototypes, oldest first, except that the variant used by default is always
    the last. `infer` gives types and shapes of the outputs. `rules` are the numbered constraints.
    `kernel` describes the CPU kernel, or is None if there is none. `is_attention` is False for an
    operator that computes a part of the block around attention, such as a norm.
    """

    variants: tuple[OpSpec, ...]
    infer: ShapeFunction
    rules: Rules
    kernel: CpuKernel | None
    is_attention: bool = True

    @property
    def of_ascend(self) -> bool:
        """Whether Ascend has the operator. The others are this project's own, and run in ONNX
        Runtime alone."""
        return any(variant.products for variant in self.variants)

    @property
    def name(self) -> str:
        """The operator's name in REG_OP."""
        return self.variants[-1].name
