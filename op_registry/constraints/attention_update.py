"""The constraints AU.1 to AU.5 of AttentionUpdate."""

from __future__ import annotations

from collections.abc import Iterator

from fa_compiler.op_registry.constraints.core import CheckedNode, Fault, Rules, text
from fa_compiler.op_registry.dtypes import FLOATS
from fa_compiler.op_registry.geometry import Shape, differ

rules = Rules("AU")

OWN_TYPES = ("lse", "go")
"""Inputs whose type a numbered rule looks after."""


@rules(1)
def types(call: CheckedNode) -> Iterator[Fault]:
    """lse is float32, the tensors of go have one float type."""
    for tensor in call.lists.get("lse", ()):
        if tensor.dtype and tensor.dtype != "DT_FLOAT":
            yield Fault("lse", f"lse is {tensor.dtype}, expected DT_FLOAT", "aclnn")
            return
    types = [tensor.dtype for tensor in call.lists.get("go", ()) if tensor.dtype]
    for dtype in types:
        if dtype not in FLOATS:
            yield Fault("go", f"go is {dtype}, expected one of {', '.join(FLOATS)}", "aclnn")
            return
        if dtype != types[0]:
            yield Fault("go", f"go holds {types[0]} and {dtype}, expected one type", "aclnn")
            return


@rules(2)
def counts(call: CheckedNode) -> Iterator[Fault]:
    """sp is 1 to 16, and there are so many tensors of each."""
    sp = call.attr("sp")
    if not 1 <= sp <= 16:
        yield Fault("sp", f"sp is {sp}, expected 1 to 16")
        return
    for name in ("lse", "go"):
        count = len(call.lists.get(name, ()))
        if count not in (0, sp):
            yield Fault(name, f"{name} is a list of {count}, expected {sp} (sp)")


@rules(3)
def update_type(call: CheckedNode) -> Iterator[Fault]:
    """update_type is 0 or 1."""
    value = call.attr("update_type")
    if value not in (0, 1):
        yield Fault("update_type", f"update_type is {value}, expected 0 or 1")


@rules(4)
def merged(call: CheckedNode) -> Iterator[Fault]:
    """lse_m is there with update_type 1 only."""
    stated = call.outputs.get("lse_m")
    if call.attr("update_type") == 0 and stated is not None and stated.shape not in (None, (0,)):
        yield Fault("lse_m", "lse_m is given with update_type 0, expected none", "aclnn")


@rules(5)
def shapes(call: CheckedNode) -> Iterator[Fault]:
    """lse is [rows] and go [rows,D], all alike; rows are batch, tokens and heads in one."""
    known: dict[str, Shape] = {}
    for name, rank in (("lse", 1), ("go", 2)):
        for tensor in call.lists.get(name, ()):
            if tensor.shape is None:
                continue
            if len(tensor.shape) != rank:
                yield Fault(name, f"{name} has rank {len(tensor.shape)}, expected {rank}")
                return
            first = known.setdefault(name, tensor.shape)
            if any(map(differ, tensor.shape, first)):
                yield Fault(name, f"{name} has the shape {text(tensor.shape)}, expected {text(first)} as the first")
                return
    if len(known) == 2 and differ(known["lse"][0], known["go"][0]):
        yield Fault("go", f"go has {known['go'][0]} rows, expected {known['lse'][0]} as lse")
