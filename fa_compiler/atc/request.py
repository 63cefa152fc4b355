"""What a user asks `atc` for: the options, and how their texts are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict, Unpack

from fa_compiler.atc.sizes import Size, Sizes, parse_gears, parse_shapes
from fa_compiler.errors import InputError
from fa_compiler.op_registry.collectives import METHODS
from fa_compiler.op_registry.errors import UnknownProduct
from fa_compiler.op_registry.soc import SocVersion, soc_version
from fa_compiler.passes.answer.option import options_of, read_options, told
from fa_compiler.passes.answer.options import ALL_WEIGHTS, ALONE, ATTENTION_ONLY, JOINED, words_of
from fa_compiler.passes.parallel.options import AUTO, AXES


def _shapes(given: str | Mapping[str, Sequence[int]]) -> Sizes:
    if not isinstance(given, str):
        if single := [sizes for sizes in given.values() if not isinstance(sizes, Sequence)]:
            raise InputError(
                f"the sizes of an input are a list such as (1, 128), not {single[0]!r}"
            )
        given = ";".join(f"{name}:{','.join(map(str, sizes))}" for name, sizes in given.items())
    return parse_shapes(given)


def _gears(given: str | Sequence[Sequence[int]] | None) -> tuple[tuple[int, ...], ...]:
    if given is None:
        return ()
    if not isinstance(given, str):
        if single := [
            group for group in given if isinstance(group, str) or not isinstance(group, Sequence)
        ]:
            raise InputError(
                f"a group of --dynamic-dims is a list such as (1, 128), not {single[0]!r}"
            )
        given = ";".join(",".join(map(str, group)) for group in given)
    return parse_gears(given)


@dataclass(frozen=True)
class Parallel:
    """One sequence on several ranks: their number, the method of each attention or "auto", and the
    dimension of inputs that is the sequence (empty: as in the attentions)."""

    ranks: int = field(
        metadata=told(
            "write a model for each of N ranks, which divide the sequence",
            in_python="the number of ranks that divide the sequence; the folder then has a model for each of them",
            name="sequence_parallel",
            metavar="N",
            default=None,
            kind=int,
        )
    )
    method: str = field(
        default=AUTO,
        metadata=told(
            "how the ranks compute attention (default: the cheapest for each attention)",
            choices=(AUTO, *METHODS),
        ),
    )
    axes: Mapping[str, int] = field(default_factory=dict, metadata=AXES)


@dataclass(frozen=True)
class Request:
    """What the user asked for. The texts at the fields tell users what an option does.

    `sizes` are the sizes of inputs by name, `gears` the groups of --dynamic_dims. With `parallel`,
    each of several ranks gets a model.
    """

    soc: SocVersion = field(
        metadata=told(
            "the product, as ATC names it, such as Ascend910B2",
            name="soc_version",
            metavar="S",
            read=soc_version,
        )
    )
    cann: str | None = field(
        default=None, metadata=told("CANN version to write for (default: the newest)", metavar="V")
    )
    route: str = field(
        default="air",
        metadata=told(
            "what is written: air (default), onnx or npu (fa-compiler docs ascend)", metavar="R"
        ),
    )
    sizes: Mapping[str, Sequence[Size]] = field(
        default_factory=dict,
        metadata=told(
            "the sizes of the inputs; 1~512 is a range, and -1 any size",
            in_python='the sizes of inputs, {"ids": (1, 128)} or "ids:1,128"; -1 is dynamic, and ranges such as 1~512 '
            "can be given as text only",
            name="input_shape",
            metavar="NAME:1,128;...",
            default="",
            read=_shapes,
        ),
    )
    gears: Sequence[Sequence[int]] = field(
        default=(),
        metadata=told(
            "groups of sizes, with one size for each -1 of --input-shape; a run has the sizes of one group",
            in_python="groups of sizes, with one size for each -1 of `input_shape`; a run has the sizes of one group",
            details='They are given as [(1, 128), (4, 256)] or as "1,128;4,256".',
            name="dynamic_dims",
            metavar="1,128;...",
            default=None,
            read=_gears,
        ),
    )
    precision: str = field(
        default="origin", metadata=told("ATC's precision_mode_v2 (default origin)", metavar="P")
    )
    single_op: bool = field(
        default=False, metadata=told("write a JSON file for each distinct fused operator, too")
    )
    only: str | None = field(
        default=None,
        metadata=told(
            ALONE,
            details='It is "attention" or None. Several ranks always do so.',
            metavar=ATTENTION_ONLY,
            completed=(ATTENTION_ONLY,),
        ),
    )
    join_weights: str = field(
        default=ALL_WEIGHTS,
        metadata=told(
            "products that share an operand become one, with joined weights. Joined are all weights (default), those "
            "in the model's own file (own), or none",
            details="Several ranks join none.",
            choices=JOINED,
        ),
    )
    assume: Sequence[str] = ()
    parallel: Parallel | None = None


class AtcKeywords(TypedDict, total=False):
    """The options of `atc` besides the SoC version as keywords of a function, with the types that
    users give."""

    cann: str | None
    route: str
    input_shape: str | Mapping[str, Sequence[int]]
    dynamic_dims: str | Sequence[Sequence[int]] | None
    precision: str
    single_op: bool
    only: str | None
    join_weights: str
    sequence_parallel: int | None
    method: str
    axes: Mapping[str, int] | None
    assume: Iterable[str]


def request_of(soc_version: str, **given: Unpack[AtcKeywords]) -> Request:
    """The request from the values that users give.

    Raises:
        InputError: the SoC version is unknown, a text does not have the form of its option, or an
            option for several ranks is given without their number.
    """
    values: dict[str, Any] = {"soc_version": soc_version, **given}
    assume = values.pop("assume", ())
    parallel = _parallel(
        {name: values.pop(name) for name in options_of(Parallel) if name in values}
    )
    try:
        read = read_options(values, Request)
    except UnknownProduct as error:
        raise InputError(str(error)) from None
    return Request(**read, assume=words_of(assume), parallel=parallel)


def _parallel(given: Mapping[str, Any]) -> Parallel | None:
    """What is asked for several ranks; None without a number of ranks."""
    read = read_options(given, Parallel)
    if read.get("ranks") is not None:
        return Parallel(**read)
    if read.get("method", AUTO) != AUTO or read.get("axes"):
        raise InputError("--method and --sequence-axis go with --sequence-parallel")
    return None
