"""What the steps in front of the matcher put in the places of parts of a graph, and what becomes of
it.

Each of these steps changes the graph in a trial, because only the ordinary matcher can say whether
the attention then matches. What does not match is undone at once. What matches may still be
declined, such as by the target, and is then undone as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from fa_compiler.passes.answer.budget import limited_attempt
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.emit.trial import Change
from fa_compiler.passes.matching.attention import Matcher
from fa_compiler.passes.matching.routes import ONLY, Route
from fa_compiler.passes.matching.softmax import SoftmaxAnchor, anchor_at


@dataclass
class Substitution:
    """A change because of which attentions match. `assumed` is what it rests on."""

    change: Change
    assumed: tuple[str, ...] = ()
    twins: tuple[str, ...] = ()
    """The names of softmaxes that are left out because they are equal to the one that stays."""
    fused: bool = False
    """Is one of its attentions fused already?"""
    undone: bool = False


@dataclass
class Substitutions:
    """The substitutions in one graph, and the reasons why others were not made, by the softmaxes.
    One softmax may have several, from several steps."""

    made: dict[ir.Node, list[Substitution]] = field(default_factory=dict)
    declined: dict[ir.Node, Decline] = field(default_factory=dict)
    _names: dict[str, Substitution] = field(default_factory=dict)
    """What was made for each."""

    def add(self, substitution: Substitution, *softmaxes: ir.Node) -> None:
        """Note a substitution for softmaxes."""
        for node in softmaxes:
            self.made.setdefault(node, []).append(substitution)
        self._names.update(dict.fromkeys(substitution.change.made, substitution))

    def update(self, later: Substitutions) -> None:
        """Take over those of a later step."""
        for node, substitutions in later.made.items():
            self.made.setdefault(node, []).extend(substitutions)
        self.declined.update(later.declined)
        self._names.update(later._names)

    def assumed(self, anchor: SoftmaxAnchor) -> tuple[str, ...]:
        """What the fusion of an attention rests on; it is fused now."""
        substitutions = self.made.get(anchor.node, ())
        for substitution in substitutions:
            substitution.fused = True
        return tuple(word for substitution in substitutions for word in substitution.assumed)

    def twins(self, anchor: SoftmaxAnchor) -> tuple[str, ...]:
        """The names of softmaxes in whose place this one stands."""
        return tuple(
            name for substitution in self.made.get(anchor.node, ()) for name in substitution.twins
        )

    def give_up(self, anchor: SoftmaxAnchor, decline: Decline) -> Decline:
        """Why an attention is not fused; the culprit is a node of the model. Its substitutions are
        undone, but for those of which another attention is fused."""
        culprit = decline.culprit
        maker = None if culprit is None or culprit.name is None else self._names.get(culprit.name)
        if maker is not None and not maker.undone:
            decline = Decline(decline.code, decline.reason, anchor.node, decline.hint or "")
        for substitution in reversed(
            self.made.get(anchor.node, ()) if anchor.node.graph is not None else ()
        ):
            if not substitution.fused and not substitution.undone:
                substitution.change.undo()
                substitution.undone = True
        return self.declined.get(anchor.node, decline)


def is_match(anchor: SoftmaxAnchor, matcher: Matcher, route: Route = ONLY) -> bool:
    """Does the attention around an anchor match?"""
    return not isinstance(
        limited_attempt(anchor.node, lambda: matcher.match(anchor, route)), Decline
    )


def is_match_at(softmax: ir.Node, matcher: Matcher) -> bool:
    """Does the attention around a softmax match, as the graph is now?"""
    anchor = anchor_at(softmax, matcher.facts.info)
    return anchor is not None and is_match(anchor, matcher)
