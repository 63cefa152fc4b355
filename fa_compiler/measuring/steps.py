"""Measures a decoder and its fused form as they are used: a prompt, and then steps of one token
behind cached keys.

Both get the same tokens: the original chooses the likeliest one after each step, and the fused
model's choice has to be the same. Inputs that follow from the number of tokens are those that
`DecodingSession` makes; others are random. A decoder that cannot take a prompt, because it has one
token in every run, begins behind random caches. With the assumption `decode` the original alone
takes the prompt, and the fused model goes on with its caches. A prompt whose scores would not fit
into the memory, as shorter ones tell, is given to both in parts, and not timed.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from fa_compiler.comparison.compare import allowance, compare_arrays, most_of_nudges, tolerance_for
from fa_compiler.comparison.decoder import rows_of
from fa_compiler.comparison.feeds import random_inputs
from fa_compiler.comparison.nudged import nudged_model
from fa_compiler.decoding import DecodingSession
from fa_compiler.errors import InputError
from fa_compiler.measuring.figures import Decoded, Measure, Shapes, Timing, timed, turns
from fa_compiler.measuring.limits import foreseen, free_memory, in_words
from fa_compiler.measuring.memory import own_peak, peak_of
from fa_compiler.model_files.reading import read_proto
from fa_compiler.protos.cache_names import fixed_size
from fa_compiler.protos.subgraphs import graph_inputs

PART = 512
"""The tokens of one part of a prompt for which the memory is not enough at once."""

PROBED = (512, 1024)
"""The prompts whose memory tells of longer ones, where no measured ones do."""
UNPROBED = 8192
"""The longest prompt that is given at once where nothing is known of its memory: the longest
default one."""

STEPS = 32
"""The tokens behind the cached ones. Longer measurements begin again behind the cached ones."""
MOST_ROUNDS = 32
GIB = 1 << 30

Arrays = dict[str, np.ndarray]


class Decoder:
    """One decoder, and the inputs of its prompts and steps. A `model` runs in the place of the
    file: the same graph with other weights."""

    def __init__(
        self,
        path: Path,
        threads: int,
        batch: int,
        optimise: bool = True,
        model: onnx.ModelProto | None = None,
    ) -> None:
        self.path, self.batch = path, batch
        self.session = DecodingSession(model or path, threads=threads, optimise=optimise)
        self.proto = read_proto(path)
        self.rows = rows_of(self.proto, self.session.caches_by_input.values())

    @cached_property
    def takes_prompt(self) -> bool:
        """Whether a run may have several tokens. A file that was traced with one token declares an
        open number, too."""
        if self.rows is None or self.rows.axis is None or self._is_fixed():
            return False
        self.session.reset()
        try:
            self.session.step(self.inputs(2, 0))
        except InputError:
            return False
        finally:
            self.session.reset()
        return True

    def _is_fixed(self) -> bool:
        """Does every run have the same number of tokens?"""
        assert self.rows is not None and self.rows.axis is not None
        (info,) = (info for info in graph_inputs(self.proto) if info.name == self.rows.input)
        return fixed_size(info.type.tensor_type.shape.dim[self.rows.axis]) > 0

    @property
    def token_bytes(self) -> int:
        """The bytes that the caches hold of one token, in all entries of the batch."""
        dims = {info.name: info.type.tensor_type for info in graph_inputs(self.proto)}
        return sum(
            math.prod(
                fixed_size(dim) or 1
                for axis, dim in enumerate(dims[name].shape.dim)
                if axis not in (0, cache.axis)
            )
            * onnx.helper.tensor_dtype_to_np_dtype(dims[name].elem_type).itemsize
            * self.batch
            for name, cache in self.session.caches_by_input.items()
            if cache.has_tokens
        )

    def inputs(self, rows: int, past: int) -> Arrays:
        """Random inputs of a run, without those that the session holds or makes."""
        wanted = self.session.inputs
        feeds = random_inputs(
            self.proto,
            str(self.path),
            batch=self.batch,
            length=rows + past,
            rows=rows,
            past=past,
            only=wanted,
        )
        return {name: feeds[name] for name in wanted}

    def begin(self, length: int, prompt: Sequence[Arrays]) -> None:
        """Forget everything and take a prompt, in its parts; without one, random caches of this
        length."""
        self.session.room = length + STEPS
        self.session.reset()
        for part in prompt:
            self.session.step(part)
        if not prompt:
            caches = self.session.caches_by_input
            made = random_inputs(
                self.proto,
                str(self.path),
                batch=self.batch,
                length=length,
                rows=1,
                past=length,
                only=caches,
            )
            self.session.take_caches({name: made[name] for name in caches})

    def prompt(self, length: int, part: int) -> list[Arrays]:
        """The inputs of a prompt in parts of so many tokens; none for a decoder that takes no
        prompt."""
        if not self.takes_prompt:
            return []
        return [self.inputs(min(part, length - held), held) for held in range(0, length, part)]

    def chosen(self, outputs: Mapping[str, np.ndarray]) -> np.ndarray | None:
        """The likeliest token of each batch entry; None if no output has numbers for the last
        token."""
        found = [
            name
            for name, array in outputs.items()
            if array.ndim >= 2 and array.dtype.kind not in "iub"
        ]
        if not found:
            return None
        array = outputs["logits" if "logits" in found else found[0]]
        last: np.ndarray = array[:, -1] if array.ndim > 2 else array
        return np.asarray(last.reshape(len(last), -1).argmax(-1))

    def following(self, feeds: Arrays, tokens: np.ndarray | None) -> Arrays:
        """The inputs of a step with these tokens in the place of the random ones, where the model
        takes tokens."""
        name = None if self.rows is None else self.rows.input
        if (
            name is None
            or tokens is None
            or name not in feeds
            or feeds[name].dtype.kind not in "iu"
        ):
            return feeds
        array = feeds[name]
        if array.size != tokens.size:
            return feeds
        return {**feeds, name: tokens.reshape(array.shape).astype(array.dtype)}


class Steps:
    """The original and the fused decoder, as `Runs` has them. `one_token` says that the fused model
    takes no prompt.

    Raises InputError if ONNX Runtime cannot load them, or if they have no caches.
    """

    spare = STEPS

    def __init__(self, paths: tuple[Path, Path], threads: int, batch: int, one_token: bool) -> None:
        self._paths, self._threads, self._batch, self._one_token = paths, threads, batch, one_token
        self._pair = [Decoder(path, threads, batch) for path in paths]
        self._tolerance = tolerance_for(self._pair[0].proto)

    @property
    def caches(self) -> tuple[str, ...]:
        """The caches of the original, by the names of their inputs."""
        return tuple(self._pair[0].session.caches_by_input)

    def fault(self, length: int) -> Exception | None:
        """Why the original does not take a step behind so many keys and STEPS more; None if it
        does."""
        original, total = self._pair[0], length + STEPS
        if (lacking := self._lacking(length)) is not None:
            return MemoryError(lacking)
        try:
            if original.takes_prompt:
                original.begin(total, original.prompt(total, total))
            else:
                original.begin(total - 1, [])
                original.session.step(original.inputs(1, total - 1))
        except Exception as error:  # an InputError, or one of NumPy
            return error
        return None

    def measure(self, length: int, seconds: float, known: Sequence[Measure]) -> Measure | None:
        """Measure the prompt, and the steps behind it. `known` are the measures so far."""
        original, fused = self._pair
        lacking = self._lacking(length)
        if lacking is not None:
            return Measure(length, fault=lacking)
        part = length if self._fits(length, known) else PART
        try:
            prompt = original.prompt(length, part)
            took = self._take_prompt(length, prompt)
            if not prompt or self._one_token:
                fused.session.room = length + STEPS
                fused.session.take_caches(original.session.caches)
            times, decoded, shapes = self._steps(length, seconds, took)
        except Exception as error:
            return Measure(length, fault=in_words(error))
        memory = [self._memory(side, length, part) for side in (0, 1)]
        first, second = (Timing.of(each, peak) for each, peak in zip(times, memory, strict=True))
        decoded = replace(decoded, parts=len(prompt))
        return Measure(length, shapes, len(times[0]), first, second, decoded=decoded)

    def _fits(self, length: int, known: Sequence[Measure]) -> bool:
        """Is the memory enough for a prompt at once, as far as shorter ones tell?

        They were measured in processes of their own. ONNX Runtime takes memory in pieces, each
        twice as large as the last one, and keeps them, so a process that ran other prompts before
        may hold twice as much.
        """
        whole = [each for each in known if each.decoded is not None and each.decoded.parts == 1]
        free = free_memory()
        took = [(each.length, each.original.memory) for each in whole if each.original is not None]
        if len(took) < len(PROBED) and length > UNPROBED:
            took = [(probed, self._memory(0, probed, probed)) for probed in PROBED]
        return free is None or 2 * foreseen(took, length) < free

    def _lacking(self, length: int) -> str | None:
        """Why the caches of so many tokens have no room in the memory: both models hold a past and
        a present."""
        free, needed = free_memory(), 4 * self._pair[0].token_bytes * (length + STEPS)
        if free is None or needed < free:
            return None
        return f"the caches of both models take {needed / GIB:.1f} GiB, and {free / GIB:.1f} GiB are free"

    def _take_prompt(self, length: int, prompt: Sequence[Arrays]) -> tuple[float, float] | None:
        """Begin, and return the milliseconds of the prompt in both. Only the second time counts."""
        original, fused = self._pair
        if not prompt or self._one_token:
            original.begin(length, prompt)
            return None
        for each in (fused, original):
            each.begin(length, prompt)
        if len(prompt) > 1:
            return None
        first, second = (
            1e3 * timed(partial(each.begin, length, prompt)) for each in (original, fused)
        )
        return first, second

    def _steps(
        self, length: int, seconds: float, prompt: tuple[float, float] | None
    ) -> tuple[list[list[float]], Decoded, Shapes]:
        times: list[list[float]] = [[], []]
        feeds = self._pair[0].inputs(1, length)
        shapes = tuple((name, array.shape) for name, array in feeds.items())
        fed: list[Arrays] = []
        found: list[tuple[dict[str, Any], dict[str, Any]]] = []
        begun = [each.session.caches for each in self._pair]
        end, order = time.perf_counter() + seconds, turns()
        for number in range(MOST_ROUNDS):
            if number:
                for each, caches in zip(self._pair, begun, strict=True):
                    each.session.take_caches(caches)
            tokens = None
            for _ in range(STEPS):
                step = self._pair[0].following(feeds, tokens)
                outputs: dict[int, dict[str, Any]] = {}
                for side in next(order):
                    start = time.perf_counter()
                    outputs[side] = self._pair[side].session.step(step)
                    times[side].append(time.perf_counter() - start)
                tokens = self._pair[0].chosen(outputs[0])
                if not number:
                    fed.append(step)
                    found.append((outputs[0], outputs[1]))
            if time.perf_counter() >= end:
                break
        return times, self._agreement(prompt, begun[0], fed, found), shapes

    def _agreement(
        self,
        prompt: tuple[float, float] | None,
        begun: Arrays,
        fed: list[Arrays],
        found: list[tuple[dict[str, Any], dict[str, Any]]],
    ) -> Decoded:
        """How the outputs of both agree. Where they do not, as much is allowed as `verify` allows
        where ONNX Runtime's own optimisations change the original, or other last bits of its
        weights."""
        choose = self._pair[0].chosen
        tokens = [(choose(first), choose(second)) for first, second in found]
        chosen = [
            np.array_equal(first, second)
            for first, second in tokens
            if first is not None and second is not None
        ]
        largest, tolerance = max(_difference(*both) for both in found), self._tolerance
        expected = [first for first, _ in found]
        if largest > tolerance:
            noise = self._changed(begun, fed, expected, optimise=False)
            tolerance = max(tolerance, allowance(noise, tolerance))
        most = most_of_nudges(self._tolerance)
        if tolerance < largest <= most:
            nudged = self._changed(begun, fed, expected, model=self._nudged())
            tolerance = max(tolerance, min(2 * nudged, most))
        return Decoded(prompt, len(chosen), sum(chosen), largest, tolerance)

    def _changed(
        self,
        begun: Arrays,
        fed: Sequence[Arrays],
        expected: Sequence[Mapping[str, Any]],
        optimise: bool = True,
        model: onnx.ModelProto | None = None,
    ) -> float:
        """How much the outputs of the original change where it is run without optimisations, or
        with other weights."""
        changed = Decoder(self._paths[0], self._threads, self._batch, optimise, model)
        changed.session.take_caches(begun)
        return max(
            _difference(changed.session.step(step), first)
            for step, first in zip(fed, expected, strict=True)
        )

    def _nudged(self) -> onnx.ModelProto:
        path = self._paths[0].resolve()
        return nudged_model(onnx.load(path), path.parent)

    def _memory(self, side: int, length: int, part: int) -> int:
        """The peak memory of a process that takes the prompt and two steps."""
        alone = side == 1 and self._one_token
        return peak_of(
            "steps",
            str(self._paths[side]),
            *map(str, (length, self._threads, self._batch, part * (not alone))),
        )


def _difference(first: Mapping[str, Any], second: Mapping[str, Any]) -> float:
    """The largest difference of two models' outputs, infinite where they do not agree in kind."""
    largest = 0.0
    for name, array in first.items():
        found, fault = compare_arrays(array, second[name], float("inf"))
        largest = max(largest, float("inf") if fault is not None else found or 0.0)
    return largest


def _decode(path: Path, length: int, threads: int, batch: int, part: int) -> None:
    """Take a prompt and two steps, and print the peak memory of this process in bytes. Without a
    part, the caches are random."""
    decoder = Decoder(path, threads, batch)
    decoder.begin(length, decoder.prompt(length, part) if part else [])
    for count in range(2):
        decoder.session.step(decoder.inputs(1, length + count))
    print(own_peak())


if __name__ == "__main__":
    _decode(Path(sys.argv[1]), *map(int, sys.argv[2:]))
