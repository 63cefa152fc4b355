"""The options of `shard`, for a model on several ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from fa_compiler.op_registry.collectives import MERGE, METHODS
from fa_compiler.passes.answer.option import told
from fa_compiler.passes.parallel.methods import Machine

AUTO = "auto"
"""The method that leaves the choice to the cost model."""


def _axes_of(words: Iterable[str]) -> dict[str, int]:
    """The dimension of each input from words such as "input_ids:1". Raises ValueError."""
    axes: dict[str, int] = {}
    for word in words:
        name, colon, number = word.rpartition(":")
        try:
            axes[name] = int(number)
        except ValueError:
            colon = ""
        if not colon or not name:
            raise ValueError(f"--sequence-axis {word!r} is not of the form input_ids:1")
    return axes


AXES = told(
    "the dimension of an input that is the sequence, counted from 0; may be repeated (default: the one that the "
    "attention runs over)",
    in_python='the dimension of inputs that is the sequence, such as {"input_ids": 1}; None finds it from the '
    "attentions",
    metavar="INPUT:DIM",
    flag="--sequence-axis",
    default=None,
    repeated=True,
    parse=_axes_of,
    read=lambda axes: dict(axes or {}),
)
"""What is told of the axes of inputs."""


@dataclass(frozen=True)
class ParallelOptions:
    """What the user asks for. The texts at the fields tell users what an option does.

    `axes` names the dimension of inputs that is the sequence; without it, it is found from the
    attentions. `length` and `batch` are the sizes that the cost model takes, `machine` its figures.
    `prompt` says that the caches of the model are empty: it is divided along its tokens. `sizes`
    are the sizes of all inputs, if each rank gets a graph of its own for them (rank_graph.py). Such
    a graph cannot choose another method while it runs. `no_ring` is the reason why no attention may
    be computed in a ring, if there is one.
    """

    ranks: int = field(
        metadata=told("the number of ranks", name="sequence_parallel", metavar="N", kind=int)
    )
    method: str = field(
        default=AUTO,
        metadata=told(
            "how the ranks compute attention (default: merge where the keys are those of caches, and elsewhere the "
            "cheapest for each attention)",
            choices=(AUTO, *METHODS, MERGE),
            details='For attention over caches there is only "merge"; elsewhere "auto" takes the cheapest method.',
        ),
    )
    axes: Mapping[str, int] = field(default_factory=dict, metadata=AXES)
    prompt: bool = field(
        default=False,
        metadata=told(
            "write a model for a prompt: its caches are empty, they are no inputs, and it is divided along its tokens; "
            "the model that is made without --prompt then takes its keys as caches",
            in_python="the model has caches, which are empty: divide it along its tokens, and leave their keys in "
            "parts, with which the model that is made without `prompt` goes on",
        ),
    )
    length: int = field(
        default=8192,
        metadata=told(
            "the tokens, or cached keys, for which auto chooses (default 8192)", metavar="N"
        ),
    )
    batch: int = field(
        default=1, metadata=told("the batch for which auto chooses (default 1)", metavar="N")
    )
    machine: Machine = field(
        default_factory=Machine,
        metadata=told(
            in_python="the speed of the ranks and their network, for which auto chooses; None for processes of one "
            "machine",
            on_command_line=False,
            default=None,
            read=lambda machine: machine or Machine(),
        ),
    )
    sizes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    no_ring: str = ""


class ShardKeywords(TypedDict, total=False):
    """The options of `ParallelOptions` besides the ranks as keywords of a function, with the types
    that users give."""

    method: str
    axes: Mapping[str, int] | None
    prompt: bool
    length: int
    batch: int
    machine: Machine | None
