"""The options of `optimize`: from the values that users give to the record that the steps read.

`fa_compiler.passes.answer.options` has the options of the fusion, and says how one is added.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Unpack, get_args

from fa_compiler.errors import InputError
from fa_compiler.passes import Options
from fa_compiler.passes.answer.option import read_options, told
from fa_compiler.passes.answer.options import FusionKeywords, Target
from fa_compiler.pipeline.keywords import check_types, names_of_python

Weights = Literal["copy", "keep"]
"""What happens to external weights if the result is written to another folder."""


@dataclass(frozen=True)
class FileOptions(Options):
    """The options of the fusion, and those of a file that is written."""

    bodies: bool = field(
        default=True,
        kw_only=True,
        metadata=told(
            in_python="give the fused nodes their computation in standard operators, too, as functions of the model",
            details="ONNX Runtime without the custom-op library and other tools run these. Without bodies the file "
            'needs the library everywhere. It goes with the target "ort".',
            negated="leave out the fused nodes' computation in standard operators: the file then needs the library "
            "everywhere",
        ),
    )
    weights: Weights = field(
        default="copy",
        kw_only=True,
        metadata=told(
            "what happens to external weights if OUT.onnx is in another folder: copy them beside it (default), or keep "
            "them where they are, which must be below its folder",
            in_python="what happens to external weights if `output` is not in the model's folder: copy them into one "
            "file beside it, or keep them where they are, which must be below the output's folder",
            choices=get_args(Weights),
        ),
    )

    @property
    def keeps_weights(self) -> bool:
        """Do external weights stay where they are?"""
        return self.weights == "keep"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights not in (known := get_args(Weights)):
            raise ValueError(
                f"unknown value {self.weights!r} for the weights: use {' or '.join(map(repr, known))}"
            )
        if not self.bodies and self.target != "ort":
            raise ValueError("--no-bodies needs --target ort, the default")


class PassKeywords(FusionKeywords, total=False):
    """The options of a fusion in memory, as keywords of a function."""

    bodies: bool


class FileKeywords(PassKeywords, total=False):
    """The options of `FileOptions` besides the target as keywords of a function."""

    weights: Weights


def make_options(target: str = Options.target, **given: Unpack[FileKeywords]) -> FileOptions:
    """The options from the values that users give.

    Raises:
        InputError: an option has an unknown value, or cannot be used with the target.
    """
    others = {word for word in get_args(Target) if word != "ascend"}
    if target in others and (given.get("soc_version") is not None or given.get("cann") is not None):
        raise InputError("a SoC version and a CANN version need --target ascend")
    try:
        return FileOptions(target, **read_options(given, FileOptions))  # type: ignore[arg-type]  # FileOptions checks it
    except ValueError as error:
        raise InputError(str(error)) from None


def python_options(target: str = Options.target, **given: Unpack[FileKeywords]) -> FileOptions:
    """`make_options` for the values that a caller of a Python function gives: errors name the
    keywords.

    Raises:
        InputError: an option has an unknown value, or cannot be used with the target.
        TypeError: a value is of another type than the option.
    """
    check_types(FileKeywords, given)
    if not isinstance(target, str):
        raise TypeError(f"`target` is a text, not {target!r}")
    with names_of_python(FileOptions):
        return make_options(target, **given)
