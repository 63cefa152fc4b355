"""The metadata of a model or a node."""

from __future__ import annotations

import onnx

ASSUMED = "fa_compiler.assumed"
"""The key under which a model for ONNX Runtime tells that its fused attention takes one token in each run."""


def metadata_of(owner: onnx.ModelProto | onnx.NodeProto, key: str) -> str | None:
    """The text under a key; None where there is none."""
    return next((entry.value for entry in owner.metadata_props if entry.key == key), None)
