"""Forms of random numbers. A seed says nothing across runtimes: the numbers of ONNX Runtime and GE
differ anyway.

| operator | becomes | where |
| --- | --- | --- |
| Bernoulli with a seed of 0 | the same without the seed, at which its plugin fails | always |
| RandomNormalLike, RandomUniformLike without dtype | the same with the type of the input | the type is known |
| Multinomial of int64 | Multinomial of int32, and a Cast | always |
"""

from __future__ import annotations

import onnx_ir as ir

from fa_compiler.lowering.ascend.onnx_route.rewrite import Rewrite
from fa_compiler.passes.ir.nodes import attribute_values, int_attr

INT32 = ir.DataType.INT32


def no_zero_seed(rewrite: Rewrite) -> None:
    """Bernoulli."""
    if rewrite.number("seed", 1.0) == 0:
        rewrite.drop("seed")


def type_of_input(rewrite: Rewrite) -> None:
    """RandomNormalLike and RandomUniformLike."""
    if "dtype" not in rewrite.node.attributes:
        rewrite.node.attributes["dtype"] = ir.AttrInt64(
            "dtype", int(rewrite.dtype(rewrite.needed(0)))
        )


def counted_in_int32(rewrite: Rewrite) -> None:
    """Multinomial: its plugin gives int32 for any dtype."""
    wanted = ir.DataType(int_attr(rewrite.node, "dtype", int(INT32)))
    rewrite.drop("dtype")
    if wanted == INT32:
        return
    drawn = rewrite.builder.op("Multinomial", [rewrite.needed(0)], attribute_values(rewrite.node))
    rewrite.replace(rewrite.builder.cast(drawn, wanted))
