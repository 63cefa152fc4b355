"""What is wrong with a node: the one kind of message that rules yield and `verify` returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NULLPTR = 161001
"""ACLNN_ERR_PARAM_NULLPTR: a required input, output or attribute is missing."""

INVALID = 161002
"""ACLNN_ERR_PARAM_INVALID: anything else that a check of the parameters refuses. The checks of the operator's
tiling and the limits stated only in documents have it too, as the aclnn documents file them."""

GENERIC = "G0"
"""The rule that every operator has: required inputs and attributes are there; names, types and product are known."""

Stage = Literal["aclnn", "tiling", "document"]
"""Where a constraint is checked on Ascend: in the aclnn interface, while the operator is compiled or tiled,
or nowhere (it is stated in documents only)."""


@dataclass(frozen=True)
class Diagnostic:
    """A constraint that a node breaks.

    `tensor` is the input, output or attribute that it is about. `message` is a sentence that names it, what was found
    and what was expected. `stage` says where Ascend would notice, `code` is the aclnn status: 161001 if a required
    parameter is missing, 161002 otherwise. `extension` is the id of the extension by which the CPU kernel takes the
    node nevertheless. `constraint` is the number of the rule ("FA.11"); `verify` fills it in.
    """

    tensor: str
    message: str
    stage: Stage = "tiling"
    code: int = INVALID
    extension: str | None = None
    constraint: str = GENERIC

    def __str__(self) -> str:
        return f"{self.constraint} ({self.code}): {self.message}"
