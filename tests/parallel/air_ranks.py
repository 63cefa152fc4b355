"""Runs the GE graphs of all ranks together: each is a thread that computes by itself, and messages wait for each other.

A graph is converted to ONNX, whose nodes are in an order that the data and the control edges allow. HcomSend ends only
when its HcomReceive has taken the tensor. A message that waits for longer than WAIT seconds fails, as do collectives of
different ranks that meet and do not fit.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from fa_compiler.lowering.ascend.graph import Model
from fa_compiler.lowering.ort import eager
from fa_compiler.op_registry import DOMAIN, bind_inputs, bind_outputs, get, hcom
from fa_compiler.parallel.communicator import Array, Communicator
from fa_compiler.parallel.threads import run_threads
from tools.ge_to_onnx import from_ge

WAIT = 120.0


class Fused(OpRun):
    """An operator of the registry, by its kernel."""

    op_domain = DOMAIN
    op_schema = None

    def run(self, *args: Any, **kwargs: Any) -> tuple[Array | None, ...]:
        """As OpRun.run, but an output with the name "" is None: the evaluator stores it by its name."""
        results = super().run(*args, **kwargs)  # type: ignore[no-untyped-call]
        return tuple(value if name else None for name, value in zip(self.onnx_node.output, results, strict=True))

    def _run(self, *args: Any, **attrs: Any) -> tuple[Array, ...]:
        spec = get(self.op_type)
        names = list(bind_outputs(spec, self.output))
        wanted = [name for name, value in zip(names, self.output, strict=False) if value]
        made = eager.run(self.op_type, bind_inputs(spec, args, attrs), attrs, wanted)
        return tuple(made.get(name, np.zeros(0)) for name in names[: len(self.output)])


class GatherElements(OpRun):
    """That of onnx does not take data of more than 64 elements along the axis."""

    op_domain = ""

    def _run(self, data: Array, indices: Array, axis: int = 0) -> tuple[Array, ...]:
        places = [
            np.arange(size).reshape([-1 if i == dim else 1 for i in range(indices.ndim)])
            for dim, size in enumerate(indices.shape)
        ]
        places[axis] = indices
        return (data[tuple(places)],)


class World:
    """What the ranks have in common: the tensors that wait, by message."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._condition = threading.Condition()
        self._sent: dict[tuple[int, int, int], Array] = {}
        self._met: dict[int, dict[int, tuple[str, Array]]] = {}

    def meet(self, number: int, rank: int, op_type: str, x: Array) -> list[Array]:
        """The tensors of all ranks for their collective of this number."""
        with self._condition:
            mine = self._met.setdefault(number, {})
            mine[rank] = op_type, x
            self._condition.notify_all()
            self._wait(lambda: len(mine) == self.ranks, f"{op_type} {number} of rank {rank}")
        found = [mine[each] for each in range(self.ranks)]
        assert len({(kind, each.shape, each.dtype) for kind, each in found}) == 1, f"{number}: {found}"
        return [each for _, each in found]

    def send(self, source: int, to: int, tag: int, x: Array) -> None:
        """Send a tensor, and wait until it is received."""
        key = source, to, tag
        with self._condition:
            assert key not in self._sent, f"two messages {key}"
            self._sent[key] = x
            self._condition.notify_all()
            self._wait(lambda: key not in self._sent, f"the sender of {key}")

    def receive(self, source: int, to: int, tag: int) -> Array:
        """The tensor of a message."""
        key = source, to, tag
        with self._condition:
            self._wait(lambda: key in self._sent, f"the receiver of {key}")
            self._condition.notify_all()
            return self._sent.pop(key)

    def _wait(self, ready: Any, who: str) -> None:
        assert self._condition.wait_for(ready, WAIT), f"{who} waits forever"


def _operators(world: World, rank: int) -> list[type[OpRun]]:
    """The operators of HCCL for one rank."""
    count = iter(range(1 << 30))

    def compute(op_type: str, x: Array | None, attrs: Mapping[str, Any]) -> tuple[Array, ...]:
        assert attrs["group"] == hcom.WORLD
        if op_type == hcom.SEND:
            world.send(rank, attrs["dest_rank"], attrs["sr_tag"], x)
            return ()
        if op_type == hcom.RECEIVE:
            received = world.receive(attrs["src_rank"], rank, attrs["sr_tag"])
            assert list(received.shape) == list(attrs["shape"])
            return (received,)
        every = world.meet(next(count), rank, op_type, x)
        if op_type == hcom.ALL_GATHER:
            assert attrs["rank_size"] == world.ranks
            return (np.concatenate(every),)
        if op_type == hcom.ALL_TO_ALL:
            return (np.concatenate([np.split(each, world.ranks)[rank] for each in every]),)
        function = {"sum": np.add, "max": np.maximum, "min": np.minimum}[attrs["reduction"].decode()]
        return (function.reduce(every),)

    class Message(OpRun):
        op_domain = DOMAIN
        op_schema = None

        def run(self, *args: Any, **kwargs: Any) -> tuple[Array, ...]:
            """As OpRun.run, which does not take an operator without outputs."""
            return self._run(*args)

        def _run(self, *args: Any) -> tuple[Array, ...]:
            node = self.onnx_node
            attrs = {attr.name: onnx.helper.get_attribute_value(attr) for attr in node.attribute}
            attrs["group"] = attrs["group"].decode()
            return compute(node.op_type, args[0] if args else None, attrs)

    return [type(op_type, (Message,), {}) for op_type in hcom.OPERATORS]


FUSED = [type(op_type, (Fused,), {}) for op_type in ("FlashAttentionScore", "RingAttentionUpdate")]


def run_ranks(graphs: Sequence[Model], feeds: Sequence[Mapping[str, Array]]) -> list[list[Array]]:
    """The outputs of each rank, in the order of its NetOutput, for its own inputs."""
    world = World(len(graphs))
    models = [from_ge(graph) for graph in graphs]

    def task(communicator: Communicator) -> list[Array]:
        rank = communicator.rank
        evaluator = ReferenceEvaluator(models[rank], new_ops=[GatherElements, *FUSED, *_operators(world, rank)])
        return list(evaluator.run(None, dict(feeds[rank])))

    return run_threads(len(graphs), task)
