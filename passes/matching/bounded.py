"""What is sound only while scores are bounded, which is the user's to say:
`--assume bounded-scores`.

    accepted    e / sum(e), e the exponentials of scores from which no maximum was subtracted, in
                float32; with a finite number in masked places also `--assume no-empty-rows`
                probabilities that are masked and divided by what is left of them (renormalised.py),
                in float32
    refused     a total with a lower bound, which the operator does not have; powers of numbers
                above e or below 1, which may overflow all the same; factors not proven 0 or 1

Sound because with scores between -40 and 40 no exponential in float32 overflows, and none is lost
beside another: the softmax is what the operator computes with the maximum subtracted, and what is
left after the mask is the softmax of masked scores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, Axes
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.options import BOUNDED_SCORES, NO_EMPTY_ROWS, NO_EMPTY_ROWS_HINT
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.ir.nodes import is_op, others_of
from fa_compiler.passes.layout.views import Viewer
from fa_compiler.passes.masks.score_ops import AlignedTensor, Select, Term
from fa_compiler.passes.matching.probability_path import RENORMALISED_ADVICE
from fa_compiler.passes.matching.renormalised import Renormalised
from fa_compiler.passes.matching.softmax import SoftmaxAnchor
from fa_compiler.passes.values.facts import Facts

HINT = f"--assume {BOUNDED_SCORES} if no score is below -40 or above 40"


@dataclass(frozen=True)
class BoundedScores:
    """The user's word, and what is checked beside it. Everything here raises Decline."""

    facts: Facts

    def check_exponentials(self, anchor: SoftmaxAnchor) -> None:
        """Decline exponentials without a subtracted maximum, unless the user vouches for bounded
        scores and nothing guards their total."""
        steep = not 0.0 < anchor.log_base <= 1.0
        if not anchor.overflows or (
            BOUNDED_SCORES in self.facts.options.assume and not anchor.floored and not steep
        ):
            return
        reason = "exp(scores) / sum(exp(scores)) overflows for large scores, unlike the operator"
        if is_op(anchor.scores.producer(), "Sub"):
            reason = "exponentials of scores less what is not proven to be their row's maximum may overflow or vanish"
        hint = None if anchor.floored or steep else f"{Code.OVERFLOW.advice}; {HINT}"
        raise Decline(Code.OVERFLOW, reason, anchor.node, hint)

    def check_rows(self, anchor: SoftmaxAnchor, finite: Term | None) -> None:
        """Decline such exponentials if they are not float32, or if a finite mask may make a whole
        row of them 0 (unless no-empty-rows is assumed)."""
        if not anchor.overflows:
            return
        if self.facts.info.dtype(anchor.nodes[0].outputs[0]) != ir.DataType.FLOAT:
            raise Decline(
                Code.DTYPE,
                "exponentials without their maximum that are not float32",
                anchor.nodes[0],
            )
        if finite is not None and NO_EMPTY_ROWS not in self.facts.options.assume:
            reason = "a row masked everywhere by a finite number may be 0 divided by 0 here, but not in the operator"
            hint = NO_EMPTY_ROWS_HINT
            raise Decline(Code.EMPTY_ROWS, reason, finite.node, hint)

    def mask_of(
        self,
        divided: Renormalised,
        kv_seq: Axes,
        viewer: Viewer,
        seen: Mapping[ir.Value, Arrangement],
    ) -> Select[AlignedTensor]:
        """The mask after the softmax as one before it."""
        node = divided.nodes[0]
        if BOUNDED_SCORES not in self.facts.options.assume:
            reason = "the probabilities are masked and divided by what is left of them, which may be rounded to 0"
            raise Decline(Code.PROBABILITY_TERM, reason, node, f"{RENORMALISED_ADVICE}; {HINT}")
        dims = seen[node.outputs[0]]
        if viewer.space.resolve(dims[divided.axis]) != viewer.space.resolve(kv_seq):
            raise Decline(
                Code.PROBABILITY_TERM,
                "the probabilities are divided by sums over another axis",
                node,
            )
        if self.facts.info.dtype(node.outputs[0]) != ir.DataType.FLOAT:
            raise Decline(
                Code.DTYPE, "probabilities that are not float32 are divided by their sums", node
            )
        numbers = self.facts.sets.of(divided.condition)
        if self.facts.info.dtype(divided.condition) != ir.DataType.BOOL and not (
            numbers or {math.nan}
        ) <= {0.0, 1.0}:
            reason = f"the factor {divided.condition.name!r} is not proven to be 0 or 1"
            raise Decline(Code.PROBABILITY_TERM, reason, node)
        aligned = viewer.alignment(divided.condition, dims, node)
        fits = any(
            viewer.info.shape(other) == viewer.info.shape(node.outputs[0])
            for other in others_of(node, divided.condition)
        )
        return Select(
            node, AlignedTensor(divided.condition, aligned, fits), divided.keep, -math.inf
        )
