"""`OwnSession`: a session that this package makes for itself."""

from __future__ import annotations

from typing import ClassVar

import onnxruntime as ort


class OwnSession(ort.InferenceSession):  # type: ignore[misc]  # onnxruntime is not typed
    """ONNX Runtime's session of a model as it is.

    Where all sessions of a process get the execution provider (`fa_compiler.everywhere`), this one
    does not: what is compared or measured would not be the model itself.
    """

    why_unfused: ClassVar[str | None] = None
    """What the report of all sessions says of a session that a user asked for; it does not tell of
    the others."""
