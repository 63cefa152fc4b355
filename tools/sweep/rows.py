"""What a row of the sweep is: an architecture of a collection, and how a tiny instance of it is made.

A row is cheap to make. Only its `make` imports the collection, so every interpreter can list the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

EXPORTERS = ("torchscript", "dynamo")
"""The exporters of torch, in the order in which they are tried."""

Axes = Mapping[str, Mapping[int, str]]
"""The names of the open axes, by input and axis."""


@dataclass(frozen=True)
class Row:
    """One architecture.

    `make` takes the name of an exporter and returns a torch module and its inputs by name; what the module returns is
    searched for tensors. `axes` names the axes whose sizes stay open. `exporters` are those that are tried; those of
    torch are the ones above, and other words belong to `make` alone.
    """

    collection: str
    name: str
    make: Callable[[str], tuple[Any, dict[str, Any]]]
    axes: Axes = field(default_factory=dict)
    exporters: tuple[str, ...] = EXPORTERS

    def id(self, exporter: str) -> str:
        """The name of the files of this row."""
        return f"{self.collection}__{self.name}__{exporter}"


def by_position(module: Any) -> Any:
    """A module that gives its named inputs to the other one by position."""
    import torch

    class ByPosition(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, **given: Any) -> Any:
            return self.module(*given.values())

    return ByPosition()
