"""The gradient of attention in training graphs: found from the forward match, and fused together with it."""

from fa_compiler.passes.backward.dense_gradient import OP as GRADIENT
from fa_compiler.passes.backward.fuse import FusedPair, fuse_pair
from fa_compiler.passes.backward.match import PairDecline

__all__ = ["GRADIENT", "FusedPair", "PairDecline", "fuse_pair"]
