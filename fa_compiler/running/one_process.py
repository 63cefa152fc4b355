"""Runs one model in this process, from a file of inputs to a file of outputs."""

from __future__ import annotations

from pathlib import Path

from fa_compiler.comparison.feeds import load_inputs, save_arrays
from fa_compiler.errors import InputError
from fa_compiler.model_files.destination import is_same, open_for_writing
from fa_compiler.model_files.reading import LoadedModel
from fa_compiler.model_files.writing import cannot_write, check_place, staging
from fa_compiler.running.runtime import Array, Session


def check_outputs(outputs: Path, inputs: Path, loaded: LoadedModel) -> None:
    """Refuse a file of outputs that would overwrite the model, its weights or the inputs. Raises InputError."""
    check_place(outputs, loaded)
    if is_same(outputs, inputs):
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


def run_model(loaded: LoadedModel, inputs: Path, outputs: Path, threads: int = 0) -> dict[str, Array]:
    """Run a model that `load` read from a path, and write its outputs. Returns them by name.

    Raises:
        InputError: the model, the inputs or the place of the outputs is at fault; nothing was written.
    """
    assert loaded.path is not None
    check_outputs(outputs, inputs, loaded)
    feeds = load_inputs(inputs, loaded.proto)
    domains = {opset.domain for opset in loaded.proto.opset_import}
    arrays = Session(loaded.path, loaded.name, domains, threads=threads).run(feeds)
    save_outputs(outputs, arrays)
    return arrays
