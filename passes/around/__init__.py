"""What stands around attention in a block of a model: norms, gated activations and rotary
positions.

`fuse_positions` replaces rotary positions before attention is fused, and `fuse_around` all the
others afterwards. For Ascend, `finish` then makes the rest of a graph smaller.

    rms_norm.py, layer_norm.py             norms; rows.py has what they share
    swiglu.py, clipped.py, gelu.py         activations; gates.py and polynomials.py
    rotary.py, rotary_ops.py               rotary positions in plain operators, and ready-made ones
    halves.py                              the halves of a tensor, for activations and rotary
                                           positions
    records.py                             what the grammars of these files give
    fuse.py                                the operators of Ascend
    standard.py                            the operators of ONNX and ONNX Runtime; tables.py has
                                           their tables
    turned.py, lines.py                    tensors of rotary positions for both; the lines of the
                                           report
    finish.py                              equal nodes (equal.py), views (views.py), heads
                                           (heads.py), the rotations of query and key (pairs.py),
                                           products with joined weights (products.py)
"""

from fa_compiler.passes.around.finish import finish
from fa_compiler.passes.around.fuse import fuse_around, fuse_positions

__all__ = ["finish", "fuse_around", "fuse_positions"]
