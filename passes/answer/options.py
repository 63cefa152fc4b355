"""The options of a run: the target, its product, and the assumptions that the user vouches for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypedDict, get_args

from fa_compiler import op_registry
from fa_compiler.op_registry.errors import suggestion
from fa_compiler.op_registry.products import product
from fa_compiler.op_registry.runtimes import ALSO_CALLED, RUNTIMES, Runtime, target_for
from fa_compiler.op_registry.soc import check_name
from fa_compiler.passes.answer.option import told

Target = Literal["ort", "ascend", "onnx", "contrib"]

NO_EMPTY_ROWS = "no-empty-rows"
MASKS_DOMINATE = "masks-dominate"
BINARY_MASKS = "binary-masks"
BOUNDED_SCORES = "bounded-scores"
SAME_SIZES = "same-sizes"
UNBROKEN = "unbroken-sequences"
CLOSE_RANKS = "close-ranks"
FINITE_SCORES = "finite-scores"
NON_FINITE_SCORES = "non-finite-scores"
HALF_ATTENTION = "half-attention"
ANY_LENGTH = "any-length"
UNIT_INPUTS = "unit-inputs"
SLOW_DECAY = "slow-decay"
DROP_ROUNDINGS = "drop-activation-quantisation"
LOSS_FLOOR = "loss-floor"
EMPTY_BIAS = "empty-bias"
DECODE = "decode"
SEPARATE_CACHES = "separate-caches"
SHARED_CACHES = "shared-caches"
ASSUMPTIONS = {
    DECODE: "every run decodes one token: where the number of queries is open it is 1",
    NO_EMPTY_ROWS: "no query row is masked everywhere",
    MASKS_DOMINATE: "a mask constant such as -1e4 or -65504 outweighs every score",
    BINARY_MASKS: "every attention mask that is given to the model holds only 0 and 1",
    BOUNDED_SCORES: "scores lie between -40 and 40, so that no exponential overflows or is lost beside another",
    SAME_SIZES: "a mask is as large as the scores, except along dimensions that are 1 in every run",
    UNBROKEN: "tokens of one packed sequence are neighbours: no label comes back after another",
    CLOSE_RANKS: "of keys whose index scores differ by no more than rounding, either may be selected",
    DROP_ROUNDINGS: "scores and probabilities need not be rounded to the integers of a quantised model",
    LOSS_FLOOR: "in the loss of an indexer, probabilities below 1e-8 may count as 1e-8",
    EMPTY_BIAS: "the device takes a bias of no elements for none (route npu of `fa-compiler atc`)",
    SEPARATE_CACHES: "past and present of a GroupQueryAttention are buffers of their own, as in every Session.run",
    SHARED_CACHES: "past and present of a GroupQueryAttention are one buffer, bound as input and as output",
    FINITE_SCORES: "query, key and value are finite, and so are the states and decays of linear attention: a NaN guard "
    "has no work, a difference or sum of probabilities times values becomes that of two products, and a state that a "
    "Where resets is multiplied by 0 (assumed for every target but ort)",
    NON_FINITE_SCORES: "query, key or value may be NaN or infinite, or a state or decay of linear attention: for every "
    "target but ort, a NaN guard, a difference or sum of probabilities, or a Where that resets a state, is a reason to "
    "decline",
    ANY_LENGTH: "a linear attention that was exported with a fixed number of chunks is meant for every length",
    HALF_ATTENTION: "attention may be computed in float16, where the product has no operator for float32, and linear "
    "attention in bfloat16",
    UNIT_INPUTS: "in linear attention query and key lie between -1 and 1, beta between 0 and 1, and no log decay is "
    "above 0",
    SLOW_DECAY: "in linear attention no log decay is below -1: from token to token a state keeps more than a third",
}
"""The words that `--assume` takes, and the sentence that each of them stands for."""
FINITE_SCORES_HINT = f"--assume {FINITE_SCORES} if query, key and value are finite"
FINITE_STATES_HINT = f"--assume {FINITE_SCORES} if query, key, value, state and decay are finite"
NO_EMPTY_ROWS_HINT = f"--assume {NO_EMPTY_ROWS} if no query row is masked everywhere"
"""What the user can do where only what a fully masked row gives stands in the way."""
ONE_TOKEN_HINT = f"--assume {DECODE} if every run decodes one token"
"""What the user can do where only runs of several tokens stand in the way."""
ALONE = "fuse attention alone: leave the norms, gated products and rotary positions around it"
"""What `only` does, in all commands that have it."""

ATTENTION_SINCE, NEWEST_OPSET = 23, 28
"""The first opset with ONNX's Attention, and the newest opset whose operators are known here. An
operator of a newer opset may mean something else. The rows of the table in
lowering/ascend/onnx_route/changes.py reach as far."""

ATTENTION_ONLY = "attention"
"""What `only` may be."""

OWN_WEIGHTS, ALL_WEIGHTS, NO_WEIGHTS = JOINED = ("own", "all", "none")
"""What `join_weights` may be: the weights in the model's own file, those in files beside it, too,
or none."""

DEFAULT_PRODUCT = "A2"
"""The Ascend product that a result is verified for when the user names none."""

PRODUCTS_WITHOUT_BANDS = ("310P",)
"""Products whose PromptFlashAttention has no bands."""


def _split(groups: Iterable[str]) -> list[str]:
    words = (word.strip() for group in groups for word in group.split(","))
    return [word for word in words if word]


def words_of(assume: Iterable[str]) -> tuple[str, ...]:
    """The words of assumptions, of which one may stand alone. Raises TypeError for what is no list
    of texts."""
    words = (assume,) if isinstance(assume, str) else assume
    if not isinstance(words, Iterable):
        raise TypeError(f"`assume` is a list, not {assume!r}")
    words = tuple(words)
    for word in words:
        if not isinstance(word, str):
            raise TypeError(f"`assume` is a list of texts, and {word!r} is none")
    return words


def _word_set(assume: Iterable[str]) -> frozenset[str]:
    return frozenset(words_of(assume))


def _known_soc(name: str | None) -> str | None:
    if name is not None:
        check_name(name)
    return name


def _known_cann(version: str | None) -> str | None:
    if version is not None:
        op_registry.get("FlashAttentionScore", version)
    return version


def _only(word: str | None) -> str | None:
    if word not in (None, ATTENTION_ONLY):
        raise ValueError(f"unknown value {word!r} of --only: use {ATTENTION_ONLY!r}")
    return word


def _runtime(name: str | Runtime | None) -> Runtime | None:
    return Runtime.of(name) if isinstance(name, str) else name


@dataclass(frozen=True)
class Options:
    """Options of one optimisation run. The texts at the fields tell users what an option does.

    A model for the `parser_plugins` that ATC itself has gets only what they write: nothing becomes
    IncreFlashAttention, whose plugin does not work, and around attention
    op_registry/parser_plugins.py says what they read. A model that is to be `divided` along the
    sequence keeps as masks what a rank cannot have: packed sequences, whose ends it does not know,
    and bands that leave out the key of the row itself.

    **Add an option**: a field here, a key in `FusionKeywords` below, and the code that reads the
    field. The tests then name the rows that the docs need. An option that only matters when a file
    is written stands in `FileOptions` (fa_compiler/pipeline/options.py).
    """

    target: Target = field(
        default="ort",
        metadata=told(
            "what attention becomes: our kernels in ONNX Runtime (default), Ascend's operators, ONNX's Attention, or "
            "ONNX Runtime's MultiHeadAttention and GroupQueryAttention",
            choices=get_args(Target),
        ),
    )
    runtime: Runtime | None = field(
        default=None,
        kw_only=True,
        metadata=told(
            "for the targets onnx and contrib: the runtime that will run the result, such as ort-cpu; only what it has "
            "kernels for is fused (fa-compiler docs runtimes). `inspect --runtime all` tells which runtimes could take "
            "each attention",
            details='A release is named as in "ort-cpu=1.27". None for what the operators\' schemas say.',
            metavar="NAME[=VERSION]",
            completed=tuple(RUNTIMES),
            read=_runtime,
        ),
    )
    opset: int = field(
        default=0,
        kw_only=True,
        metadata=told(
            "for the target onnx: the least opset of the result (default 23); an older model is raised to it",
            details="0 for 23, the first with Attention. From 25 on windows become attributes, but no runtime is known "
            "to have a kernel.",
            metavar="N",
        ),
    )
    soc_version: str | None = field(
        default=None,
        metadata=told(
            "for the target ascend: the product whose rules every fused node has to keep, such as Ascend910B2 or A3 "
            "(default A2)",
            metavar="S",
            read=_known_soc,
        ),
    )
    cann: str | None = field(
        default=None,
        metadata=told(
            "for the target ascend: the CANN version whose prototypes are written, such as 8.5.0 (default: the newest)",
            metavar="V",
            read=_known_cann,
        ),
    )
    assume: frozenset[str] = field(
        default=frozenset(),
        metadata=told(
            "an assumption that you vouch for",
            usage=f"; may be repeated, or list several separated by commas. Known are {', '.join(ASSUMPTIONS)}; "
            "`--assume help` says what each means",
            in_python="assumptions that you vouch for",
            details=f"Known are {', '.join(ASSUMPTIONS)}; `fa-compiler optimize --assume help` says what each means.",
            metavar="WHAT",
            meanings=ASSUMPTIONS,
            default=(),
            repeated=True,
            parse=_split,
            read=_word_set,
        ),
    )
    only: str | None = field(
        default=None,
        kw_only=True,
        metadata=told(
            ALONE,
            details='It is "attention" or None, and goes with the targets "ascend", "onnx" and "contrib".',
            metavar=ATTENTION_ONLY,
            completed=(ATTENTION_ONLY,),
            read=_only,
        ),
    )
    join_weights: str = field(
        default=OWN_WEIGHTS,
        kw_only=True,
        metadata=told(
            "for the target ascend: products that share an operand become one, with joined weights. Joined are weights "
            "in the model's own file (own, default), those in files beside it, too (all), or none",
            details="Weights in other files are written anew.",
            choices=JOINED,
        ),
    )
    parser_plugins: bool = field(default=False, kw_only=True)
    in_place_caches: bool = field(
        default=False,
        kw_only=True,
        metadata=told(
            "replace caches that grow by a Concat by preallocated buffers; this changes the model's inputs and outputs",
            details="They then have a capacity, and a new input `cache_length`, int64 [1], is the number of tokens "
            'that they hold. The report\'s `caches` name them. It goes with the target "ort".',
        ),
    )
    divided: bool = field(default=False, kw_only=True)

    @property
    def fuses_around(self) -> bool:
        """Are norms, gated activations and rotary positions around attention fused, too? A rank of
        a divided model keeps them. For ONNX and ONNX Runtime this needs a runtime, because others
        may not know the operators."""
        if self.only is not None or self.divided:
            return False
        return self.target == "ascend" or (self.is_standard and self.runtime is not None)

    @property
    def joins_weights(self) -> bool:
        """May products that share an operand become one?"""
        return self.target == "ascend" and self.fuses_around and self.join_weights != NO_WEIGHTS

    @property
    def takes_scores_as_finite(self) -> bool:
        """Does the user vouch for finite queries, keys and values, or is that taken for granted?"""
        granted = self.target != "ort" and NON_FINITE_SCORES not in self.assume
        return granted or FINITE_SCORES in self.assume

    @property
    def is_standard(self) -> bool:
        """Are the fused operators those of ONNX or ONNX Runtime, and not the registry's?"""
        return self.target in ("onnx", "contrib")

    @property
    def ascend_product(self) -> str:
        """The Ascend product, as it was named or DEFAULT_PRODUCT."""
        return self.soc_version or DEFAULT_PRODUCT

    @property
    def platform(self) -> str:
        """The platform whose rules the registry's operators have to keep: "ort", or the Ascend
        product."""
        return self.ascend_product if self.target == "ascend" else "ort"

    @property
    def needs_dense_mask(self) -> bool:
        """Does the product's operator take sparse_mode 0 only, with every excluded key in the
        mask?"""
        return (
            self.target == "ascend"
            and self.soc_version is not None
            and product(self.soc_version).name in PRODUCTS_WITHOUT_BANDS
        )

    @property
    def _misplaced(self) -> str | None:
        """What an option needs that goes with another target; None where there is no such
        option."""
        around = "--only needs --target ascend, --target onnx or --target contrib: for ort only attention is fused"
        reasons = {
            "caches in place need --target ort, the default": self.in_place_caches
            and self.target != "ort",
            "a runtime needs --target onnx or --target contrib": self.runtime is not None
            and not self.is_standard,
            around: self.only is not None and self.target == "ort",
            "--join-weights needs --target ascend": self.join_weights != OWN_WEIGHTS
            and self.target != "ascend",
            "an opset needs --target onnx": bool(self.opset) and self.target != "onnx",
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def __post_init__(self) -> None:
        if self.target not in (known := get_args(Target)):
            meant = _MEANT.get(self.target.lower(), self.target)
            raise ValueError(
                f"unknown target {self.target!r}{_runtimes_of(meant) or suggestion(meant, known)}"
            )
        unknown = sorted(self.assume - set(ASSUMPTIONS))
        if unknown:
            raise ValueError(
                f"unknown assumption {unknown[0]!r}{suggestion(unknown[0], ASSUMPTIONS)}"
            )
        if self.join_weights not in JOINED:
            raise ValueError(
                f"unknown value {self.join_weights!r} of --join-weights: use one of {', '.join(JOINED)}"
            )
        if (misplaced := self._misplaced) is not None:
            raise ValueError(misplaced)
        if self.opset and not ATTENTION_SINCE <= self.opset <= NEWEST_OPSET:
            raise ValueError(
                f"the opset is {self.opset}; ONNX has Attention from opset {ATTENTION_SINCE} on, and the newest opset "
                f"that is known here is {NEWEST_OPSET}"
            )
        for one, other in ((SEPARATE_CACHES, SHARED_CACHES), (FINITE_SCORES, NON_FINITE_SCORES)):
            if {one, other} <= self.assume:
                raise ValueError(f"{one!r} and {other!r} cannot both hold")


_MEANT = {"cpu": "ort", "npu": "ascend", "cann": "ascend", "atc": "ascend", **ALSO_CALLED}
"""What people call targets and runtimes."""


def _runtimes_of(word: str) -> str:
    """The end of a message about a target that is a runtime, or the processor of one; empty for
    other words."""
    named = [name for name in RUNTIMES if word.lower() in (name, name.removeprefix("ort-"))]
    if not named:
        return ""
    target = target_for(named[0])
    if target is None:
        return (
            f": it is a runtime, {named[0]}, which has kernels of no operator that a target writes"
        )
    return f": it is a runtime, so use --target {target} --runtime {named[0]}"


class FusionKeywords(TypedDict, total=False):
    """The options of `Options` besides the target as keywords of a function, with the types that
    users give."""

    runtime: str | None
    opset: int
    soc_version: str | None
    cann: str | None
    assume: Iterable[str]
    only: str | None
    join_weights: str
    in_place_caches: bool
