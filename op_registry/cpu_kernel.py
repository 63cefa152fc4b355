"""What the registry says of an operator's CPU kernel, the one for ONNX Runtime.

ONNX Runtime finds a custom operator's kernel by the types of its inputs. `lowering/ort/descriptors.py` derives the
combinations of types from those registered for the Ascend products. It cannot do so for operators whose inputs are
lists: ONNX Runtime allows a list as the last input only, and not beside absent inputs. Such an operator is registered
with as many optional inputs as its lists may need ("places"), and its kernel reads the attributes `<name>_count`. Which
input stands at a place, and so the type there, depends on the lengths of the lists. ONNX Runtime takes the type of a
result from the first combination whose inputs fit, in the order of registration. The operator's file therefore lists
the combinations itself, as `TypeRow`s, in an order that gives each result the right type. The kernel checks all other
types.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

MOST_LISTED = 32
"""The number of tensors that the CPU kernels take in a list of keys or values. Each makes every session start a little
more slowly."""

ANY = "undefined"
"""The type of a place that may hold any tensor, or none."""

ABSENT = "string"
"""The type of a place that must be empty: no operator has tensors of strings."""

OF_QUERY = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16", "int8": "float16"}
"""The type of a result that is not quantised, by query's type, for the operators of inference."""


class TypeRow(NamedTuple):
    """Types of the places that an operator is registered with, and of its outputs, named as in ort::Element."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def type_row(inputs: tuple[str, ...], places: int, *outputs: str) -> TypeRow:
    """A row of `places` places: these inputs come first, and the places behind them must be empty."""
    return TypeRow(inputs + (ABSENT,) * (places - len(inputs)), outputs)


@dataclass(frozen=True)
class CpuKernel:
    """The CPU kernel of an operator.

    `extensions` are the ids of those it has (`extensions.py`). `required_output` is the output that every node has,
    None if a node may leave out any of them. `reordered` names the variants that have the inputs in another order; the
    library registers them beside the newest one. `type_rows` gives the combinations of types of an operator with lists.
    """

    extensions: tuple[str, ...] = ()
    required_output: str | None = None
    reordered: tuple[str, ...] = ()
    type_rows: Callable[[], tuple[TypeRow, ...]] | None = None
