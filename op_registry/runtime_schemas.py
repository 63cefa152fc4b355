"""The operators that ONNX Runtime knows by itself: `runtime_schemas.tsv`, by domain and name, with
the first version of the domain that has each.

ONNX Runtime looks for a node's operator here first, and among the functions of the model only for
the others. So a function that is named like one of these operators is never called: the operator
is, whatever the function's body says, in every domain and whatever overload the node names.
"""

from __future__ import annotations

import functools
from importlib import resources


@functools.cache
def _since() -> dict[tuple[str, str], int]:
    lines = (
        resources.files(__package__)
        .joinpath("runtime_schemas.tsv")
        .read_text(encoding="utf-8")
        .splitlines()[2:]
    )
    rows = (line.split("\t") for line in lines)
    return {
        ("" if domain == "ai.onnx" else domain, name): int(since) for domain, name, since in rows
    }


def is_runtime_operator(domain: str, name: str, version: int) -> bool:
    """Does ONNX Runtime know this operator in a model that imports this version of the domain?"""
    since = _since().get(("" if domain == "ai.onnx" else domain, name))
    return since is not None and since <= version
