"""One layer of a written model: the operators on the ways from one fused attention to the next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from fa_compiler.atc.job import Job

WITHOUT_KERNEL = frozenset(
    (
        *(
            "Bitcast",
            "ExpandDims",
            "Flatten",
            "FlattenV2",
            "Rank",
            "ReFormat",
            "Reshape",
            "Shape",
            "ShapeN",
            "Size",
        ),
        *("Squeeze", "SqueezeV2", "SqueezeV3", "Unsqueeze", "UnsqueezeV2", "UnsqueezeV3"),
    )
)
"""What GE does itself, without a kernel: kGeLocalOpType of its graph_pass_util, and
kReuseInputOpTypes of the builder of its local operators. They move no number."""


@dataclass(frozen=True)
class Step:
    """An operator of a graph, and the operators whose results it reads."""

    name: str
    op_type: str
    sources: Sequence[str]


@dataclass(frozen=True)
class Layer:
    """How many operators a layer has, the attention among them, and how many of these are
    kernels."""

    operators: int
    kernels: int


def layer_of(steps: Iterable[Step], job: Job) -> dict[str, int] | None:
    """One layer of a graph for the report; None where no fused attention follows on another one."""
    found = layer(
        list(steps),
        {block.node for block in job.report.blocks if block.node and block.kind == "forward"},
    )
    return None if found is None else asdict(found)


def layer(steps: Sequence[Step], attentions: Collection[str]) -> Layer | None:
    """The layer that most pairs of neighbouring attentions have between them, of operators in the
    order of computation. None where no attention follows on another one."""
    places = [place for place, step in enumerate(steps) if step.name in attentions]
    pairs = pairwise(places)
    counts = Counter(
        found for first, last in pairs if (found := _between(steps[first : last + 1])) is not None
    )
    return counts.most_common(1)[0][0] if counts else None


def _between(steps: Sequence[Step]) -> Layer | None:
    """What lies on the ways from the first operator to the last one, without the first; None where
    there is no way."""
    reached, needed = {steps[0].name}, {steps[-1].name}
    for step in steps[1:]:
        if not reached.isdisjoint(step.sources):
            reached.add(step.name)
    for step in reversed(steps):
        if step.name in needed:
            needed.update(step.sources)
    found = [step for step in steps[1:] if step.name in reached and step.name in needed]
    return (
        Layer(len(found), sum(step.op_type not in WITHOUT_KERNEL for step in found))
        if found
        else None
    )
