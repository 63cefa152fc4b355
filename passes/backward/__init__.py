"""The gradient of attention in training graphs: `fuse_pair` finds it from the forward match, and
fuses both."""

from fa_compiler.passes.backward.dense_gradient import OP as GRADIENT
from fa_compiler.passes.backward.fuse import FusedPair, fuse_pair
from fa_compiler.passes.backward.match import PairDecline

__all__ = ["GRADIENT", "FusedPair", "PairDecline", "fuse_pair"]
