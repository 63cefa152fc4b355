"""Runs one model in this process, from a file of inputs to a file of outputs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fa_compiler.comparison.buffers import buffers_of
from fa_compiler.comparison.decoder import caches_of, check_one_token, rows_of
from fa_compiler.comparison.feeds import load_inputs, random_inputs, save_arrays, with_misfit
from fa_compiler.comparison.lengths import sizes_for
from fa_compiler.errors import InputError
from fa_compiler.model_files.destination import is_same, open_for_writing
from fa_compiler.model_files.reading import LoadedModel
from fa_compiler.model_files.writing import cannot_write, check_no_model, check_place, staging
from fa_compiler.passes.answer.report import first_of
from fa_compiler.protos.metadata import takes_one_token
from fa_compiler.running.runtime import Array, Session


def check_outputs(outputs: Path, inputs: Path | None, loaded: LoadedModel) -> None:
    """Refuse a file of outputs that would overwrite the model, its weights or the inputs, or that
    has the name of a model. Raises InputError."""
    check_place(outputs, loaded)
    check_no_model(outputs, "file of outputs")
    if inputs is not None and is_same(outputs, inputs):
        raise InputError(f"{outputs} holds the inputs; choose another name for the outputs")


def save_outputs(outputs: Path, arrays: dict[str, Array]) -> None:
    """Write the outputs to an .npz file, which appears whole or not at all. Raises InputError."""
    with staging() as stage:
        staged = stage.reserve(outputs)
        try:
            with open_for_writing(staged) as file:
                save_arrays(file, arrays)
        except OSError as error:
            raise cannot_write(outputs, error) from None
        stage.commit()


def run_model(
    loaded: LoadedModel, inputs: Path | None, outputs: Path | None, threads: int = 0
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Run a model that `load` read from a path, and write its outputs. Returns the inputs and the
    outputs by name.

    Without a file of inputs they are random, of the first sizes (`sizes_for`) with which the model
    runs. Without a place the outputs are not written.

    Raises:
        InputError: the model, the inputs or the place of the outputs is at fault; nothing was
            written.
    """
    assert loaded.path is not None
    if outputs is not None:
        check_outputs(outputs, inputs, loaded)
    domains = {opset.domain for opset in loaded.proto.opset_import}
    session = Session(loaded.path, loaded.name, domains, threads=threads)
    if inputs is None:
        feeds, arrays = _run_random(loaded, session)
    else:
        feeds = load_inputs(inputs, loaded.proto)
        if takes_one_token(loaded.proto):
            _check_tokens(loaded, feeds)
        try:
            arrays = session.run(feeds)
        except InputError as error:
            told = with_misfit(str(error), feeds, loaded.proto)
            raise InputError(
                f"{told}{_with_fewer(loaded, session, feeds)}" if told == str(error) else told
            ) from None
    if outputs is not None:
        save_outputs(outputs, arrays)
    return feeds, arrays


def _check_tokens(loaded: LoadedModel, feeds: Mapping[str, Array]) -> None:
    """Raise InputError for several new tokens in a run of a model that was fused for one
    (`--assume decode`)."""
    rows = rows_of(loaded.proto, caches_of(loaded.proto))
    if rows is not None and rows.input in feeds:
        advice = "; run the prompt in the original model, or fuse the model without --assume decode"
        check_one_token(loaded.name, f"'{rows.input}'", rows.count(feeds[rows.input]), advice)


def _with_fewer(loaded: LoadedModel, session: Session, feeds: Mapping[str, Array]) -> str:
    """The end of the message of a model that fails with given inputs and runs with random ones that
    are smaller."""
    try:
        smaller, _ = _run_random(loaded, session)
    except InputError:
        return ""
    shapes = {
        name: list(array.shape)
        for name, array in smaller.items()
        if any(map(int.__lt__, array.shape, feeds[name].shape))
    }
    if not shapes:
        return ""
    of = first_of([f"{name} {shape}" for name, shape in shapes.items()])
    return f"; it runs with {of}, so it may take fewer tokens than these (fa-compiler bench tells how many it takes)"


def _run_random(loaded: LoadedModel, session: Session) -> tuple[dict[str, Array], dict[str, Array]]:
    """Random inputs with which the model runs, and its outputs. Caches that are buffers hold no
    tokens, so that there is room for the new ones; those without an input that counts their tokens
    are larger than these. Raises the error of the first sizes if it runs with none."""
    counted = {each.past: each.length for each in buffers_of(loaded.proto)}
    uncounted = [
        each
        for each in caches_of(loaded.proto)
        if each.kind == "buffer" and each.past not in counted
    ]
    rows = 1 if takes_one_token(loaded.proto) else None
    faults: list[InputError] = []
    for sizes in sizes_for(loaded.proto):
        try:
            feeds = random_inputs(loaded.proto, loaded.name, **sizes._asdict(), rows=rows)
            feeds |= {name: np.zeros_like(feeds[name]) for name in counted.values()}
            feeds |= {each.past: np.repeat(feeds[each.past], 2, each.axis) for each in uncounted}
            return feeds, session.run(feeds)
        except InputError as error:
            faults.append(error)
    told = str(faults[0])
    raise InputError(
        told if "--inputs" in told else f"{told}; give inputs that fit the model with --inputs"
    )
