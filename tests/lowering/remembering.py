"""The float64 reference takes longer than the kernels; what it gives is the same for all instruction sets."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

from fa_compiler import reference


def key_of(op: str, inputs: Mapping[str, Any], *more: Any) -> str:
    """A name for a call: equal for equal calls."""
    return hashlib.sha256(pickle.dumps((op, sorted(inputs.items()), *more))).hexdigest()


def given(result: Any) -> Any:
    """What a call returned or raised, returned or raised again."""
    if isinstance(result, Exception):
        raise result
    return {name: array.copy() for name, array in result.items()}


@contextmanager
def remembered() -> Iterator[None]:
    """Within it the reference computes each call once."""
    known: dict[str, Any] = {}
    plain = reference.run

    def run(op: str, inputs: Mapping[str, Any], attrs: Mapping[str, Any], *args: Any, **more: Any) -> Any:
        key = key_of(op, inputs, sorted(attrs.items()), args, more)
        if key not in known:
            try:
                known[key] = plain(op, inputs, attrs, *args, **more)
            except reference.ReferenceInputError as error:
                known[key] = error
        return given(known[key])

    with mock.patch.object(reference, "run", run):
        yield
