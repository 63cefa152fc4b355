"""The polynomials that gradients are read as: their algebra, and what arithmetic makes of tensors that hold them."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir
import pytest

from fa_compiler.passes.answer.options import Options
from fa_compiler.passes.backward.polynomials import Monomial, Polynomial, PolynomialReader, Tensor
from fa_compiler.passes.backward.tracing import Tracer
from fa_compiler.passes.layout.views import Viewer
from fa_compiler.passes.matching.attention import Matcher
from fa_compiler.passes.matching.softmax import anchors
from fa_compiler.passes.values.facts import Facts
from fa_compiler.passes.values.shapes import analyse

ONE, A, B, AA, AB, BB = (0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (0, 2)


def of(terms: Mapping[Monomial, float]) -> Polynomial:
    found = Polynomial.of(terms)
    assert found is not None
    return found


@pytest.mark.parametrize("terms", [{}, {A: 0.0}, {A: float("inf")}, {A: 1.0, B: float("nan")}])
def test_coefficients_are_numbers_that_are_not_zero(terms: Mapping[Monomial, float]) -> None:
    assert Polynomial.of(terms) is None


def test_products() -> None:
    assert of({A: 2.0, B: 1.0}).times(of({A: 3.0})) == of({AA: 6.0, AB: 3.0})
    assert of({A: 1.0, B: 1.0}).times(of({A: 1.0, B: -1.0})) == of({AA: 1.0, BB: -1.0})  # AB cancels


def test_powers_end() -> None:
    high = of({(3, 0): 1.0})
    assert high.times(of({A: 1.0})) == of({(4, 0): 1.0})
    assert high.times(of({AA: 1.0})) is None


def test_sums() -> None:
    assert of({A: 2.0, B: 1.0}).plus(of({A: 3.0})) == of({A: 5.0, B: 1.0})
    assert of({A: 2.0, B: 1.0}).plus(of({A: 2.0}), -1.0) == of({B: 1.0})
    assert of({A: 2.0, B: 1.0}).plus(of({A: 2.0 * (1 + 2.0**-23)}), -1.0) == of({B: 1.0})  # equal but for rounding
    assert of({A: 2.0}).plus(of({A: 2.0}), -1.0) is None


def test_scaling() -> None:
    assert of({A: 2.0, B: 1.0}).scaled(0.5) == of({A: 1.0, B: 0.5})
    assert of({A: 2.0}).scaled(0.0) is None


def test_integer_powers() -> None:
    assert of({ONE: 4.0}).to_power(-1) == of({ONE: 0.25})
    assert of({A: 4.0}).to_power(-1) is None
    assert of({A: 4.0}).to_power(-1, divisors=(0,)) == of({(-1, 0): 0.25})
    assert of({AB: 4.0}).to_power(-1, divisors=(0,)) is None
    assert of({A: 1.0, ONE: 1.0}).to_power(2, divisors=(0,)) is None
    assert of({AA: 1.0}).to_power(3, divisors=(0,)) is None


def test_what_is_asked_of_them() -> None:
    assert of({A: 3.0}).coefficient(A) == 3.0
    assert of({A: 3.0}).coefficient(B) is None
    assert of({A: 3.0, B: 1.0}).coefficient(A) is None
    assert of({A: 3.0, B: -3.0}).difference(A, B) == 3.0
    assert of({A: 3.0, B: -2.0}).difference(A, B) is None
    assert of({A: 3.0}).difference(A, B) is None


ATTENTION = "kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) a = Softmax(s) y = MatMul(a, v)"


def read(body: str) -> Polynomial | None:
    """What `out` is, where a is the quantity A, b is B, and both have the axes of the probabilities."""
    model = ir.from_onnx_text(
        '<ir_version: 9, opset_import: ["": 17]> g (float[2,3,4,8] q, float[2,3,5,8] k, float[2,3,5,8] v, '
        f"float[2,3,4,5] b) => (float[2,3,4,8] y) <float two = {{2}}> {{ {ATTENTION} {body} z = Shape(out) }}"
    )
    facts = Facts.of(analyse(model), Options())
    (anchor,) = anchors(model.graph, facts.info)
    values = {value.name: value for node in model.graph for value in node.outputs}
    values |= {value.name: value for value in model.graph.inputs}
    alone = ir.from_onnx_text(
        '<ir_version: 9, opset_import: ["": 17]> g (float[2,3,4,8] q, float[2,3,5,8] k, float[2,3,5,8] v) '
        f"=> (float[2,3,4,8] y) {{ {ATTENTION} }}"
    )
    info = analyse(alone)
    (softmax,) = anchors(alone.graph, info)
    match = Matcher(Facts.of(info, Options())).match(softmax)
    assert match.derivation is not None
    dims = match.derivation.probabilities.seen[softmax.output]

    def grammar(node: ir.Node) -> Tensor[Polynomial] | None:
        return reader.made_by(node)

    reader = PolynomialReader[Polynomial](Tracer(match, Viewer(facts, match.space)), grammar)
    reader.put(anchor.output, of({A: 1.0}), dims)
    reader.put(values["b"], of({B: 1.0}), dims)
    found = reader.tensor(values["out"])
    assert found is None or len(found.dims) == 4
    return None if found is None else found.quantity


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("ab = Mul(a, b) aa = Mul(a, a) out = Sub(ab, aa)", {AB: 1.0, AA: -1.0}),
        ("d = Sub(b, a) out = Mul(a, d)", {AB: 1.0, AA: -1.0}),
        ("out = Sum(a, b, a)", {A: 2.0, B: 1.0}),
        ("m = Mul(two, a) n = Neg(b) out = Add(m, n)", {A: 2.0, B: -1.0}),
        ("h = Div(a, two) t = Transpose<perm=[0,1,3,2]>(h) out = Transpose<perm=[0,1,3,2]>(t)", {A: 0.5}),
        ("out = Div(a, b)", None),
        ("e = Exp(a) out = Add(e, b)", None),
        ("out = Sub(a, a)", None),
    ],
)
def test_what_arithmetic_makes(body: str, expected: Mapping[Monomial, float] | None) -> None:
    assert read(body) == (None if expected is None else of(expected))


def test_a_transposed_tensor_meets_no_other() -> None:
    assert read("t = Transpose<perm=[0,1,3,2]>(a) u = Transpose<perm=[0,1,3,2]>(b) out = Mul(t, u)") == of({AB: 1.0})
    assert read("t = Transpose<perm=[1,0,2,3]>(a) out = Mul(t, b)") is None
