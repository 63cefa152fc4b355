"""Options are named once: records, keywords of functions and the command line agree."""

from __future__ import annotations

import argparse
import inspect
import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import fa_compiler
from fa_compiler.atc.request import AtcKeywords, Parallel, Request
from fa_compiler.command_line.main import parser
from fa_compiler.errors import InputError
from fa_compiler.measuring.options import BenchKeywords, BenchOptions
from fa_compiler.passes import Options
from fa_compiler.passes.answer.option import as_given, options_of
from fa_compiler.passes.answer.options import FusionKeywords
from fa_compiler.passes.parallel.methods import Machine
from fa_compiler.passes.parallel.options import ParallelOptions, ShardKeywords
from fa_compiler.pipeline.keywords import names_of_python
from fa_compiler.pipeline.options import FileKeywords, FileOptions, PassKeywords, make_options

ROOT = Path(__file__).parent.parent
KEYWORDS = [
    (FusionKeywords, (Options,), {"target"}),
    (FileKeywords, (FileOptions,), {"target"}),
    (ShardKeywords, (ParallelOptions,), {"sequence_parallel"}),
    (BenchKeywords, (BenchOptions,), {"lengths"}),
    (AtcKeywords, (Request, Parallel), {"soc_version"}),
]
"""The keywords for type checkers, the records that hold the options, and the options that are parameters."""


@pytest.mark.parametrize(("keywords", "records", "apart"), KEYWORDS)
def test_the_keywords_are_the_fields(keywords: type, records: tuple[type, ...], apart: set[str]) -> None:
    types, options = get_type_hints(keywords), options_of(*records)
    shared = {"assume"} if Request in records else set()
    assert types.keys() - shared == options.keys() - apart
    fields = {name: kind for record in records for name, kind in get_type_hints(record).items()}
    for name in types.keys() - shared:
        if options[name].told.read is as_given and options[name].default is not None:
            assert types[name] == fields[options[name].field], name


FUNCTIONS: list[tuple[Any, type, type]] = [
    (fa_compiler.optimize, FileKeywords, FileOptions),
    (fa_compiler.inspect, FusionKeywords, FileOptions),
    (fa_compiler.graph, FusionKeywords, FileOptions),
    (fa_compiler.FuseAttention, PassKeywords, FileOptions),
    (fa_compiler.shard, ShardKeywords, ParallelOptions),
    (fa_compiler.bench, BenchKeywords, BenchOptions),
]


@pytest.mark.parametrize(("function", "keywords", "record"), FUNCTIONS)
def test_signatures_and_docstrings(function: Any, keywords: type, record: type) -> None:
    parameters, options = inspect.signature(function).parameters, options_of(record)
    assert "options" not in parameters
    for name in keywords.__annotations__:
        assert (parameters[name].kind, parameters[name].default) == (
            inspect.Parameter.KEYWORD_ONLY,
            options[name].default,
        )
        assert function is fa_compiler.inspect or f"    {name}: {options[name].sentences[:20]}" in function.__doc__
    with pytest.raises(TypeError, match=r"\(\) got an unexpected keyword argument 'divided'"):
        function("model.onnx", *["out", 2][: 2 * (record is ParallelOptions)], divided=True)


def test_a_keyword_with_a_slip_names_the_one_that_is_meant() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'taget', did you mean 'target'\\?"):
        fa_compiler.optimize("model.onnx", taget="onnx")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("call", "given", "meant"),
    [
        (fa_compiler.InferenceSession, "assum", "assume"),
        (fa_compiler.InferenceSession, "session_options", "sess_options"),
        (fa_compiler.InferenceSession, "disabled_optimizer", "disabled_optimizers"),
        (fa_compiler.DecodingSession, "rooms", "room"),
        (fa_compiler.ShardedSession, "thread", "threads"),
        (fa_compiler.plan, "levels", "level"),
        (fa_compiler.verify, "tol", "rtol"),
        (fa_compiler.reference.run, "attr", "attrs"),
        (fa_compiler.ops.run, "output", "outputs"),
    ],
)
def test_every_call_names_the_keyword_that_is_meant(call: Any, given: str, meant: str) -> None:
    with pytest.raises(TypeError, match=rf"unexpected keyword argument '{given}', did you mean '{meant}'\?"):
        call("model.onnx", "other.onnx", **{given: 1})


def test_a_session_has_the_options_of_its_target() -> None:
    parameters = inspect.signature(fa_compiler.InferenceSession).parameters
    ours = {name: each.default for name, each in parameters.items() if each.kind is inspect.Parameter.KEYWORD_ONLY}
    assert ours
    assert ours == {name: options_of(Options)[name].default for name in ours}
    for page, words in (
        ("README.md", r"`InferenceSession` also takes"),
        ("docs/api.md", r"A session, `InferenceSession`, takes"),
    ):
        told = re.search(words + r" ([^.]+)\.", (ROOT / page).read_text(encoding="utf-8"))
        assert told and {*re.findall(r"`(\w+)`", told[1])} == ours.keys(), f"{page}: what a session takes"


def test_the_command_line_has_the_options_and_their_defaults() -> None:
    (commands,) = (each for each in parser()._actions if isinstance(each, argparse._SubParsersAction))
    for command, records in (
        ("optimize", (FileOptions,)),
        ("inspect", (Options,)),
        ("shard", (ParallelOptions, Machine)),
        ("bench", (BenchOptions,)),
        ("atc", (Request, Parallel)),
    ):
        actions = {each.dest: each for each in commands.choices[command]._actions}
        for option in options_of(*records).values():
            if option.told.on_command_line:
                assert option.flag in actions[option.name].option_strings
                assert actions[option.name].required == option.is_required
                assert option.is_required or (actions[option.name].default or None) == (option.default or None)


def test_a_value_left_out_is_the_default() -> None:
    defaults = {name: option.default for name, option in options_of(FileOptions).items()}
    assert make_options() == make_options(**defaults) == FileOptions()


def test_errors_in_python_name_keywords_and_keep_commands() -> None:
    command = "`fa-compiler inspect --target ascend --cann 9.0`"
    with pytest.raises(InputError) as caught, names_of_python(FileOptions):
        raise InputError(f"{command} says why; give --cann with --target ascend, or --opset 23")
    assert str(caught.value) == f'{command} says why; give `cann` with target="ascend", or `opset` 23'
