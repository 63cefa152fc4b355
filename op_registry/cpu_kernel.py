"""What the registry knows about an operator's CPU kernel, which runs in ONNX Runtime.

ONNX Runtime finds a custom operator's kernel by the types of its inputs. `tools/descriptors.py`
derives the combinations of types from those registered for the Ascend products. It cannot do so for
operators whose inputs are lists: ONNX Runtime allows a list only as the last input, and not
together with absent inputs. Such an operator is registered with as many optional inputs as its
lists may need ("places"), and its kernel reads the attributes `<name>_count`. The lengths of the
lists decide which input stands at a place, and therefore which type it has.

ONNX Runtime tries the combinations in the order of registration and takes the type of a result from
the first one whose inputs fit. The file of an operator with lists therefore gives the combinations
itself, as `TypeRow`s, in an order that gives each result the right type. The kernel checks all
other types.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

MOST_LISTED = 32
"""The largest number of tensors that the CPU kernels take in a list of keys or values. Each of them
makes every session start a little more slowly."""

ANY = "undefined"
"""The type of a place that may hold a tensor of any type, or none."""

ABSENT = "string"
"""The type of a place that must be empty. No operator has tensors of strings."""

OF_QUERY = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16", "int8": "float16"}
"""For the inference operators: the type of a result that is not quantised, by the type of query."""


class TypeRow(NamedTuple):
    """The types of the places that an operator is registered with, and of its outputs. They are
    named as in ort::Element."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def type_row(inputs: tuple[str, ...], places: int, *outputs: str) -> TypeRow:
    """A row of `places` places. The first ones have the types `inputs`, and the places after them
    must be empty."""
    return TypeRow(inputs + (ABSENT,) * (places - len(inputs)), outputs)


@dataclass(frozen=True)
class CpuKernel:
    """The CPU kernel of an operator.

    `extensions` are the ids of the extensions it supports (`extensions.py`). `required_output` is
    the output that every node has, or None if a node may leave out any output. `reordered` names
    the variants that have the inputs in another order; the library registers them in addition to
    the newest one. `type_rows` gives the combinations of types of an operator with lists.
    """

    extensions: tuple[str, ...] = ()
    required_output: str | None = None
    reordered: tuple[str, ...] = ()
    type_rows: Callable[[], tuple[TypeRow, ...]] | None = None
