"""`ShardedSession`: one rank of a sharded model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx

from fa_compiler.errors import InputError
from fa_compiler.lowering.ort.eager import KernelError
from fa_compiler.model_files.reading import read_proto
from fa_compiler.op_registry import RegistryError, collectives
from fa_compiler.parallel.communicator import Alone, Array, Communicator, Shape
from fa_compiler.parallel.methods import sequence_attention, sequence_gradient
from fa_compiler.parallel.parts import Parts, gathered, reduced, selected
from fa_compiler.parallel.segments import Collective, Record, Segment, plan_of, record_of
from fa_compiler.running.runtime import Session


class ShardedSession:
    """One rank of a model that `fa_compiler.shard` made.

    Args:
        model: the path of the model.
        communicator: this rank's end of the group: `fa_compiler.parallel.mpi.communicator()` for MPI. None is for a
            model of one rank.
        threads: the number of threads that run an operator; 0 for ONNX Runtime's default.

    Raises:
        InputError: the file is no sharded model, it is made for another number of ranks, or ONNX Runtime cannot load
        it.
    """

    def __init__(
        self, model: str | os.PathLike[str], communicator: Communicator | None = None, threads: int = 0
    ) -> None:
        path = Path(model)
        record = record_of(read_proto(path), str(path))  # its errors name the file; it leaves large weights unread
        proto = onnx.load(path, load_external_data=False)
        if record is None:
            raise InputError(f"{path} is no sharded model; make one with fa-compiler shard")
        self.record: Record = record
        self.communicator = Alone() if communicator is None else communicator
        if record.ranks != self.communicator.size:
            raise InputError(
                f"{path} is made for {record.ranks} ranks, and {self.communicator.size} run it; start it with "
                f"mpirun -n {record.ranks}, or make it again with --sequence-parallel {self.communicator.size}"
            )
        self.name = str(path)
        self._outputs = [output.name for output in proto.graph.output]
        self._plan = plan_of(proto, self.name)
        domains = {opset.domain for opset in proto.opset_import}
        folder = path.absolute().parent
        constants = self._plan.constants.items()
        self._constants = {name: onnx.numpy_helper.to_array(tensor, str(folder)) for name, tensor in constants}
        self._sessions: dict[int, Session] = {}
        for index, step in enumerate(self._plan.steps):
            if isinstance(step, Segment):
                content = step.model.SerializeToString()
                step.model.Clear()  # its weights are in the session now
                self._sessions[index] = Session(content, self.name, domains, folder, threads)

    def parts(self, shapes: Mapping[str, Shape]) -> Parts:
        """How the ranks divide the sequence of inputs of these shapes.

        Raises:
            InputError: the inputs have sequences of several lengths, or one that is too short.
        """
        missing = [name for name in self.record.inputs if name not in shapes]
        if missing:
            raise InputError(f"{self.name} takes the input '{missing[0]}', which is missing")
        lengths = {
            name: shapes[name][axis]
            for name, axis in self.record.inputs.items()
            if axis is not None and len(shapes[name]) > axis
        }
        if len(set(lengths.values())) != 1:
            told = ", ".join(f"'{name}' has {length}" for name, length in lengths.items())
            raise InputError(f"{self.name}: the inputs need sequences of one length ({told or 'there is none'})")
        return Parts(self.record.order, self.record.ranks, next(iter(lengths.values())))

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs of this rank: its part of those that `record.outputs` gives an axis, and all of the others.

        `inputs` are whole arrays by name, on every rank; a rank takes its part of them.

        Raises:
            InputError: the inputs do not fit the model, or ONNX Runtime fails.
            RankError: another rank failed or does not answer.
        """
        parts, rank = self.parts(shapes_of(inputs)), self.communicator.rank
        own = {
            name: array if (axis := self.record.inputs.get(name)) is None else parts.own(array, axis, rank)
            for name, array in inputs.items()
        }
        return self.run_part(own, parts)

    def run_part(self, inputs: Mapping[str, Array], parts: Parts) -> dict[str, Array]:
        """`run`, for a rank that has its own part of the inputs."""
        rank = self.communicator.rank
        values = {**self._constants, **inputs}
        known = (parts.positions(rank), np.array([parts.length]), np.array([parts.count(rank)]))
        values.update(zip(self._plan.part, known, strict=False))
        kept = set(self._outputs)
        for index, step in enumerate(self._plan.steps):
            if isinstance(step, Segment):
                values.update(self._sessions[index].run({name: values[name] for name in step.inputs}))
            else:
                values.update(zip(step.outputs, self._collective(step, parts, values), strict=True))
            for name in step.inputs:
                if self._plan.last_use[name] == index and name not in kept:
                    values.pop(name, None)
        return {name: values[name] for name in self._outputs}

    def gather(self, outputs: Mapping[str, Array], inputs: Mapping[str, Array]) -> dict[str, Array]:
        """The whole outputs of `run(inputs)` on rank 0; an empty dictionary on the other ranks. Raises RankError."""
        return self.gather_parts(outputs, self.parts(shapes_of(inputs)))

    def gather_parts(self, outputs: Mapping[str, Array], parts: Parts) -> dict[str, Array]:
        """`gather`, for the outputs of `run_part`."""
        whole = {}
        for name, array in outputs.items():
            axis = self.record.outputs.get(name)
            if axis is None:
                whole[name] = array
            elif pieces := self.communicator.collect(array, parts.shapes(array, axis)):
                whole[name] = parts.joined(pieces, axis)
        return whole if self.communicator.rank == 0 else {}

    def _collective(self, step: Collective, parts: Parts, values: Mapping[str, Array]) -> list[Array]:
        communicator = self.communicator
        if step.op_type in (collectives.SEQUENCE_ATTENTION, collectives.SEQUENCE_GRADIENT):
            inputs = {name: values[value] for name, value in step.named_inputs.items()}
            try:
                if step.op_type == collectives.SEQUENCE_GRADIENT:
                    return sequence_gradient(communicator, parts, step.attrs, inputs)
                wanted = collectives.FORWARD_OUTPUTS[: len(step.outputs)]
                return sequence_attention(communicator, parts, step.attrs, inputs, wanted)
            except (KernelError, RegistryError) as error:
                raise InputError(f"{self.name}: node '{step.name}': {error}") from None
        own = [values[name] for name in step.inputs]
        if step.op_type == collectives.ALL_REDUCE:
            return [reduced(communicator, own[0], step.attrs["reduction"])]
        if step.op_type == collectives.SELECT_TOKENS:
            return [selected(communicator, parts, own[0], own[1], step.attrs["axis"])]
        return [gathered(communicator, parts, own[0], step.attrs["axis"])]


def shapes_of(arrays: Mapping[str, Array]) -> dict[str, Shape]:
    """The shapes of arrays by name."""
    return {name: array.shape for name, array in arrays.items()}
