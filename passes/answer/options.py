"""The options of a run: the target, its product, and the assumptions that the user vouches for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from fa_compiler.op_registry.products import product
from fa_compiler.op_registry.runtimes import Runtime

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
    FINITE_SCORES: "query, key and value are finite: a NaN guard has no work, and a difference or sum of probabilities "
    "times values becomes that of two products (assumed for every target but ort)",
    NON_FINITE_SCORES: "query, key or value may be NaN or infinite: for every target but ort, a NaN guard, or a "
    "difference or sum of probabilities, is a reason to decline",
    HALF_ATTENTION: "attention may be computed in float16, where the product has no operator for float32",
}
"""The words that `--assume` takes, and the sentence that each of them stands for."""
NO_EMPTY_ROWS_HINT = f"--assume {NO_EMPTY_ROWS} if no query row is masked everywhere"
"""What the user can do where only what a fully masked row gives stands in the way."""

ATTENTION_SINCE, NEWEST_OPSET = 23, 28
"""The first opset with ONNX's Attention, and the newest opset whose operators are known here. An operator of a newer
opset may mean something else."""

DEFAULT_PRODUCT = "A2"
"""The Ascend product that a result is verified for when the user names none."""

PRODUCTS_WITHOUT_BANDS = ("310P",)
"""Products whose PromptFlashAttention has no bands."""


@dataclass(frozen=True)
class Options:
    """Options of one optimisation run.

    `product` is an Ascend product or SoC name ("Ascend910B2") and `cann` a CANN version; both are used only when
    `target` is "ascend". Without `decoding` nothing becomes IncreFlashAttention, because that of ATC's own parser does
    not work. With `in_place_caches`, caches that grow by a Concat become buffers that are written in place; only the
    target "ort" can have them. `runtime` narrows the targets "onnx" and "contrib" to what one runtime takes. `opset` is
    the least opset of the result for the target "onnx"; 0 for the least that has Attention. A model that is to be
    `divided` along the sequence keeps as masks what a rank cannot have: packed sequences, whose ends it does not know,
    and bands that leave out the key of the row itself.
    """

    target: Target = "ort"
    product: str | None = None
    cann: str | None = None
    assume: frozenset[str] = frozenset()
    decoding: bool = True
    in_place_caches: bool = False
    runtime: Runtime | None = None
    opset: int = 0
    divided: bool = False

    @property
    def is_standard(self) -> bool:
        """Are the fused operators those of ONNX or ONNX Runtime, and not the registry's?"""
        return self.target in ("onnx", "contrib")

    @property
    def ascend_product(self) -> str:
        """The Ascend product, as it was named or DEFAULT_PRODUCT."""
        return self.product or DEFAULT_PRODUCT

    @property
    def platform(self) -> str:
        """The platform whose rules the registry's operators have to keep: "ort", or the Ascend product."""
        return self.ascend_product if self.target == "ascend" else "ort"

    @property
    def needs_dense_mask(self) -> bool:
        """Does the product's operator take sparse_mode 0 only, with every excluded key in the mask?"""
        return (
            self.target == "ascend"
            and self.product is not None
            and product(self.product).name in PRODUCTS_WITHOUT_BANDS
        )

    def __post_init__(self) -> None:
        if self.target not in (known := get_args(Target)):
            raise ValueError(f"unknown target {self.target!r}: use {', '.join(map(repr, known[:-1]))} or {known[-1]!r}")
        unknown = self.assume - set(ASSUMPTIONS)
        if unknown:
            words = ", ".join(sorted(ASSUMPTIONS))
            raise ValueError(f"unknown assumption {sorted(unknown)[0]!r}: known are {words}")
        if self.in_place_caches and self.target != "ort":
            raise ValueError("caches in place go with the target 'ort' only")
        if self.runtime is not None and not self.is_standard:
            raise ValueError("a runtime goes with the targets 'onnx' and 'contrib' only")
        if self.opset and self.target != "onnx":
            raise ValueError("an opset goes with the target 'onnx' only")
        if self.opset and not ATTENTION_SINCE <= self.opset <= NEWEST_OPSET:
            raise ValueError(f"the opset is {self.opset}, and not from {ATTENTION_SINCE} to {NEWEST_OPSET}")
        for one, other in ((SEPARATE_CACHES, SHARED_CACHES), (FINITE_SCORES, NON_FINITE_SCORES)):
            if {one, other} <= self.assume:
                raise ValueError(f"{one!r} and {other!r} cannot both hold")
