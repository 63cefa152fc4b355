"""What stands around attention in a block of a model: norms and gated activations become operators of Ascend."""

from fa_compiler.passes.around.finish import finish
from fa_compiler.passes.around.fuse import fuse_around, fuse_positions

__all__ = ["finish", "fuse_around", "fuse_positions"]
