"""`verify`: compares two models in ONNX Runtime, whatever they are given as."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from numbers import Real
from pathlib import Path

import numpy.typing as npt

from fa_compiler.comparison.compare import Comparison, compare_models
from fa_compiler.errors import InputError, suggests_keywords
from fa_compiler.model_files.reading import ModelLike, load
from fa_compiler.model_files.temporary import TemporaryFolder
from fa_compiler.model_files.writing import staging, write_model
from fa_compiler.passes import Report
from fa_compiler.pipeline.fusing import copy_of
from fa_compiler.pipeline.options import python_options


@suggests_keywords
def verify(
    original: ModelLike,
    other: ModelLike,
    inputs: str | os.PathLike[str] | Mapping[str, npt.ArrayLike] | None = None,
    rtol: float | None = None,
    *,
    assume: Iterable[str] = (),
    shared_caches: bool = False,
) -> Comparison:
    """Run two models in ONNX Runtime on the same inputs and compare every output.

    Args:
        original: the model that counts as right; it runs with graph optimisations off. A path,
            bytes, an `onnx.ModelProto`, an `onnx_ir.Model` or an `ONNXProgram` of
            torch.onnx.export.
        other: the model to compare; the same types.
        inputs: the inputs by name, or the .npz file that holds them; None makes random inputs,
            several times.
        rtol: the allowed difference relative to an output's largest finite value; None chooses it
            by the coarsest type of the model (float32 1e-5, float16 2e-3, bfloat16 1.6e-2).
        assume: the assumptions that you vouch for; random inputs satisfy them.
        shared_caches: bind each past of a GroupQueryAttention and its present together. The
            assumption shared-caches does so, too.

    Returns:
        The comparison; its `same` says whether all outputs agree.

    Raises:
        InputError: a model, an option or the inputs cannot be used, or ONNX Runtime cannot run
            `original`.
        CannotRunError: ONNX Runtime runs `original` but not `other`.
    """
    words = python_options(assume=assume).assume
    if rtol is not None and not isinstance(rtol, Real):
        raise TypeError(f"`rtol` is a number or None, not {rtol!r}")
    if rtol is not None and not rtol >= 0:
        raise InputError(f"rtol is a number from 0 upwards, not {rtol!r}")
    if not isinstance(inputs, str | os.PathLike | Mapping | None):
        raise TypeError(
            f"`inputs` is a dictionary of arrays or the path of an .npz file, not {type(inputs).__name__}"
        )
    with TemporaryFolder() as folder:
        first, second = (
            as_file(original, folder, "original.onnx"),
            as_file(other, folder, "other.onnx"),
        )
        feeds = Path(inputs) if isinstance(inputs, (str, os.PathLike)) else inputs
        return compare_models(first, second, feeds, rtol, shared=shared_caches, assume=words)


def as_file(model: ModelLike, folder: TemporaryFolder, name: str) -> Path:
    """The path of a model, which is written to the folder under this name if it has none.

    Raises:
        InputError: the model is at fault, or there is no folder for temporary files.
    """
    if isinstance(model, (str, os.PathLike)):
        return Path(model)
    loaded, place = load(model), folder.path / name
    with staging() as stage:
        write_model(copy_of(loaded), loaded, place, stage, Report([]))
        stage.commit()
    return place
