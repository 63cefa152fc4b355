"""The diagnostic: the one kind of message that the rules yield and `verify` returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NULLPTR = 161001
"""ACLNN_ERR_PARAM_NULLPTR: a required input, output or attribute is missing."""

INVALID = 161002
"""ACLNN_ERR_PARAM_INVALID: any other parameter that a check refuses. The aclnn documents also use
this status for the checks of the operator's tiling and for limits that only the documents state."""

GENERIC = "G0"
"""The number of the checks that every operator has: required inputs and attributes are present, and
names, types and the product are known."""

Stage = Literal["aclnn", "tiling", "document"]
"""Where Ascend checks a constraint: in the aclnn interface, while the operator is compiled or
tiled, or nowhere, because only a document states it."""


@dataclass(frozen=True)
class Diagnostic:
    """A constraint that a node breaks.

    `tensor` is the input, output or attribute that the message is about. `message` is a sentence
    with its name, the value that was found and the value that was expected. `stage` says where
    Ascend would notice. `code` is the aclnn status: 161001 if a required parameter is missing,
    161002 otherwise. `extension` is the id of the extension that lets the CPU kernel take the node
    nevertheless, or None. `constraint` is the number of the rule ("FA.11"); `verify` fills it in.
    """

    tensor: str
    message: str
    stage: Stage = "tiling"
    code: int = INVALID
    extension: str | None = None
    constraint: str = GENERIC

    def __str__(self) -> str:
        """The message, behind the number of the rule and the status. What every operator demands
        has no number."""
        return (
            self.message
            if self.constraint == GENERIC
            else f"{self.constraint} ({self.code}): {self.message}"
        )

    def refusal(self, target: str) -> str:
        """What stands behind the name of the node in a sentence, such as "breaks FA.11 for A2:
        ..."."""
        verb = (
            f"is refused by {target}"
            if self.constraint == GENERIC
            else f"breaks {self.constraint} for {target}"
        )
        return f"{verb}: {self.message}"
