"""Whether a model can run with the sizes it was given."""

from __future__ import annotations

from fa_compiler.atc.job import Job
from fa_compiler.checks import checker
from fa_compiler.errors import InputError
from fa_compiler.lowering.ascend.air import AirError
from fa_compiler.lowering.ascend.convert import UnmappedError, to_ge
from fa_compiler.lowering.ascend.infer.graph import walk


def unfit(job: Job, node: str, sentence: str) -> InputError:
    """The error for a node that does not take what the sizes make of its inputs."""
    told = f"{node}: {sentence}; give sizes that it takes with --input-shape"
    return InputError(f"{job.loaded.name} cannot run with these sizes: {told}")


def check_sizes(job: Job) -> None:
    """For routes that write no GE graph: what GE's inference says of the model as one, if it can be one, and what
    ONNX's says. Raises InputError for sizes that cannot be; the model is not changed."""
    try:
        misfits = walk(to_ge(job.model(), input_shapes=dict(job.request.sizes))).misfits
    except (UnmappedError, AirError, ValueError):
        misfits = []
    if misfits:
        raise unfit(job, *misfits[0])
    problem = checker.fault(job.loaded.proto, full=True, declared=False)
    if problem is not None:
        raise InputError(f"{job.loaded.name} is not valid with these sizes: {problem}")
