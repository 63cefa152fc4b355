"""The command `fa-compiler`: parses the command line, runs a command and turns errors into one
line."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import importlib
import logging
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fa_compiler.atc.request import Parallel, Request
from fa_compiler.command_line import atc_words, interrupts
from fa_compiler.command_line.completion import COMPLETING, SHELLS, complete
from fa_compiler.command_line.docs import names
from fa_compiler.command_line.exit_codes import (
    BAD_INPUT,
    DIFFERENT,
    INTERNAL,
    INTERRUPTED,
    OK,
    PIPE_CLOSED,
)
from fa_compiler.command_line.options import add_options, add_shared, completed, path, reading
from fa_compiler.errors import InputError, one_line
from fa_compiler.measuring.options import BenchOptions, non_negative
from fa_compiler.model_files.destination import file_place, is_stream
from fa_compiler.model_files.writing import FULL
from fa_compiler.op_registry.errors import RegistryError
from fa_compiler.passes import Options
from fa_compiler.passes.answer.report import printable
from fa_compiler.passes.parallel.methods import Machine
from fa_compiler.passes.parallel.options import ParallelOptions
from fa_compiler.pipeline.keywords import flags_only
from fa_compiler.pipeline.options import FileOptions
from fa_compiler.version import __version__

DEBUG = "FA_COMPILER_DEBUG"

FOLDER = "a new or empty folder, or one that holds only what an earlier run wrote"

_SILENT = logging.NullHandler()

_FILES = ("output", "outputs", "report", "html", "graph")
"""The arguments that name a file to write."""

_OF_MODELS = ("--input", "--input-model", "--model-path", "--in", "--onnx", "--file", "-i", "-m")
"""How other programs call the argument for the model, besides its name here."""

_MEANT = {
    **dict.fromkeys(("fuse", "convert", "compile"), "optimize"),
    **dict.fromkeys(("compare", "check", "validate"), "verify"),
    **dict.fromkeys(("profile", "measure", "time"), "bench"),
    **dict.fromkeys(("infer", "predict"), "run"),
}
"""How other programs call commands of this one."""

_ALSO_CALLED = {
    **dict.fromkeys(("product", "device", "chip"), "--soc-version"),
    **dict.fromkeys(("shape", "shapes"), "--input-shape"),
    "verbose": "--explain",
}
"""Other words for options."""

_CLOSE = 0.7
"""How much of its letters a word shares with the option for which it may stand."""

_FAULT = "--strict: an attention is not fused"
"""What the exit code 1 of the commands with --strict means."""

_FILES_TEXT = (
    "\nA failed run leaves no output. An output that exists is replaced; a link is written through. "
    '"-" is an ordinary file name. If a file goes to standard output (/dev/stdout), the text goes to standard error.\n'
)

_WIDEST = 118
"""Columns of a paragraph; longer lines are hard to read."""

_FOLDER_TEXT = (
    "\nA failed run leaves no output. A folder that an earlier run wrote is replaced, unless it holds "
    "other files.\n"
)


def _ends(different: str = "", writes: str = _FILES_TEXT) -> str:
    """The exit codes of a command, and what holds for what it writes.

    Args:
        different: what the exit code 1 means; commands without one do not have it.
        writes: what holds for its files or its folder; empty for a command that writes none.
    """
    codes = {
        OK: "done",
        DIFFERENT: different,
        BAD_INPUT: "bad usage, bad input, or an output that cannot be written"
        if writes
        else "bad usage or bad input",
        INTERNAL: f"internal error; please report it with the output of a run with {DEBUG}=1",
        INTERRUPTED: "interrupted",
    }
    lines = "".join(f"  {code:<5}{meaning}\n" for code, meaning in codes.items() if meaning)
    return f"exit codes:\n{lines}{writes}"


EXIT_CODES = _ends("a difference or a fault was found, or with --strict an attention is not fused")


class _Help(argparse.RawDescriptionHelpFormatter):
    """Does not divide a word such as no-empty-rows at its hyphens, nor the commands of examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        for line in text.splitlines():
            code = re.match(r"  \d+ +", line)
            if code is None and line.startswith("  "):
                lines.append(line)  # a command
                continue
            behind = " " * len(code[0]) if code else ""
            wrapped = textwrap.wrap(
                line, min(width, _WIDEST), subsequent_indent=behind, break_on_hyphens=False
            )
            lines += wrapped or [""]
        return "".join(f"{indent}{line}\n" for line in lines)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class _Parser(argparse.ArgumentParser):
    """Prints a usage error as one line and exits with code 2. A word close to a command is
    corrected in it."""

    commands: Mapping[str, _Parser] = {}
    """The commands below this one."""
    siblings: Mapping[str, _Parser] = {}
    """The commands beside this one, with itself."""

    def unknown(self, word: str) -> NoReturn:
        """End with the error of a word that the command does not know. Another one may know it."""
        name = word.partition("=")[0]
        if self.prog.endswith(" atc") and (advice := atc_words.told(word)):
            self.error(f"unknown argument {word!r}: {advice}")
        places = {
            action.dest: action.metavar for action in self._actions if not action.option_strings
        }
        if not name.startswith("-"):
            takes = " and ".join([*map(str, places.values()), "options"])
            self.error(
                f"unexpected argument {word!r}: the command takes {takes} only{self._why_alone(word)}"
            )
        if (option := self._meant(name)) is not None:
            hint = (
                "? Options here have '-' and not '_'" if option == name.replace("_", "-") else "?"
            )
            self.error(f"unknown argument {word!r}, did you mean {option}{hint}")
        stem = "model" if name in _OF_MODELS else name.lstrip("-")
        if stem in places:
            self.error(
                f"unknown argument {word!r}: {places[stem]} stands without an option in front of it"
            )
        owners = [
            each for each, parser in self.siblings.items() if name in parser._option_string_actions
        ]
        self.error(
            f"unknown argument {word!r}"
            + (f": it is an option of {', '.join(owners)}" if owners else "")
        )

    def _why_alone(self, word: str) -> str:
        """The end of the message of a word that has no place in the command."""
        if self.prog.endswith(" bench") and word.endswith(".onnx"):
            return ", because it fuses the model itself and measures both"
        return "; commas separate the values of an option" if word[:1].isdigit() else ""

    def _meant(self, name: str) -> str | None:
        """The option that an unknown name may stand for: the same word, one that begins alike, or a
        near one."""
        word = name.replace("_", "-").lstrip("-")
        stems = {option.lstrip("-"): option for option in self._option_string_actions}
        if word in stems:
            return stems[word]
        if (option := _ALSO_CALLED.get(word)) in self._option_string_actions:
            return option
        starts = [stem for stem in stems if _is_start(stem, word) or _is_start(word, stem)]
        close = starts or difflib.get_close_matches(word, stems, n=1, cutoff=_CLOSE)
        return stems[close[0]] if close else None

    def _command_meant(self, word: str) -> str:
        """What an unknown command may stand for: an option, of this command or of those below it,
        or a near command."""
        option = f"--{word}"
        if option in self._option_string_actions:
            return f"did you mean {option!r}?"
        owners = [
            name
            for name, command in self.commands.items()
            if option in command._option_string_actions
        ]
        if owners:
            return f"{option} is an option of {', '.join(owners)}"
        meant = _MEANT.get(word, word)
        close = (
            [meant]
            if meant in self.commands
            else difflib.get_close_matches(word, self.commands, n=1)
        )
        return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(self.commands)}"

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does it; but an unknown option is named before what is missed because of
        it."""
        known = self._option_string_actions
        for word in takewhile(lambda word: word != "--", () if self.commands else args or ()):
            name = word.partition("=")[0]
            is_option = (
                name.startswith("--")
                or name in _OF_MODELS
                or (name[:1] == "-" and f"-{name}" in known)
            )
            if is_option and name not in known:
                self.unknown(word)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        message = _in_words(message)
        word = re.match(r"argument [A-Z]+: invalid choice: '(.*?)'", message)
        if word is not None:
            message = f"unknown command {word[1]!r}: {self._command_meant(word[1])}"
            if word[1].endswith(".onnx") and "optimize" in self.commands:
                message = f"a command stands in front of a file, such as: {self.prog} optimize {word[1]} -o fused.onnx"
        see = " See" if message.endswith("?") else "; see"
        self.exit(BAD_INPUT, f"fa-compiler: error: {message}{see} '{self.prog} --help'\n")


def _is_start(short: str, word: str) -> bool:
    """Is a word the beginning of another one, of more than two letters?"""
    return len(short) > 2 and word.startswith(short)


def _in_words(message: str) -> str:
    """What argparse says of a value, without the names of Python's types."""
    kinds = {"int": "a whole number", "float": "a number"}
    message = re.sub(
        r"argument (\S+): invalid (int|float) value: ('.*')",
        lambda found: f"argument {found[1]}: {found[3]} is not {kinds[found[2]]}",
        message,
    )
    return re.sub(
        r"argument (\S+): expected one argument", r"argument \1 needs a value behind it", message
    )


def parser() -> _Parser:
    """The parser of the whole command line.

    Each command sets `run` to the function of this package that runs it, as "module.function". A
    module is imported only when its command runs, so --help and --version answer at once.
    """
    top = _Parser(
        prog="fa-compiler",
        description="Fuses the attention of ONNX models into FlashAttentionScore.",
        epilog=EXIT_CODES,
        formatter_class=_Help,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"fa-compiler {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    top.commands = commands.choices
    _add_optimize(commands)
    _add_inspect(commands)
    _add_verify(commands)
    _add_bench(commands)
    _add_run(commands)
    _add_shard(commands)
    _add_plan(commands)
    _add_registry(commands)
    _add_atc(commands)
    _add_air(commands)
    _add_single_op(commands)
    _add_library(commands)
    _add_docs(commands)
    _add_completion(commands)
    return top


if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[_Parser]


def _command(
    commands: _Commands, name: str, text: str, examples: str = "", ends: str = _ends()
) -> _Parser:
    command = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=f"examples:\n{examples}\n{ends}" if examples else ends,
        formatter_class=_Help,
        allow_abbrev=False,
    )
    command.siblings = commands.choices
    return command


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="IN.onnx", type=path, help="the model")


def _add_optimize(commands: _Commands) -> None:
    examples = """\
  fa-compiler optimize model.onnx -o fused.onnx --verify
  fa-compiler optimize model.onnx -o fused.onnx --strict --explain
  fa-compiler optimize decoder.onnx -o fused.onnx --in-place-caches
  fa-compiler optimize model.onnx -o fused.onnx --target ascend --soc-version Ascend910B2
"""
    text = "fuse the attention of a model and write the result"
    command = _command(
        commands, "optimize", text, examples, _ends(f"--verify: the result differs; {_FAULT}")
    )
    _add_model(command)
    command.add_argument(
        "-o",
        "--output",
        metavar="OUT.onnx",
        type=file_place,
        required=True,
        help="the file to write",
    )
    add_options(command, Options)
    _add_pictures(command)
    add_options(command, FileOptions, "bodies")
    command.add_argument(
        "--verify",
        action="store_true",
        help="run both models in ONNX Runtime and compare every output; if one differs, nothing is written",
    )
    add_shared(command, "strict")
    command.add_argument(
        "--report", metavar="FILE.json", type=file_place, help="write the report as JSON"
    )
    command.add_argument(
        "--force", action="store_true", help="allow OUT.onnx to be IN.onnx, which is then replaced"
    )
    add_options(command, FileOptions, "weights")
    add_shared(command, "quiet")
    command.set_defaults(run="models.optimize")


def _add_inspect(commands: _Commands) -> None:
    examples = """\
  fa-compiler inspect model.onnx
  fa-compiler inspect model.onnx --explain
  fa-compiler inspect model.onnx --json | jq .summary
"""
    text = "tell what would be fused, and why the rest would not; write nothing"
    command = _command(commands, "inspect", text, examples)
    _add_model(command)
    add_options(command, Options)
    _add_pictures(command)
    command.add_argument("--json", action="store_true", help="print the report as JSON")
    command.add_argument("--quiet", action="store_true", help="show no progress")
    command.set_defaults(run="models.inspect")


def _add_pictures(command: argparse.ArgumentParser) -> None:
    add_shared(command, "explain")
    command.add_argument(
        "--html",
        metavar="PAGE.html",
        type=file_place,
        help="write a page with a drawing of each kind of attention",
    )
    command.add_argument(
        "--graph", metavar="OUT.svg", type=file_place, help="write these drawings as one picture"
    )


def _add_verify(commands: _Commands) -> None:
    examples = """\
  fa-compiler verify model.onnx fused.onnx
  fa-compiler verify model.onnx fused.onnx --inputs inputs.npz --rtol 1e-4
"""
    text = "run two models in ONNX Runtime and compare every output"
    command = _command(commands, "verify", text, examples, _ends("an output differs", writes=""))
    command.add_argument(
        "original",
        metavar="A.onnx",
        type=path,
        help="the original; it runs without ONNX Runtime's optimisations",
    )
    command.add_argument("other", metavar="B.onnx", type=path, help="the model to compare with it")
    command.add_argument(
        "--inputs", metavar="X.npz", type=path, help="the inputs by name (default: random ones)"
    )
    command.add_argument(
        "--rtol",
        metavar="NUMBER",
        type=reading(non_negative),
        help="the allowed difference, relative to an output's largest finite value (default by the coarsest type in "
        "the models: float32 1e-5, float16 2e-3, bfloat16 1.6e-2)",
    )
    command.add_argument(
        "--shared-caches",
        action="store_true",
        help="bind each past of a GroupQueryAttention and its present together, as --assume shared-caches does",
    )
    add_options(command, Options, "assume")
    add_shared(command, "quiet")
    command.set_defaults(run="models.verify")


def _add_bench(commands: _Commands) -> None:
    examples = """\
  fa-compiler bench model.onnx
  fa-compiler bench model.onnx --lengths 512,2048,8192 --threads 1
  fa-compiler bench model.onnx --html gain.html
  fa-compiler bench decoder.onnx --decode --in-place-caches    # a prompt, then tokens behind 512, 2048, 8192 keys
"""
    text = "measure a model and its fused form beside each other in ONNX Runtime"
    command = _command(
        commands, "bench", text, examples, _ends("--decode: the outputs of the two models differ")
    )
    _add_model(command)
    add_options(command, BenchOptions)
    add_options(command, Options, "assume", "in_place_caches")
    command.add_argument("--json", action="store_true", help="print the figures as JSON")
    command.add_argument(
        "--html", metavar="PAGE.html", type=file_place, help="write a page with the figures as bars"
    )
    command.add_argument("--quiet", action="store_true", help="show no progress")
    command.set_defaults(run="bench.run")


def _add_run(commands: _Commands) -> None:
    examples = """\
  fa-compiler run model.onnx
  fa-compiler run model.onnx --inputs x.npz --outputs y.npz
  mpirun -n 4 fa-compiler run out/model.onnx --inputs x.npz --outputs y.npz    # a model of `shard`
  mpirun -n 4 fa-compiler run out/model.onnx --inputs x2.npz --caches y1.npz --outputs y2.npz --parts    # decoding
"""
    text = "run a model in ONNX Runtime, and write its outputs; the model may be fused or sharded"
    command = _command(commands, "run", text, examples)
    _add_model(command)
    command.add_argument(
        "--inputs",
        metavar="X.npz",
        type=path,
        help="the inputs by name (default: random ones, as verify makes them)",
    )
    command.add_argument(
        "--outputs",
        metavar="Y.npz",
        type=file_place,
        help="where the outputs are written (default: only their shapes are shown)",
    )
    command.add_argument(
        "--threads",
        metavar="N",
        type=int,
        default=0,
        help="threads of ONNX Runtime, at most one for each core (default: so many; the ranks of one machine share its "
        "cores equally)",
    )
    add_shared(command, "quiet")
    command.add_argument(
        "--parts",
        action="store_true",
        help="for a sharded model: each rank writes its part of the outputs, and the positions of its tokens, to a "
        "file of its own, such as Y.0-of-4.npz",
    )
    command.add_argument(
        "--caches",
        metavar="Y.npz",
        type=path,
        help="for a sharded model with caches: continue with the caches that an earlier run with --parts wrote to "
        "Y.0-of-4.npz and so on; X.npz then holds the other inputs",
    )
    command.add_argument(
        "--timeout",
        metavar="S",
        type=reading(non_negative),
        default=600.0,
        help="for a sharded model: how many seconds a rank waits for another one (default 600)",
    )
    command.set_defaults(run="run.run")


def _add_shard(commands: _Commands) -> None:
    examples = """\
  fa-compiler shard model.onnx -o out --sequence-parallel 4
  fa-compiler shard model.onnx -o out --sequence-parallel 4 --method ring --sequence-axis input_ids:1
  fa-compiler shard decoder.onnx -o prompt --sequence-parallel 4 --prompt
  fa-compiler shard decoder.onnx -o steps --sequence-parallel 4
  mpirun -n 4 fa-compiler run out/model.onnx --inputs x.npz --outputs y.npz
"""
    text = (
        "fuse a model, and write the model that several ranks run, each on its part of the sequence"
    )
    command = _command(commands, "shard", text, examples, _ends(writes=_FOLDER_TEXT))
    _add_model(command)
    command.add_argument(
        "-o", "--output", metavar="DIR", type=path, required=True, help="a new or empty folder"
    )
    add_options(command, ParallelOptions)
    add_options(command, Machine)
    add_options(command, Options, "assume")
    command.add_argument("--json", action="store_true", help="print the report as JSON")
    add_shared(command, "quiet")
    command.set_defaults(run="shard.shard")


def _add_plan(commands: _Commands) -> None:
    examples = """\
  fa-compiler plan model.onnx -o model.plan
  FA_COMPILER_PLAN=model.plan ./server    # a program without Python that has the library as execution provider
"""
    text = "write down what the execution provider does with a model, for programs without Python"
    command = _command(commands, "plan", text, examples, _ends(_FAULT))
    _add_model(command)
    command.add_argument(
        "-o",
        "--output",
        metavar="OUT.plan",
        type=file_place,
        required=True,
        help="the file to write",
    )
    level = command.add_argument(
        "--level",
        metavar="all|extended|basic|disabled",
        default="all",
        help="the optimisation level of the program's sessions (default all, as in ONNX Runtime)",
    )
    completed(level, ("all", "extended", "basic", "disabled"))
    add_options(command, Options, "assume")
    add_shared(command, "strict", "explain", "quiet")
    command.set_defaults(run="models.plan")


def _add_registry(commands: _Commands) -> None:
    examples = """\
  fa-compiler registry list
  fa-compiler registry show FlashAttentionScore --cann 8.0
  fa-compiler registry diff $ASCEND_HOME_PATH/opp/built-in/op_proto/inc
"""
    ends, found = _ends(writes=""), _ends("diff: a difference was found that matters", writes="")
    text = (
        "show what is known of Ascend's operators, and of the attention operators of other runtimes"
    )
    registry = _command(commands, "registry", text, examples, found)
    actions = registry.add_subparsers(dest="action", required=True, metavar="ACTION")
    registry.commands = actions.choices
    listing = _command(actions, "list", "list the operators", ends=ends)
    listing.set_defaults(run="registry.show_list")
    show = _command(
        actions, "show", "print an operator's REG_OP prototype and its constraints", ends=ends
    )
    show.add_argument(
        "op", metavar="OP", help="the name of the operator; `registry list` has all names"
    )
    show.add_argument("--cann", metavar="V", help="CANN version or variant (default: the newest)")
    show.set_defaults(run="registry.show_op")
    text = "print which attention operators of ONNX and ONNX Runtime each runtime has kernels for"
    table = _command(actions, "runtimes", text, ends=ends)
    table.set_defaults(run="registry.show_runtimes")
    diff = _command(
        actions,
        "diff",
        "compare the REG_OP headers of an installed CANN with the registry",
        ends=found,
    )
    diff.add_argument(
        "paths", metavar="PATH", type=path, nargs="+", help="a header, or a folder of headers"
    )
    diff.add_argument(
        "--cann", metavar="V", help="CANN version to compare with (default: the newest)"
    )
    diff.set_defaults(run="registry.diff")


def _add_atc(commands: _Commands) -> None:
    examples = """\
  fa-compiler atc model.onnx -o folder --soc-version Ascend910B2
  fa-compiler atc model.onnx -o folder --soc-version Ascend910B2 --input-shape "input_ids:1,128;attention_mask:1,128"
  fa-compiler atc model.onnx -o folder --soc-version Ascend910B2 --input-shape "input_ids:1,4096" --sequence-parallel 4
"""
    text = "optimise a model for an Ascend product and write a folder that ATC compiles"
    command = _command(commands, "atc", text, examples, _ends(writes=_FOLDER_TEXT))
    _add_model(command)
    command.add_argument("-o", "--output", metavar="DIR", type=path, required=True, help=FOLDER)
    add_options(command, Request)
    add_options(command, Parallel)
    add_options(command, Options, "assume")
    add_shared(command, "explain", "quiet")
    command.set_defaults(run="atc.atc")


def _add_air(commands: _Commands) -> None:
    examples = """\
  fa-compiler air check out/model.air
  fa-compiler air show out/model.air --graph out.svg
"""
    text = "check or show the files that `atc` writes, and other .air files"
    air = _command(commands, "air", text, examples, _ends("check: the file has a fault"))
    actions = air.add_subparsers(dest="action", required=True, metavar="ACTION")
    air.commands = actions.choices
    text = "apply the rules of GE's loader, the prototypes and shape inference to a file"
    check = _command(actions, "check", text, ends=_ends("the file has a fault", writes=""))
    check.add_argument(
        "file", metavar="FILE", type=path, help="an .air file, or an .onnx file for ATC's parser"
    )
    check.add_argument(
        "--plugin-domain",
        action="append",
        default=[],
        metavar="D",
        help="a domain of ONNX operators for which you have a plugin of ATC's parser; may be repeated",
    )
    text = "print a row for each operator, also where the same is found at several"
    check.add_argument("--each", action="store_true", help=text)
    check.set_defaults(run="atc.air_check")
    show = _command(actions, "show", "list a file's operators, or draw its graph")
    show.add_argument("file", metavar="FILE.air", type=path, help="the file")
    show.add_argument(
        "--graph", metavar="OUT.svg|OUT.dot", type=file_place, help="draw the graph instead"
    )
    show.set_defaults(run="atc.air_show")


def _add_single_op(commands: _Commands) -> None:
    examples = """\
  fa-compiler single-op GeluV2 -o gelu.json --soc-version Ascend910B2 --input x=2,1024:float16
  fa-compiler single-op --check gelu.json
"""
    text = "write or check the JSON file of one operator for atc --singleop"
    command = _command(
        commands, "single-op", text, examples, _ends("--check: the file has a fault")
    )
    command.add_argument("op", metavar="OP", nargs="?", help="the name of an operator of GE")
    descriptions = {
        "input": ("NAME=1,12,512,64:float16", "the shape and type of an input; may be repeated"),
        "output-desc": (
            "NAME=1,512:float16",
            "those of an output, if they do not follow from the inputs",
        ),
        "attr": ("NAME=VALUE", "an attribute; may be repeated"),
        "const": ("NAME=1,2,3", "the values of an input that is a constant; may be repeated"),
    }
    for name, (form, told) in descriptions.items():
        command.add_argument(f"--{name}", metavar=form, action="append", default=[], help=told)
    command.add_argument(
        "--soc-version", metavar="S", help="check the operator's constraints on this product, too"
    )
    command.add_argument(
        "--cann", metavar="V", help="CANN version to write for (default: the newest)"
    )
    command.add_argument(
        "-o", "--output", metavar="FILE.json", type=file_place, help="the file to write"
    )
    command.add_argument(
        "--check", metavar="FILE.json", type=path, help="check a file instead of writing one"
    )
    command.set_defaults(run="atc.single_op")


def _add_library(commands: _Commands) -> None:
    text = "print the path of the custom-op library that ONNX Runtime loads"
    command = _command(commands, "library", text, ends=_ends(writes=""))
    command.set_defaults(run="models.library")


def _add_docs(commands: _Commands) -> None:
    examples = """\
  fa-compiler docs                        # lists the pages
  fa-compiler docs runtimes               # prints one; as Markdown if the output is a pipe
  fa-compiler docs commands#exit-codes    # prints the part below a heading
"""
    text = "list the pages of the documentation, or print one"
    command = _command(commands, "docs", text, examples, _ends(writes=""))
    told = "the name of a page, or PAGE#HEADING for a part of it; without it the pages are listed"
    completed(command.add_argument("page", metavar="PAGE", nargs="?", help=told), names())
    command.set_defaults(run="docs.docs")


def _add_completion(commands: _Commands) -> None:
    examples = """\
  eval "$(fa-compiler completion bash)"              # in ~/.bashrc; the same with zsh in ~/.zshrc
  fa-compiler completion fish | source               # in ~/.config/fish/config.fish
"""
    text = "print what bash, zsh or fish needs to complete the words of this command; needs the package argcomplete"
    command = _command(commands, "completion", text, examples, _ends(writes=""))
    completed(command.add_argument("shell", metavar="bash|zsh|fish", help="the shell"), SHELLS)
    command.set_defaults(run="completion.script")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (the process's own by default) and return its exit code."""
    # what it warns about is refused, repaired or kept
    logging.getLogger("onnx_ir").addHandler(_SILENT)
    if argv is None:
        interrupts.raise_in_run()
        _open_streams()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError):
                stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        return _run(argv)
    except KeyboardInterrupt:
        return _fail(interrupts.MESSAGE, INTERRUPTED)
    except BrokenPipeError:
        with Path(os.devnull).open("w") as nowhere, contextlib.suppress(OSError, ValueError):
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return PIPE_CLOSED


def _open_streams() -> None:
    """Put the null device in the place of streams that the caller has closed. Otherwise the files
    that are opened next have their numbers, and a library that prints would write into a model."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115 - it stays open as long as the process


def _run(argv: Sequence[str] | None) -> int:
    try:
        top = parser()
        if COMPLETING in os.environ:
            with contextlib.suppress(ImportError):
                complete(top)
        if argv == [] or (argv is None and len(sys.argv) == 1):
            top.print_help(sys.stderr)
            return BAD_INPUT
        args, others = top.parse_known_args(argv)
        if others:
            command = top.commands[args.command]
            command.commands.get(getattr(args, "action", ""), command).unknown(others[0])
        args.words = sys.argv[1:] if argv is None else list(argv)  # a page tells how it was made
        module, _, function = args.run.partition(".")
        with _text_beside(args):
            code = int(
                getattr(importlib.import_module(f"fa_compiler.command_line.{module}"), function)(
                    args
                )
            )
        sys.stdout.flush()
        return code
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else OK
    except BrokenPipeError:
        raise
    except Exception as error:
        if interrupts.arrived():
            raise KeyboardInterrupt from error
        if _is_closed_pipe(error):
            raise BrokenPipeError from error
        return _report(error)


def _is_closed_pipe(error: Exception) -> bool:
    """Is this what Windows says where the reader of a stream has gone? It calls the argument of the
    write invalid."""
    is_invalid = (
        isinstance(error, OSError) and error.errno == errno.EINVAL and error.filename is None
    )
    return sys.platform == "win32" and is_invalid


def _report(error: Exception) -> int:
    """Print the line of an error, and return the exit code."""
    if isinstance(error, OSError) and error.filename is None and error.errno in FULL:
        # errors of files name them
        return _fail(f"standard output cannot be written: {error.strerror}", BAD_INPUT)
    if isinstance(error, (InputError, RegistryError, OSError)):
        return _fail(flags_only(one_line(error)), BAD_INPUT)
    if isinstance(error, MemoryError):
        return _fail("not enough memory", BAD_INPUT)
    if os.environ.get(DEBUG):
        traceback.print_exception(error)
    report = (
        f"this is a fault of fa-compiler; please report it with the output of a run with {DEBUG}=1"
    )
    return _fail(f"internal error: {type(error).__name__}: {one_line(error)}; {report}", INTERNAL)


def _text_beside(args: argparse.Namespace) -> contextlib.AbstractContextManager[object]:
    """Send the text of the run to standard error, if one of its files goes to standard output."""
    files = (getattr(args, name, None) for name in _FILES)
    if any(file is not None and is_stream(file, sys.stdout) for file in files):
        return contextlib.redirect_stdout(sys.stderr)
    return contextlib.nullcontext()


def _fail(message: str, code: int) -> int:
    with contextlib.suppress(OSError):
        print(f"fa-compiler: error: {printable(message)}", file=sys.stderr)
    return code
