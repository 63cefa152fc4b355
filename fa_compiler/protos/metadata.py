"""The metadata of a model or a node."""

from __future__ import annotations

import onnx

ASSUMED = "fa_compiler.assumed"
"""The key under which a model tells that its fused attention takes one token in each run."""


def metadata_of(owner: onnx.ModelProto | onnx.NodeProto, key: str) -> str | None:
    """The text under a key; None where there is none."""
    return next((entry.value for entry in owner.metadata_props if entry.key == key), None)


def takes_one_token(model: onnx.ModelProto) -> bool:
    """Was the model fused with the assumption `decode`, so that each run has to have one new
    token?"""
    return metadata_of(model, ASSUMED) is not None
