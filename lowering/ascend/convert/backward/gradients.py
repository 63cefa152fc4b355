"""Gradients, written out by their formulas."""

from __future__ import annotations

import math

from fa_compiler.lowering.ascend.convert.backward.ge_call import GeCall, handles


@handles("SoftmaxGrad")
def _softmax_grad(call: GeCall) -> str:
    """p (g - sum(p g))."""
    p, g = call.x("softmax"), call.x("grad_softmax")
    total = call.node("ReduceSum", call.node("Mul", p, g), call.ints(list(call.attr("axes"))))
    return call.node("Mul", p, call.node("Sub", g, total))


@handles("TanhGrad")
def _tanh_grad(call: GeCall) -> str:
    """dy (1 - y^2)."""
    one = call.array(1, call.dtype("y"))
    return call.node(
        "Mul", call.x("dy"), call.node("Sub", one, call.node("Mul", call.x("y"), call.x("y")))
    )


@handles("GeluGradV2")
def _gelu_grad(call: GeCall) -> str:
    """dy (Phi(x) + x phi(x)), with Phi the distribution and phi the density of the normal
    distribution."""
    call.only("approximate", "none")
    x, dtype = call.x("x"), call.dtype("x")
    half = call.array(0.5, dtype)
    error = call.node("Erf", call.node("Mul", x, call.array(math.sqrt(0.5), dtype)))
    below = call.node("Mul", half, call.node("Add", error, call.array(1, dtype)))
    power = call.node("Exp", call.node("Neg", call.node("Mul", half, call.node("Mul", x, x))))
    density = call.node("Mul", power, call.array(1 / math.sqrt(2 * math.pi), dtype))
    return call.node("Mul", call.x("dy"), call.node("Add", below, call.node("Mul", x, density)))
