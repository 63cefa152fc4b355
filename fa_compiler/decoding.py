"""`DecodingSession`: a decoder in one process, whose session holds the caches."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort

from fa_compiler import op_registry
from fa_compiler.comparison.decoder import (
    Cache,
    caches_of,
    check_one_token,
    counts_the_mask,
    of_fixed_length,
    rows_of,
    sizes_of_rows,
)
from fa_compiler.comparison.feeds import index_bounds, misfit, random_inputs, typed
from fa_compiler.comparison.verification import as_file
from fa_compiler.errors import InputError, one_line, suggests_keywords
from fa_compiler.lowering.ort import LibraryUnusable, register_custom_ops
from fa_compiler.lowering.ort.eager import ORT_ERRORS, from_ort, to_ort
from fa_compiler.lowering.ort.own_session import OwnSession
from fa_compiler.model_files.reading import RUN_SHARDED, ModelLike, read_proto, refuse_sharded
from fa_compiler.model_files.temporary import TemporaryFolder
from fa_compiler.op_registry.errors import suggestion
from fa_compiler.passes.answer.report import first_of
from fa_compiler.protos.cache_names import fixed_size
from fa_compiler.protos.metadata import takes_one_token
from fa_compiler.protos.step_inputs import BY_SEQUENCE, MASK, POSITIONS, SWITCH, handed_on, is_made
from fa_compiler.protos.subgraphs import graph_inputs

Array = npt.NDArray[Any]

LEAST_ROOM = 256
"""The tokens for which a buffer has room at first, if the caller names no number."""

MOST_THREADS = 1024
"""ONNX Runtime makes all threads that it is told, with tables that grow with the square of their
number: for 100,000 of them it takes all memory, and comes to no end."""

COUNTS = frozenset({SWITCH, "past_sequence_length", "total_sequence_length"})
"""Those that tell the number of tokens itself, as the inputs `Cache.length` do."""

CONTINUED = (MASK, "position_ids")
"""Inputs that differ between the sequences of a padded batch, and go on from one step to the
next."""

SEVERAL_OF_A_BATCH = "batch_size must be 1 when sequence_length > 1"
"""What the kernel of GroupQueryAttention says of several tokens behind cached ones for more than
one sequence."""
OUT_OF_RANGE = re.compile(r"out of (data )?(bounds|range)|cos_cache|invalid ind", re.IGNORECASE)
"""What ONNX Runtime says of an index that is too large."""

_LEFT_OUT = ", and the session makes it if it is left out"
_TRIMMED = "; caches that hold only the last tokens of a window are given with take_caches(.., length=all tokens)"


_ONE_BY_ONE = ": give those of a prompt one after the other, or take the caches of a model for prompts (take_caches)"


class DecodingSession:
    """A decoder in ONNX Runtime, which keeps its caches from one step to the next.

    The model is any decoder with caches, fused or not: with caches in place (`optimize` with
    `in_place_caches`), with a past and present that may share one buffer (GroupQueryAttention), or
    with caches that grow. Buffers are bound as past and as present, so that a step writes the new
    rows only and copies nothing. Caches that grow stay in ONNX Runtime's memory; the model itself
    copies them in every step.

    A session holds one conversation, or one batch of them, and runs in one thread at a time.
    `another` gives more sessions over the same weights, which may run in threads of their own.

    Args:
        model: a path, bytes, an `onnx.ModelProto`, an `onnx_ir.Model` or an `ONNXProgram` of
            torch.onnx.export.
        room: the most tokens that the caches may hold. A step that needs more is refused. Buffers
            have room for so many from the first step on. None sets no limit: full buffers become
            twice as large, which copies them.
        threads: the number of threads that run an operator; 0 for ONNX Runtime's default.
        optimise: whether ONNX Runtime optimises the graph.

    Raises:
        InputError: the model has no caches, ONNX Runtime cannot load it, the library that it needs
            was not built, or room or threads is no such number.
    """

    @suggests_keywords
    def __init__(
        self, model: ModelLike, *, room: int | None = None, threads: int = 0, optimise: bool = True
    ) -> None:
        if room is not None:
            _check_number("room", room, 1)
        _check_number("threads", threads, 0)
        if threads > MOST_THREADS:
            raise InputError(f"threads is a number up to {MOST_THREADS}, not {threads}")
        with TemporaryFolder() as folder:
            path = as_file(model, folder, "model.onnx")
            proto = read_proto(path)
            is_file = isinstance(model, str | os.PathLike)
            self.name = str(path) if is_file else "the model"
            refuse_sharded(proto, self.name, RUN_SHARDED)
            self.caches_by_input: dict[str, Cache] = {
                cache.past: cache for cache in caches_of(proto)
            }
            if not self.caches_by_input:
                raise InputError(
                    f"{self.name} has no caches: it has no output, such as present, that is an input of the next step, "
                    "such as past_key_values; export the decoder with its past (in optimum the task "
                    "text-generation-with-past, for T5 and BART text2text-generation-with-past, for Whisper "
                    "automatic-speech-recognition-with-past; transformers writes a file for the prompt and one for the "
                    "steps, which has the caches)"
                )
            _check_open(self.name, proto, self.caches_by_input.values())
            self._session = _session(path, self.name, proto, threads, optimise)
        self._inputs = {info.name: info for info in graph_inputs(proto)}
        self._rows = rows_of(proto, self.caches_by_input.values())
        self._lengths = {
            cache.length for cache in self.caches_by_input.values() if cache.length is not None
        }
        self._has_encoder = any("encoder" in name or "cross" in name for name in self._inputs)
        self._presents = {cache.present: cache for cache in self.caches_by_input.values()}
        self._handed_on = handed_on(proto)
        self._counts_mask = counts_the_mask(proto, MASK)
        self._outputs = [output.name for output in self._session.get_outputs()]
        self._declared = {info.name: info for info in proto.graph.output}
        self._bounds = index_bounds(proto.graph)
        self._proto = proto
        self._running = threading.Lock()
        self.room = room
        self._forget()

    @property
    def length(self) -> int:
        """The number of tokens in the caches."""
        return self._length

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs that a step has to be given."""
        return tuple(
            name
            for name in self._inputs
            if name not in self.caches_by_input and not self.makes(name)
        )

    def makes(self, name: str) -> bool:
        """Whether the session makes this input itself, if a step is not given it."""
        if name in self._lengths or name in self._handed_on:
            return True
        return is_made(self._inputs[name], self._has_encoder)

    def another(self) -> DecodingSession:
        """Another session over the same loaded model, with empty caches of its own and the same
        room.

        Both may run at the same time, in threads of their own.
        """
        made = object.__new__(type(self))
        vars(made).update(vars(self))
        made._running = threading.Lock()
        made._forget()
        return made

    def __reduce__(self) -> NoReturn:
        """A copy would write into the same buffers."""
        raise TypeError(
            "a DecodingSession is not copied or pickled, as its caches are buffers: `another()` makes a session over "
            "the same model, whose take_caches(session.caches) goes on with the same tokens"
        )

    def __repr__(self) -> str:
        """The name of the model, what the caches hold, and for how much they have room."""
        tokens = f"{self._length} token{'' if self._length == 1 else 's'}"
        batch = "" if self._batch is None else f", batch {self._batch}"
        return f"<DecodingSession {self.name}: {tokens}{batch}, room {self.room or 'as needed'}>"

    def reset(self) -> None:
        """Forget all tokens. The next step begins anew, and may have another batch.

        Raises:
            InputError: another thread runs a step of this session.
        """
        with self._alone():
            self._forget()

    def _forget(self) -> None:
        self._length = 0
        self._batch: int | None = None
        self._values: dict[str, ort.OrtValue] = {}
        self._memory: dict[str, Array] = {}
        self._last: dict[str, Array] = {}
        self._filled: dict[str, int] = {}
        self._least, self._is_proven = 0, True

    def step(self, inputs: Mapping[str, npt.ArrayLike]) -> dict[str, Array]:
        """Run the model on new tokens, one or several, and append them to the caches.

        Args:
            inputs: all inputs but the caches. Those that follow from the number of tokens may be
                left out: the mask, positions, and lengths. The mask goes on with ones from that of
                the step before, and positions count on from the last ones, so that a padded batch
                has to be told of once.

        Returns:
            The outputs by name, without the caches. bfloat16 is `ml_dtypes.bfloat16`.

        Raises:
            InputError: the inputs do not fit the model or the caches, the buffers are full, another
                thread runs a step of this session, or ONNX Runtime fails. The caches then hold the
                tokens that they held before.
        """
        with self._alone():
            return self._step(inputs)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep steps away from what reads or changes the caches. Raises InputError while one
        runs."""
        if not self._running.acquire(blocking=False):
            raise InputError(
                "another thread runs a step of this session, which holds one conversation: `another()` gives each "
                "thread a session of its own"
            )
        try:
            yield
        finally:
            self._running.release()

    def _step(self, inputs: Mapping[str, npt.ArrayLike]) -> dict[str, Array]:
        feeds = self._given(inputs)
        batch, new = self._sizes(feeds)
        for name in filter(self.makes, self._inputs):
            made = self._made(name, batch, new)
            self._check_follows(name, feeds.setdefault(name, made), made, new)
        self._check_padding(feeds)
        self._check_indices(feeds, new)
        self._make_room(batch, self._length + new)
        # a binding does not keep their memory
        values = {name: to_ort(array) for name, array in feeds.items()}
        binding = self._binding(values)
        try:
            self._session.run_with_iobinding(binding)
        except ORT_ERRORS as error:
            if not self._length:
                self._forget()  # the caches of another batch may be right
            raise InputError(self._told_of(error, feeds, batch, new)) from None
        found = dict(zip(self._outputs, binding.get_outputs(), strict=True))
        if not self._is_proven:
            self._check_filled(values, found)
        for present, cache in self._presents.items():
            if cache.past not in self._memory and not (cache.kind == "kept" and self._length):
                self._values[cache.past] = found[present]
        self._length, self._batch = self._length + new, batch
        self._last = {
            name: feeds[name]
            for name in CONTINUED
            if name in feeds and len(feeds[name].shape) == BY_SEQUENCE
        }
        return {name: from_ort(found[name]) for name in self._told}

    @property
    def _told(self) -> list[str]:
        """The outputs that a step returns."""
        kept = {*self._presents, *self._handed_on.values()}
        return [name for name in self._outputs if name not in kept]

    def _check_filled(
        self, feeds: Mapping[str, ort.OrtValue], found: Mapping[str, ort.OrtValue]
    ) -> None:
        """Raise InputError if a step's outputs depend on the rows that `take_caches` put in front
        of a window."""
        zeros = dict(self._values)
        for name, count in self._filled.items():
            array = np.array(from_ort(zeros[name]))
            _rows(array, self.caches_by_input[name], count)[...] = 1
            self._values[name] = to_ort(array)
        try:
            binding = self._session.io_binding()
            for name, value in (*feeds.items(), *self._values.items()):
                binding.bind_ortvalue_input(name, value)
            for name in self._outputs:
                binding.bind_output(name)
            self._session.run_with_iobinding(binding)
            again = dict(zip(self._outputs, binding.get_outputs(), strict=True))
        finally:
            self._values = zeros
        if any(
            from_ort(found[name]).tobytes() != from_ort(again[name]).tobytes()
            for name in self._told
        ):
            raise InputError(
                f"{self.name} reads tokens that a cache does not hold, so that no window excludes them; give caches of "
                f"all {self._length} tokens (fewer are in {first_of(list(self._filled))})"
            )
        self._is_proven = True

    def _binding(self, feeds: Mapping[str, ort.OrtValue]) -> ort.IOBinding:
        """A binding of the inputs and the caches, in which a buffer is past and present."""
        binding = self._session.io_binding()
        for name, value in (*feeds.items(), *self._values.items()):
            binding.bind_ortvalue_input(name, value)
        for name in self._outputs:
            cache = self._presents.get(name)
            if cache is not None and cache.past in self._memory:
                binding.bind_ortvalue_output(name, self._values[cache.past])
            else:
                binding.bind_output(name)
        return binding

    @property
    def caches(self) -> dict[str, Array]:
        """Copies of the caches by the names of the inputs: the rows of the tokens that they hold.

        Raises:
            InputError: another thread runs a step of this session.
        """
        with self._alone():
            return {
                name: np.array(
                    _rows(
                        from_ort(value),
                        self.caches_by_input[name],
                        self._length,
                        self._filled.get(name, 0),
                    )
                )
                for name, value in self._values.items()
            }

    @suggests_keywords
    def take_caches(
        self, caches: Mapping[str, npt.ArrayLike], *, length: int | None = None
    ) -> None:
        """Go on with the caches of another session (its `caches`) or model, by the names of this
        model's inputs.

        The outputs of a prompt's model may be given as they are, where they have the names of this
        model's outputs, as in `decoder_model.onnx` of optimum, or those that transformers gives
        them: its `cache.layers.0.keys` is this model's `input.cache.layers.0.keys`.

        Args:
            caches: an array for each cache.
            length: the number of tokens so far, where caches hold fewer rows: those of a layer with
                a window may hold the last ones only, as torch keeps them. Zeros take the place of
                the others. The next step runs twice, with other numbers in these places, to see
                that the window excludes them.

        Raises:
            InputError: a cache is missing or does not fit, the caches hold different numbers of
                tokens and no `length` is given, they hold more tokens, or another thread runs a
                step of this session. The next step raises it if it reads what a cache does not
                hold.
        """
        arrays = self._given_caches(caches)
        lengths = {
            name: array.shape[self.caches_by_input[name].axis]
            for name, array in arrays.items()
            if self.caches_by_input[name].has_tokens
        }
        count = _all_tokens(lengths, length)
        batches = {
            name: array.shape[0] for name, array in arrays.items() if self._is_batch_first(name)
        }
        _check_equal(batches, "are of different numbers of sequences", "is of")
        taken = self.another()
        taken._length, taken._batch = count, next(iter(batches.values()), None)
        taken._filled = {name: count - rows for name, rows in lengths.items() if rows < count}
        taken._least, taken._is_proven = (count, False) if taken._filled else (0, True)
        room = taken._capacity(count)
        for name, held in arrays.items():
            array = _with_rows_in_front(
                held, self.caches_by_input[name].axis, taken._filled.get(name, 0)
            )
            if self.caches_by_input[name].is_one_buffer:
                taken._hold(name, array, room)
            else:
                taken._values[name] = to_ort(np.array(array))
        with self._alone():
            vars(self).update(vars(taken) | {"_running": self._running})

    def _given_caches(self, caches: Mapping[str, npt.ArrayLike]) -> dict[str, Array]:
        """The caches of a caller in the types of the model. Raises InputError."""
        if not isinstance(caches, Mapping):
            raise InputError(
                "the caches are arrays by the names of inputs, such as the `caches` of another session"
            )
        arrays: dict[str, Array] = {}
        given = {
            self._past_of(name): array
            for name, array in caches.items()
            if name not in self.caches_by_input
        }
        given |= {name: array for name, array in caches.items() if name in self.caches_by_input}
        for name, cache in self.caches_by_input.items():
            if name not in given:
                raise InputError(
                    f"the caches lack '{name}' ({self.name} has {', '.join(self.caches_by_input)})"
                )
            arrays[name] = self._array("the caches", name, given[name])
            self._check_shape("the cache", name, arrays[name], cache.axis)
        return arrays

    def _past_of(self, output: str) -> str:
        """The input that goes on with an output of another model."""
        return self._presents[output].past if output in self._presents else f"input.{output}"

    def _check_shape(self, what: str, name: str, array: Array, free: int | None = None) -> None:
        """Raise InputError for an array with another number of dimensions, or another fixed size,
        than the input.

        The size along the axis `free` may be another one.
        """
        dims = self._inputs[name].type.tensor_type.shape.dim
        sizes = [fixed_size(dim) for dim in dims]
        fits = len(sizes) == array.ndim and all(
            place == free or not size or size == array.shape[place]
            for place, size in enumerate(sizes)
        )
        if dims and not fits:  # ONNX Runtime takes any shape where none is declared
            wanted = ", ".join(
                str(size or dim.dim_param or "?") for size, dim in zip(sizes, dims, strict=True)
            )
            hint = self._one_by_one(name, sizes, array)
            raise InputError(
                f"{what} '{name}' has the shape {list(array.shape)}, and {self.name} takes [{wanted}]{hint}"
            )

    def _one_by_one(self, name: str, sizes: Sequence[int | None], array: Array) -> str:
        """What to do with the tokens of a prompt, if these are several for a model that takes one
        in each run."""
        rows = self._rows
        if rows is None or rows.input != name or rows.axis is None or array.ndim != len(sizes):
            return ""
        if sizes[rows.axis] != 1 or array.shape[rows.axis] < 2:
            return ""
        return f"; it takes one token a step{_ONE_BY_ONE}"

    def rewind(self, length: int) -> None:
        """Forget the tokens behind the first `length` ones.

        Raises:
            InputError: the caches hold fewer tokens, this is no number of tokens, or another thread
                runs a step of this session.
        """
        with self._alone():
            self._rewind(length)

    def _rewind(self, length: int) -> None:
        if not isinstance(length, int | np.integer) or isinstance(length, bool):
            raise InputError(f"a number of tokens is an integer, not {length!r}")
        if not 0 <= length <= self._length:
            raise InputError(
                f"the caches hold {self._length} tokens; {length} of them cannot be kept"
            )
        if not length:
            self._forget()
            return
        if length < self._least:
            raise InputError(
                f"'{next(iter(self._filled))}' was given with the last tokens of its window, so that of the first "
                f"{self._least} none can be forgotten; reset() begins anew"
            )
        states = [name for name, cache in self.caches_by_input.items() if cache.kind == "state"]
        if states and length < self._length:
            raise InputError(
                f"'{states[0]}' is a state of all tokens, of which none can be forgotten; reset() begins anew"
            )
        for name, value in self._values.items():
            cache = self.caches_by_input[name]
            if name not in self._memory and cache.has_tokens:
                self._values[name] = to_ort(np.array(_rows(from_ort(value), cache, length)))
        if (mask := self._last.get(MASK)) is not None:
            self._last[MASK] = mask[:, :length]
        if (places := self._last.get("position_ids")) is not None:
            self._last["position_ids"] = places - (self._length - length)
        self._length = length

    def _given(self, inputs: Mapping[str, npt.ArrayLike]) -> dict[str, Array]:
        """The inputs of a caller in the types of the model. Raises InputError."""
        if not isinstance(inputs, Mapping):
            names = ", ".join(self.inputs)
            raise InputError(
                f"a step takes a dictionary of arrays by the names of inputs ({names}); this is {_type(inputs)}"
            )
        for name in inputs:
            if name in self.caches_by_input:
                raise InputError(
                    f"'{name}' is a cache, which the session holds; take_caches gives it another one"
                )
            if name not in self._inputs:
                known = self._inputs.keys() - self.caches_by_input
                raise InputError(
                    f"{self.name} takes no input '{name}'{suggestion(str(name), known)}"
                )
        missing = [f"'{name}'" for name in self.inputs if name not in inputs]
        if missing:
            told = (
                "the input {}, which is missing"
                if len(missing) == 1
                else "the inputs {}, which are missing"
            )
            raise InputError(f"{self.name} takes {told.format(', '.join(missing))}")
        feeds = {name: self._array("the step", name, array) for name, array in inputs.items()}
        for name, array in feeds.items():
            self._check_shape("the input", name, array)
        return feeds

    def _array(self, where: str, name: str, given: npt.ArrayLike) -> Array:
        """An array of a caller in the type of an input. Raises InputError."""
        try:
            array = np.asarray(given)
        except (ValueError, TypeError):  # of lists that are no array, and of what refuses to be one
            array = np.asarray(None)
        if array.dtype.kind in "OUS":
            hint = (
                "; it has to hold numbers, in rows of one length"
                if isinstance(given, (list, tuple))
                else ""
            )
            raise InputError(
                f"{where}: '{name}' is {_type(given)}, of which no array of numbers can be made{hint}"
            )
        # an empty list has no type of its own
        if not array.size and isinstance(given, (list, tuple)):
            array = array.astype(_numpy_type(self._inputs[name]))
        return typed(where, name, array, self._inputs[name])

    def _sizes(self, feeds: Mapping[str, Array]) -> tuple[int, int]:
        """The batch, and the number of new tokens. Raises InputError where there are none, or for
        another batch than that of the caches."""
        rows = self._rows
        array = None if rows is None else feeds.get(rows.input)
        batch, new = 1, 1
        if rows is not None and array is not None:
            batch = array.shape[0] if array.ndim > 1 else 1
            new = rows.count(array)
        if not batch or not new:
            raise InputError(
                f"the step has no tokens ('{'' if rows is None else rows.input}' is empty)"
            )
        if takes_one_token(self._proto):
            check_one_token(self.name, "the step", new, _ONE_BY_ONE)
        if self._batch not in (None, batch):
            raise InputError(
                f"the caches have a batch of {self._batch}, and the step has one of {batch}; reset() begins anew"
            )
        return batch, new

    def _check_follows(self, name: str, array: Array, made: Array, new: int) -> None:
        """Raise InputError for an input of a caller that contradicts the number of tokens, which is
        in `made`."""
        if name in self._lengths or name in COUNTS:
            if array.size == 1 and array.item() != made.item():
                raise InputError(
                    f"'{name}' is {array.item()}; with {self._tokens(new)} it is {made.item()}{_LEFT_OUT}"
                )
            return
        dims = self._inputs[name].type.tensor_type.shape.dim
        fits = array.ndim != made.ndim or all(
            fixed_size(dim) or size == wanted or (size == 1 and not axis and made.ndim > 1)
            for axis, (dim, size, wanted) in enumerate(
                zip(dims, array.shape, made.shape, strict=True)
            )
        )
        if not fits:
            wanted = f"with {self._tokens(new)} it has {list(made.shape)}"
            # nobody has told of a mask or of positions yet
            follows_caches = self._length and not self._last
            hint = _TRIMMED if follows_caches and array.size > made.size else ""
            raise InputError(
                f"'{name}' has the shape {list(array.shape)}; {wanted}{_LEFT_OUT}{hint}"
            )

    def _check_padding(self, feeds: Mapping[str, Array]) -> None:
        """Raise InputError for padding in front of tokens, and for padding behind cached ones, if
        the model takes the first keys for those of the tokens.

        Behind a prompt with padding after its tokens, such a model writes in place of the padding.
        The mask then has zeros before the ones of later steps: what an earlier step was given is
        not looked at again.
        """
        mask = feeds.get(MASK)
        if not self._counts_mask or mask is None or mask.ndim != BY_SEQUENCE:
            return
        held = mask[:, : 0 if MASK in self._last else self._length]
        parts = (held, mask[:, self._length :])
        is_begun = MASK in self._last or mask[:, :1].all()
        if not is_begun or any((part[:, 1:] > part[:, :-1]).any() for part in parts):
            raise InputError(
                f"{self.name} reads of '{MASK}' only how many ones each row has: pad the sequences of a batch behind "
                "their tokens, not in front of them"
            )
        if self._length and not mask[:, self._length :].all():
            raise InputError(
                f"{self.name} reads of '{MASK}' only how many ones each row has, and would write in place of cached "
                "tokens: behind these each row has ones for all new tokens, also that of a sequence that has ended"
            )

    def _check_indices(self, feeds: Mapping[str, Array], new: int) -> None:
        """Raise InputError for a token or a position that the model's table does not have."""
        for name, bound in self._bounds.items():
            array = feeds.get(name)
            if array is None or not array.size:
                continue
            if int(array.min()) < -bound:
                raise InputError(
                    f"'{name}' holds {array.min()}, and {self.name} knows the numbers from {-bound} upwards"
                )
            if int(array.max()) < bound:
                continue
            if name in POSITIONS:
                raise InputError(
                    f"{self.name} has {bound} positions, and {self._tokens(new)} go up to position {array.max()}; "
                    "reset() or rewind() makes room"
                )
            raise InputError(
                f"'{name}' holds {array.max()}, and {self.name} knows the numbers up to {bound - 1}"
            )

    def _tokens(self, new: int) -> str:
        return f"{self._length} cached and {new} new tokens"

    def _told_of(self, error: Exception, feeds: Mapping[str, Array], batch: int, new: int) -> str:
        """The message of a step that ONNX Runtime refuses. In front of it stands what the inputs
        contradict in each other or in the model, or else what may be the reason."""
        told = f"{self.name} fails in ONNX Runtime: {one_line(error)}"
        found = _other_batches(feeds, batch) or misfit(feeds, self._inputs.values(), self._bounds)
        reason = found or self._guess(error, new)
        return told if reason is None else f"{reason}; {told}"

    def _guess(self, error: Exception, new: int) -> str | None:
        """What may be the reason where ONNX Runtime says that an index is too large, or refuses
        several tokens."""
        if OUT_OF_RANGE.search(str(error)):
            return (
                f"either a token is none of the model's, or it has no positions for {self._tokens(new)} (reset() or "
                "rewind() makes room)"
            )
        if SEVERAL_OF_A_BATCH in str(error):
            return (
                f"the step has {new} tokens of each sequence of a batch; ONNX Runtime's GroupQueryAttention takes one "
                "token a step behind cached ones there: give them one at a time"
            )
        if new > 1:
            return (
                f"the step has {new} tokens, and a file that was traced with one, or fused with the assumption "
                "'decode', takes one in each step, also those of a prompt"
            )
        return None

    def _made(self, name: str, batch: int, new: int) -> Array:
        """An input that follows from the number of tokens."""
        info, held, total = self._inputs[name], self._length, self._length + new
        dtype = onnx.helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
        rank = len(info.type.tensor_type.shape.dim)
        made: Array
        if name in self._handed_on:
            made = np.zeros([])
        elif name in self._lengths or name == "past_sequence_length":
            made = np.full([1] * rank, held)
        elif name == SWITCH:
            made = np.full([1] * rank, held > 0)
        elif name == MASK:
            made = np.ones((batch, total))
            if name in self._last and self._last[name].shape == (batch, held):
                made[:, :held] = self._last[name]
        elif name == "total_sequence_length":
            made = np.full([1] * rank, total)
        elif name in ("seqlens_k", "write_indices", "nonpad_kv_seqlen"):
            counts = {"seqlens_k": total - 1, "write_indices": held, "nonpad_kv_seqlen": total}
            made = np.full([batch, 1][:rank], counts[name])
        else:
            places = np.arange(held, total)
            made = np.broadcast_to(places, (batch, new)) if rank == BY_SEQUENCE else places
            if name in self._last and self._last[name].shape[0] in (1, batch):
                made = self._last[name][:, -1:] + np.arange(1, new + 1)
        return (
            np.ascontiguousarray(made.astype(dtype))
            if made.ndim
            else np.asarray(made.astype(dtype))
        )

    def _capacity(self, tokens: int) -> int:
        """The room of buffers that hold so many tokens. Raises InputError if that is more than the
        caller allows."""
        if self.room is not None:
            if tokens > self.room:
                raise InputError(
                    f"the caches have room for {self.room} tokens, and {tokens} are needed: make the session with a "
                    "larger room, or call reset()"
                )
            return self.room
        room = LEAST_ROOM
        while room < tokens:
            room *= 2
        return room

    def _make_room(self, batch: int, tokens: int) -> None:
        """Make the caches before the first step, and buffers that are full larger. Raises
        InputError."""
        room = self._capacity(tokens)
        if not self._values:
            shapes = self._empty_shapes(batch)
            for name, cache in self.caches_by_input.items():
                empty = np.zeros(shapes[name], _numpy_type(self._inputs[name]))
                if cache.is_one_buffer:
                    self._hold(name, empty, room)
                else:
                    self._values[name] = to_ort(empty)
            return
        for name, memory in list(self._memory.items()):
            cache = self.caches_by_input[name]
            if memory.shape[cache.axis] < tokens:
                self._hold(name, _rows(memory, cache, self._length), room)

    def _hold(self, name: str, rows: Array, room: int) -> None:
        """A buffer with these rows, and room for more."""
        cache = self.caches_by_input[name]
        fixed = fixed_size(self._inputs[name].type.tensor_type.shape.dim[cache.axis])
        shape = list(rows.shape)
        shape[cache.axis] = fixed or room
        if rows.shape[cache.axis] > shape[cache.axis]:
            raise InputError(
                f"the cache '{name}' has room for {fixed} tokens, which the model fixes"
            )
        try:
            memory = np.zeros(shape, rows.dtype)
        except MemoryError:
            raise InputError(
                f"the memory is too small for a cache of {shape} {rows.dtype}: give less room"
            ) from None
        _rows(memory, cache, rows.shape[cache.axis])[...] = rows
        self._memory[name] = memory
        self._values[name] = to_ort(memory)

    def _empty_shapes(self, batch: int) -> dict[str, list[int]]:
        """The shapes of the caches without tokens. Sizes that neither past nor present tells are
        those of the new rows, or those that the nodes demand."""
        shapes = {
            name: self._empty_shape(cache, batch) for name, cache in self.caches_by_input.items()
        }
        for name, cache in self.caches_by_input.items():
            if cache.kind == "state" and -1 in shapes[name][1:]:
                raise InputError(
                    f"{self.name} leaves the size of its state '{name}' open: begin with take_caches, and give it the "
                    "outputs of the model that reads the prompt"
                )
        for found in (self._sizes_of_rows, self._demanded_sizes):
            if any(-1 in shape for shape in shapes.values()):
                known = found(batch)
                shapes |= {
                    name: _filled(shape, known[name])
                    for name, shape in shapes.items()
                    if name in known
                }
        return shapes

    def _sizes_of_rows(self, batch: int) -> Mapping[str, Sequence[int]]:
        return sizes_of_rows(self._proto)

    def _demanded_sizes(self, batch: int) -> Mapping[str, Sequence[int]]:
        made = random_inputs(
            self._proto, self.name, batch=batch, rows=1, past=1, only=self.caches_by_input
        )
        return {name: array.shape for name, array in made.items()}

    def _is_batch_first(self, name: str) -> bool:
        """Is the first dimension of a cache the batch, and not a product of it?"""
        dims = self._inputs[name].type.tensor_type.shape.dim
        return not set("*+-/") & set(dims[0].dim_param)

    def _empty_shape(self, cache: Cache, batch: int) -> list[int]:
        dims = self._inputs[cache.past].type.tensor_type.shape.dim
        grown = self._declared[cache.present].type.tensor_type.shape.dim
        sizes = [fixed_size(dim) for dim in dims]
        if len(grown) == len(dims):
            sizes = [size or fixed_size(other) for size, other in zip(sizes, grown, strict=True)]
        sizes = [size or -1 for size in sizes]
        if sizes[0] < 0 and self._is_batch_first(cache.past):
            sizes[0] = batch
        if cache.kind != "state":
            sizes[cache.axis] = 0
        return sizes


def _check_number(what: str, value: int, least: int) -> None:
    """Raise InputError for what is no integer from `least` upwards."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise InputError(f"{what} is a number from {least} upwards, not {value!r}")


def _type(value: object) -> str:
    """What a value is, in words."""
    return "None" if value is None else f"of type {type(value).__name__}"


def _all_tokens(lengths: Mapping[str, int], length: int | None) -> int:
    """The number of tokens that caches of these lengths stand for. Raises InputError."""
    if length is None:
        _check_equal(lengths, "hold different numbers of tokens", "holds", _TRIMMED)
        return next(iter(lengths.values()), 0)
    _check_number("length", length, 1)
    if (most := max(lengths.values(), default=0)) > length:
        raise InputError(f"the caches hold {most} tokens, which is more than length={length}")
    return length


def _other_batches(feeds: Mapping[str, Array], batch: int) -> str | None:
    """Which inputs have another batch than the step."""
    others = {name: array.shape[0] for name, array in feeds.items() if array.ndim >= BY_SEQUENCE}
    told = " and ".join(f"'{name}' is of {size}" for name, size in others.items() if size != batch)
    return f"the step has a batch of {batch}, and {told}" if told else None


def _check_equal(numbers: Mapping[str, int], what: str, verb: str, hint: str = "") -> None:
    """Raise InputError for caches that do not have one number in common."""
    if len(set(numbers.values())) > 1:
        told = ", ".join(f"'{name}' {verb} {number}" for name, number in numbers.items())
        raise InputError(f"the caches {what}: {told}{hint}")


def _check_open(name: str, proto: onnx.ModelProto, caches: Iterable[Cache]) -> None:
    """Raise InputError for a cache that grows, although the model fixes its number of tokens."""
    cache = of_fixed_length(proto, caches)
    if cache is not None:
        dims = next(
            info.type.tensor_type.shape.dim
            for info in graph_inputs(proto)
            if info.name == cache.past
        )
        shape = ", ".join(str(fixed_size(dim) or dim.dim_param or "?") for dim in dims)
        raise InputError(
            f"{name} fixes the number of tokens in its cache '{cache.past}' [{shape}], so that no other step can "
            "follow; export it with a dynamic axis"
        )


class _UnfusedSession(OwnSession):
    """The session of a file without our operators. The provider may not change which caches are one
    buffer."""

    why_unfused = "a DecodingSession runs the file as it is (fuse it with fa-compiler optimize)"


def _session(
    path: Path, name: str, proto: onnx.ModelProto, threads: int, optimise: bool
) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4  # errors come as exceptions
    options.intra_op_num_threads = threads
    if not optimise:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        kind: type[OwnSession] = _UnfusedSession
        if _needs_library(opset.domain for opset in proto.opset_import):
            register_custom_ops(options)
            kind = OwnSession
        return kind(str(path), options, providers=["CPUExecutionProvider"])
    except LibraryUnusable as error:
        raise InputError(f"{name}: {one_line(error)}") from None
    except ORT_ERRORS as error:
        raise InputError(f"{name} cannot be loaded by ONNX Runtime: {one_line(error)}") from None


def _needs_library(domains: Iterable[str]) -> bool:
    return not set(op_registry.DOMAINS).isdisjoint(domains)


def _rows(array: Array, cache: Cache, count: int, start: int = 0) -> Array:
    """A view of the first rows of a cache, up to the number `count` and from the number `start` on;
    a cache without a row for each token is whole."""
    if not cache.has_tokens:
        return array
    return array[(slice(None),) * cache.axis + (slice(start, count),)]


def _with_rows_in_front(array: Array, axis: int, count: int) -> Array:
    """The array with so many rows of zeros in front."""
    if not count:
        return array
    shape = list(array.shape)
    shape[axis] = count
    return np.concatenate([np.zeros(shape, array.dtype), array], axis)


def _filled(shape: Sequence[int], known: Sequence[int]) -> list[int]:
    """A shape with the known sizes where it has none."""
    return [other if size < 0 else size for size, other in zip(shape, known, strict=True)]


def _numpy_type(info: onnx.ValueInfoProto) -> np.dtype[Any]:
    return onnx.helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
