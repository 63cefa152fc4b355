"""The lines of the report: what is built of what was found, and why not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

import onnx_ir as ir

from fa_compiler.passes.answer.decline import Decline, attempt, label
from fa_compiler.passes.answer.report import Around
from fa_compiler.passes.emit.build import Builder

Found = TypeVar("Found")


def first_built(
    node: ir.Node,
    found: Iterable[Found] | Decline,
    builder: Builder,
    emit: Callable[[Found], Around],
) -> Around | None:
    """The line of the first that can be emitted, else of the first decline; None where nothing was
    found."""
    if isinstance(found, Decline):
        return declined(node, found)
    refusal: Decline | None = None
    for one in found:
        place = builder.place
        line = attempt(lambda one=one: emit(one))  # type: ignore[misc]
        if not isinstance(line, Decline):
            return line
        builder.go_back(place)
        refusal = refusal or line
    return None if refusal is None else declined(node, refusal)


def declined(node: ir.Node | None, decline: Decline) -> Around:
    """The line of what stays as it is: a norm, an activation, a rotation, products of one
    operand."""
    line = Around(label(node) or "", "declined", code=decline.code, reason=decline.reason)
    return replace(line, culprit=label(decline.culprit), hint=decline.hint)
