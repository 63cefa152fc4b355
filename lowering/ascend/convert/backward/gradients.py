"""Gradients, by their formulas."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fa_compiler.lowering.ascend.convert.backward.reading import Reading, means


@means("SoftmaxGrad")
def _softmax_grad(r: Reading) -> str:
    """p (g - sum(p g))."""
    p, g = r.x("softmax"), r.x("grad_softmax")
    total = r.n("ReduceSum", r.n("Mul", p, g), r.ints(list(r.attr("axes"))))
    return r.n("Mul", p, r.n("Sub", g, total))


@means("TanhGrad")
def _tanh_grad(r: Reading) -> str:
    """dy (1 - y^2)."""
    one = r.array(1, r.desc("y").dtype)
    return r.n("Mul", r.x("dy"), r.n("Sub", one, r.n("Mul", r.x("y"), r.x("y"))))


@means("GeluGradV2")
def _gelu_grad(r: Reading) -> str:
    """dy (Phi(x) + x phi(x)), with Phi the distribution and phi the density of the normal distribution."""
    r.only("approximate", "none")
    x, dtype = r.x("x"), r.desc("x").dtype
    half = r.array(0.5, dtype)
    error = r.n("Erf", r.n("Mul", x, r.array(math.sqrt(0.5), dtype)))
    below = r.n("Mul", half, r.n("Add", error, r.array(1, dtype)))
    power = r.n("Exp", r.n("Neg", r.n("Mul", half, r.n("Mul", x, x))))
    density = r.n("Mul", power, r.array(1 / math.sqrt(2 * math.pi), dtype))
    return r.n("Mul", r.x("dy"), r.n("Add", below, r.n("Mul", x, density)))


@means("LayerNormGradV3")
def _layer_norm_grad(r: Reading) -> Sequence[str]:
    """With n = (x - mean) rstd and g = dy gamma, over gamma's axes: dx = rstd (g - mean(g) - n mean(g n)); dgamma and
    dbeta sum dy n and dy over the others."""
    dy, rank, inner = r.x("dy"), r.rank("x"), r.rank("gamma")
    axes, others = r.ints(list(range(rank - inner, rank))), r.ints(list(range(rank - inner)))
    normal = r.n("Mul", r.n("Sub", r.x("x"), r.x("mean")), r.x("rstd"))
    g = r.n("Mul", dy, r.x("gamma"))
    shift = r.n("Mul", normal, r.n("ReduceMean", r.n("Mul", g, normal), axes))
    dx = r.n("Mul", r.x("rstd"), r.n("Sub", r.n("Sub", g, r.n("ReduceMean", g, axes)), shift))
    dgamma = r.n("ReduceSum", r.n("Mul", dy, normal), others, keepdims=0)
    return dx, dgamma, r.n("ReduceSum", dy, others, keepdims=0)
