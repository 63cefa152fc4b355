"""`ShardedSession`: one rank of a sharded model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from fa_compiler.errors import InputError, suggests_keywords
from fa_compiler.lowering.ort.eager import KernelError, taking_turns
from fa_compiler.model_files.reading import read_proto
from fa_compiler.op_registry import RegistryError, collectives
from fa_compiler.parallel.cached import cache_attention
from fa_compiler.parallel.communicator import Alone, Array, Communicator, Shape
from fa_compiler.parallel.cores import threads_of_rank
from fa_compiler.parallel.methods import sequence_attention, sequence_gradient
from fa_compiler.parallel.parts import (
    Parts,
    divided,
    extremes,
    gathered,
    reduced,
    regrouped,
    selected,
)
from fa_compiler.parallel.segments import Collective, Record, Segment, plan_of, record_of
from fa_compiler.parallel.states import sequence_states, sequence_tails
from fa_compiler.running.runtime import Session

STATES = {collectives.SEQUENCE_STATES: sequence_states, collectives.SEQUENCE_TAILS: sequence_tails}


@dataclass(frozen=True)
class Caches:
    """A rank's part of the caches of a model that decodes.

    `length` is the number of tokens that all ranks hold together. `arrays` are the parts by the
    names of the inputs.
    """

    length: int
    arrays: Mapping[str, Array]


class ShardedSession:
    """One rank of a model that `fa_compiler.shard` made.

    Args:
        model: the path of the model.
        communicator: this rank's end of the group: `fa_compiler.parallel.mpi.communicator()` for
            MPI. None is for a model of one rank.
        threads: the number of threads that run an operator; 0 for the rank's share of the cores
            (cores.py).

    All ranks make their sessions at the same time.

    Raises:
        InputError: the file is no sharded model, it is made for another number of ranks, or ONNX
            Runtime cannot load it.
    """

    @suggests_keywords
    def __init__(
        self,
        model: str | os.PathLike[str],
        communicator: Communicator | None = None,
        threads: int = 0,
    ) -> None:
        self.communicator = Alone() if communicator is None else communicator
        self._threads = threads or threads_of_rank(self.communicator)
        path = Path(model)
        # its errors name the file; it leaves large weights unread
        record = record_of(read_proto(path), str(path))
        proto = onnx.load(path, load_external_data=False)
        if record is None:
            raise InputError(f"{path} is no sharded model; make one with fa-compiler shard")
        self.record: Record = record
        if record.ranks != self.communicator.size:
            ranks = f"{record.ranks} rank{'s' if record.ranks > 1 else ''}"
            raise InputError(
                f"{path} is made for {ranks}, and runs on {self.communicator.size}; start it with "
                f"mpirun -n {record.ranks}, or make it again with `fa-compiler shard --sequence-parallel "
                f"{self.communicator.size}`"
            )
        self.name = str(path)
        self._outputs = [output.name for output in proto.graph.output]
        infos = (*proto.graph.input, *proto.graph.output)
        self._declared = {info.name: info.type.tensor_type for info in infos}
        self._inputs = {info.name for info in proto.graph.input}
        self._plan = plan_of(proto, self.name)
        domains = {opset.domain for opset in proto.opset_import}
        folder = path.absolute().parent
        constants = self._plan.constants.items()
        self._constants = {
            name: onnx.numpy_helper.to_array(tensor, str(folder)) for name, tensor in constants
        }
        self._sessions: dict[int, Session] = {}
        for index, step in enumerate(self._plan.steps):
            if isinstance(step, Segment):
                content = step.model.SerializeToString()
                step.model.Clear()  # its weights are in the session now
                self._sessions[index] = Session(
                    content, self.name, domains, folder, self._threads, takes_turns=True
                )

    def parts(self, shapes: Mapping[str, Shape]) -> Parts:
        """How the ranks divide the sequence of inputs of these shapes.

        Raises:
            InputError: the inputs have sequences of several lengths, or one that is too short or
                not that of the model.
        """
        missing = [name for name in self.record.inputs if name not in shapes]
        if missing:
            raise InputError(f"{self.name} takes the input '{missing[0]}', which is missing")
        axes = {name: axis for name, axis in self.record.inputs.items() if axis is not None}
        for name, axis in axes.items():
            if len(shapes[name]) <= axis:
                told = f"has the shape {list(shapes[name])}, and its sequence is dimension {axis}"
                raise InputError(f"{self.name}: the input '{name}' {told}")
        lengths = {name: shapes[name][axis] for name, axis in axes.items()}
        if len(set(lengths.values())) != 1:
            told = ", ".join(f"'{name}' has {length}" for name, length in lengths.items())
            raise InputError(
                f"{self.name}: the inputs need sequences of one length ({told or 'there is none'})"
            )
        length, fixed = next(iter(lengths.values())), self.record.length
        if fixed is not None and length != fixed:
            raise InputError(
                f"{self.name} fixes the length of the sequence, {fixed} tokens, and the inputs have {length}; export "
                "the model with an open length"
            )
        return divided(self.record.order, self.record.ranks, length)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs of this rank: a part of the outputs that have an axis in `record.outputs`,
        and the others whole.

        `inputs` are whole arrays by name, on every rank; a rank takes its part of them.

        Raises:
            InputError: the inputs do not fit the model, or ONNX Runtime fails.
            RankError: another rank failed or does not answer.
        """
        arrays = self._arrays(inputs)
        parts, rank = self.parts(shapes_of(arrays)), self.communicator.rank
        own = {
            name: array
            if (axis := self.record.inputs.get(name)) is None
            else parts.own(array, axis, rank)
            for name, array in arrays.items()
        }
        return self.run_part(own, parts)

    def _arrays(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """The inputs as arrays. Raises InputError for a name that the model does not have."""
        unknown = [name for name in inputs if name not in self._inputs]
        if unknown:
            known = ", ".join(sorted(self.record.inputs))
            raise InputError(f"{self.name} takes no input '{unknown[0]}' (it takes {known})")
        return {name: np.asarray(array) for name, array in inputs.items()}

    def run_part(self, inputs: Mapping[str, Array], parts: Parts) -> dict[str, Array]:
        """`run`, for a rank that has its own part of the inputs."""
        return self._run(inputs, parts)[0]

    def _run(self, inputs: Mapping[str, Array], parts: Parts) -> tuple[dict[str, Array], Parts]:
        """`run_part`, and how the sequence of the outputs is divided: with caches, it has the new
        tokens, too."""
        rank = self.communicator.rank
        values = {**self._constants, **inputs}
        known = (parts.positions(rank), np.array([parts.length]), np.array([parts.count(rank)]))
        values.update(zip(self._plan.part, known, strict=False))
        kept = set(self._outputs)
        for index, step in enumerate(self._plan.steps):
            if isinstance(step, Segment):
                values.update(
                    self._sessions[index].run({name: values[name] for name in step.inputs})
                )
            elif step.op_type == collectives.SEQUENCE_PART:
                before, parts = (
                    parts,
                    divided(parts.order, parts.ranks, int(values[step.inputs[0]][0])),
                )
                own = parts.positions(rank)
                appended = own[own >= before.length] - before.length
                told = (own, np.array([parts.length]), np.array([len(own)]), appended)
                values.update(zip(step.outputs, told, strict=True))
            else:
                values.update(zip(step.outputs, self._collective(step, parts, values), strict=True))
            for name in step.inputs:
                if self._plan.last_use[name] == index and name not in kept:
                    values.pop(name, None)
        return {name: values[name] for name in self._outputs}, parts

    def empty_caches(self, batch: int = 1) -> Caches:
        """The caches before the first token. A size that the model leaves open is that of the
        batch.

        Raises:
            InputError: the model leaves several sizes of a cache open.
        """
        arrays = {}
        for name, present in self.record.caches.items():
            axis, kind = self.record.inputs[name], self._declared[name].elem_type
            pairs = zip(
                *(self._declared[cache].shape.dim for cache in (name, present)), strict=True
            )
            sizes = [
                0 if dim == axis else size.dim_value or grown.dim_value
                for dim, (size, grown) in enumerate(pairs)
            ]
            if sizes.count(0) > 2:
                raise InputError(
                    f"{self.name} leaves the sizes of the cache '{name}' open; begin with caches as inputs"
                )
            arrays[name] = np.zeros(
                [size if size or dim == axis else batch for dim, size in enumerate(sizes)],
                onnx.helper.tensor_dtype_to_np_dtype(kind),
            )
        return Caches(0, arrays)

    def take_caches(self, outputs: Mapping[str, Array], positions: Array) -> Caches:
        """The caches of a part of a sequence that this rank has, such as those of a prompt.

        Args:
            outputs: the part of each cache, by the name of the output of this model that has it.
            positions: the positions of its tokens in the sequence. All ranks together have each
                position once.

        The ranks exchange the tokens that others hold in the order of caches; no rank has all of
        them.

        Raises:
            InputError: an output is missing, or the positions are not those of a sequence.
            RankError: another rank failed or does not answer.
        """
        missing = [present for present in self.record.caches.values() if present not in outputs]
        if missing:
            raise InputError(
                f"{self.name} continues with the output '{missing[0]}', which is missing"
            )
        axes = [self.record.outputs[present] or 0 for present in self.record.caches.values()]
        own = [outputs[present] for present in self.record.caches.values()]
        moved, length = regrouped(self.communicator, list(zip(own, axes, strict=True)), positions)
        return Caches(length, dict(zip(self.record.caches, moved, strict=True)))

    def step(self, inputs: Mapping[str, Array], caches: Caches) -> tuple[dict[str, Array], Caches]:
        """The outputs for new tokens, whole on every rank, and the caches with these tokens.

        `inputs` are all inputs but the caches. Raises as `run`.
        """
        parts = self.parts_of_caches(caches)
        own = {**self._arrays(inputs), **caches.arrays}
        missing = [name for name in self.record.inputs if name not in own]
        if missing:
            raise InputError(f"{self.name} takes the input '{missing[0]}', which is missing")
        outputs, after = self._run(own, parts)
        grown = {name: outputs[present] for name, present in self.record.caches.items()}
        kept = set(self.record.caches.values())
        return {name: array for name, array in outputs.items() if name not in kept}, Caches(
            after.length, grown
        )

    def parts_of_caches(self, caches: Caches) -> Parts:
        """How the tokens of caches are divided."""
        return divided(self.record.order, self.record.ranks, caches.length)

    def parts_of_outputs(self, outputs: Mapping[str, Array], parts: Parts) -> Parts:
        """How the sequence of the outputs is divided, by that of the inputs. Raises RankError."""
        if not self.record.caches:
            return parts
        name = next(iter(self.record.caches.values()))
        count = np.array([outputs[name].shape[self.record.outputs[name] or 0]], np.int64)
        counts = self.communicator.gather_all(count, [(1,)] * self.communicator.size)
        return divided(parts.order, parts.ranks, sum(int(count[0]) for count in counts))

    def gather(self, outputs: Mapping[str, Array], inputs: Mapping[str, Array]) -> dict[str, Array]:
        """The whole outputs of `run(inputs)` on rank 0; an empty dictionary on the other ranks.
        Raises RankError."""
        return self.gather_parts(outputs, self.parts(shapes_of(self._arrays(inputs))))

    def gather_parts(self, outputs: Mapping[str, Array], parts: Parts) -> dict[str, Array]:
        """`gather`, for the outputs of `run_part`."""
        parts = self.parts_of_outputs(outputs, parts)
        whole = {}
        for name, array in outputs.items():
            axis = self.record.outputs.get(name)
            if axis is None:
                whole[name] = array
            elif pieces := self.communicator.collect(array, parts.shapes(array, axis)):
                whole[name] = parts.joined(pieces, axis)
        return whole if self.communicator.rank == 0 else {}

    def _collective(
        self, step: Collective, parts: Parts, values: Mapping[str, Array]
    ) -> list[Array]:
        communicator = self.communicator
        if step.op_type in collectives.SPECS:
            inputs = {name: values[value] for name, value in step.named_inputs.items()}
            try:
                with taking_turns(self._threads):
                    return self._attention(step, parts, inputs)
            except (KernelError, RegistryError) as error:
                raise InputError(f"{self.name}: node '{step.name}': {error}") from None
        own = [values[name] for name in step.inputs]
        if step.op_type == collectives.ALL_REDUCE:
            return [reduced(communicator, own[0])]
        if step.op_type == collectives.TOKEN_EXTREMES:
            axis, inner, reduction = (step.attrs[name] for name in ("axis", "inner", "reduction"))
            return [extremes(communicator, parts, own[0], axis, bool(inner), reduction)]
        if step.op_type == collectives.SELECT_TOKENS:
            return [selected(communicator, parts, own[0], own[1], step.attrs["axis"])]
        return [gathered(communicator, parts, own[0], step.attrs["axis"])]

    def _attention(
        self, step: Collective, parts: Parts, inputs: Mapping[str, Array]
    ) -> list[Array]:
        if step.op_type == collectives.CACHE_ATTENTION:
            return [cache_attention(self.communicator, parts, step.attrs, inputs)]
        if step.op_type == collectives.SEQUENCE_GRADIENT:
            return sequence_gradient(self.communicator, parts, step.attrs, inputs)
        if (by_states := STATES.get(step.op_type)) is not None:
            made = collectives.STATE_OUTPUTS[: len(step.outputs)]
            return by_states(self.communicator, parts, step.attrs, inputs, made)
        wanted = collectives.FORWARD_OUTPUTS[: len(step.outputs)]
        return sequence_attention(self.communicator, parts, step.attrs, inputs, wanted)


def shapes_of(arrays: Mapping[str, Array]) -> dict[str, Shape]:
    """The shapes of arrays by name."""
    return {name: array.shape for name, array in arrays.items()}
