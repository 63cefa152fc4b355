"""`plan`: writes down what the matcher answers in a session, for programs that have no matcher."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, get_args

import onnxruntime as ort

from fa_compiler import provider
from fa_compiler.errors import InputError, one_line, suggests_keywords
from fa_compiler.lowering.ort import LibraryUnusable
from fa_compiler.lowering.ort.eager import ORT_ERRORS
from fa_compiler.lowering.ort.own_session import OwnSession
from fa_compiler.model_files.destination import path_of
from fa_compiler.model_files.reading import load, refuse_sharded
from fa_compiler.model_files.writing import check_no_model, check_place, staging, write
from fa_compiler.op_registry.errors import suggestion
from fa_compiler.passes import Report
from fa_compiler.passes.answer.options import SHARED_CACHES
from fa_compiler.pipeline.options import python_options
from fa_compiler.provider.plan_file import plan_bytes
from fa_compiler.version import __version__

Level = Literal["disabled", "basic", "extended", "all"]
"""How far a session optimises its graph."""

_LEVELS = {
    "disabled": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}

_ERRORS_ONLY = 3
"""A severity of ONNX Runtime's log."""


@suggests_keywords
def plan(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    level: Level = "all",
    *,
    assume: Iterable[str] = (),
) -> Report:
    """Write what the provider does in a session of `model`, and return the report of the session's
    graph.

    A session of the same model takes it from the file `output`, in any program that has the
    library, this release of ONNX Runtime and this level of optimisation. Where nothing is fused,
    the plan says so.

    Args:
        model: the path of the model.
        output: the file to write; it may not be the model.
        level: the level of optimisation of the sessions: "all", the default of ONNX Runtime,
            "extended", "basic" or "disabled".
        assume: assumptions that you vouch for in all sessions that use the plan, as in `optimize`;
            not "shared-caches".

    Raises:
        InputError: the model, the level, an assumption or the output is at fault, the library is
            not installed, or this ONNX Runtime is older than 1.23; nothing was written.
    """
    if not isinstance(model, str | os.PathLike):
        raise TypeError(
            f"a plan is made for the file of a model, so `model` is its path, not {type(model).__name__}"
        )
    options = python_options(assume=assume)
    if SHARED_CACHES in options.assume:
        raise InputError(
            f"no plan can be made with {SHARED_CACHES!r}: the provider does not know which caches a program binds "
            "together; fuse the file with `fa-compiler optimize`"
        )
    if level not in get_args(Level):
        raise InputError(f"unknown level {level!r}{suggestion(level, get_args(Level))}")
    place, loaded = path_of(output), load(Path(model))
    refuse_sharded(loaded.proto, loaded.name)
    check_place(place, loaded)
    check_no_model(place, "plan")
    assert loaded.path is not None
    with staging() as stage:
        staged = stage.reserve(place)
        with provider.overhear(entries=True, options=options) as heard:
            _make_session(loaded.path, loaded.name, level)
        if heard.interrupted:
            raise KeyboardInterrupt
        if heard.failures:
            raise InputError(f"no plan for {loaded.name}: {heard.failures[-1]}")
        content = plan_bytes(heard.entries, __version__, ort.__version__, level, loaded.path.name)
        write(staged, [content], place)
        stage.commit()
    report = heard.reports[-1]
    report.model = loaded.name
    return report


def _make_session(path: Path, name: str, level: Level) -> None:
    """Make a session that asks the matcher, and let it go."""
    options = ort.SessionOptions()
    options.log_severity_level = _ERRORS_ONLY
    options.graph_optimization_level = _LEVELS[level]
    try:
        # older releases than it needs have no method for them
        devices = provider.register_provider()
        # without it the plans of the environment would answer
        options.add_provider_for_devices(devices, {"plan": ""})
        OwnSession(path, options)
    except LibraryUnusable as error:
        raise InputError(one_line(error)) from None
    except ORT_ERRORS as error:
        raise InputError(f"{name} cannot be loaded by ONNX Runtime: {one_line(error)}") from None
