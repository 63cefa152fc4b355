"""Nodes that ONNX Runtime's CPU provider loads in one opset and not in a later one, though they
mean the same in both.

`lost_kernels.tsv` has one row for each operator and types: the first opset from which on the node
loads, the first one in which it no longer does, and the types of inputs and outputs. It is written
by tests/kernel_probe.py, which loads each node in the onnxruntime that the file names. Either there
is no kernel of the new definition, or the node never had a kernel and its body is no longer
inlined, because an operator of the body has changed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True)
class LostKernel:
    """One row: a node of these types loads in the opsets from `first` to `last` - 1. Types are
    ONNX's words, such as double."""

    operator: str
    first: int
    last: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@functools.cache
def lost_kernels() -> tuple[LostKernel, ...]:
    """The rows."""
    lines = (
        resources.files(__package__)
        .joinpath("lost_kernels.tsv")
        .read_text(encoding="utf-8")
        .splitlines()[2:]
    )
    rows = (line.split("\t") for line in lines)
    return tuple(
        LostKernel(
            operator,
            int(first),
            int(last),
            *(tuple(kinds.replace("-", "").split()) for kinds in (given, made)),
        )
        for operator, first, last, given, made in rows
    )


def lost_types(operator: str, given: int, least: int) -> frozenset[str]:
    """The types of the first input, or of the result where there is none, for which the operator
    loads in the opset `given` and not in the later one `least`."""
    return frozenset(
        (row.inputs or row.outputs)[0]
        for row in lost_kernels()
        if row.operator == operator and row.first <= given < row.last <= least
    )
