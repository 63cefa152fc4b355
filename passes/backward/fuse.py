"""An attention and its gradient, fused at once or not at all."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.attention import Matcher
from fa_compiler.passes.backward.emit import OP, Backward
from fa_compiler.passes.backward.match import Pair, PairDecline, match_pair
from fa_compiler.passes.decline import Decline
from fa_compiler.passes.emit import Emitter, Fused
from fa_compiler.passes.report import Code
from fa_compiler.passes.softmax import SoftmaxAnchor


@dataclass(frozen=True)
class FusedPair:
    """What was matched and built, for the report; `node` is the gradient."""

    match: Pair
    fused: Fused
    node: ir.Node


def fuse_pair(anchor: SoftmaxAnchor, matcher: Matcher, emitter: Emitter) -> FusedPair | None:
    """Fuse the attention around an anchor with its gradient; None when there is no gradient.

    Raises PairDecline, before any use is changed, when there is one that cannot be fused.
    """
    pair = match_pair(anchor, matcher)
    if pair is None:
        return None
    try:
        if not matcher.options.has_gradients:
            raise Decline(Code.TRAINING, f"the library for ONNX Runtime has no {OP} yet", pair.backward.node)
        backward = Backward(pair.backward, emitter)
        fused = emitter.emit(pair.forward, backward)
    except Decline as decline:
        raise PairDecline.about(pair.backward.node, decline) from decline
    return FusedPair(pair, fused, backward.nodes[-1])
