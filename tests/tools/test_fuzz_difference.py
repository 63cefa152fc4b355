"""What the search calls a difference, and what excuses one."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest

import fa_compiler
from tools.fuzz import oracle
from tools.fuzz.difference import LARGEST, Array, Comparison, Feed, run_original, session
from tools.fuzz.oracle import Judge

MODEL = onnx.parser.parse_model(
    """<ir_version: 9, opset_import: ["": 17]>
    g (float[2,4] q, float[3,4] k, float[3,4] v, float[3] m) => (float[2,4] y)
    { t = Transpose(k) s = MatMul(q, t) a = Add(s, m) p = Softmax(a) y = MatMul(p, v) }"""
)
RNG = np.random.default_rng(0)
PLAIN = {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in {"q": (2, 4), "v": (3, 4)}.items()}
KEY = RNG.standard_normal((3, 4)).astype(np.float32)
MASK = np.array([0.0, 0.0, -np.inf], np.float32)
"""The last key is masked."""


def title(got: Array, key: Array = KEY, value: Array | None = None, biased: bool = False) -> str | None:
    """Of the difference between the original and `got`."""
    arrays = {**PLAIN, "k": key, "m": MASK, **({} if value is None else {"v": value})}
    spoiled = tuple(name for name in ("k", "v") if not np.isfinite(arrays[name]).all())
    original = session(MODEL, custom=False)
    compared = Comparison(MODEL, original, Feed("", arrays, spoiled=spoiled), biased=biased)
    fault = compared.fault(0, run_original(original, arrays)[0], got)
    return None if fault is None else fault[0]


def spoilt(token: int, number: float) -> Array:
    key = KEY.copy()
    key[token, 1] = number
    return key


RIGHT: Array = run_original(session(MODEL, custom=False), {**PLAIN, "k": KEY, "m": MASK})[0]


@pytest.mark.parametrize(("change", "expected"), [(0.0, None), (1e-7, None), (1e-3, "other numbers")])
def test_numbers(change: float, expected: str | None) -> None:
    assert title(RIGHT + np.float32(change)) == expected


def test_nan_at_a_masked_key() -> None:
    """The original shows it, for -inf does not hide it; the fused model may do as if it were not there."""
    nothing = np.full_like(RIGHT, np.nan)
    assert title(RIGHT, spoilt(2, np.nan)) is None
    assert title(nothing, spoilt(2, np.nan)) is None
    assert title(RIGHT + 1, spoilt(2, np.nan)) == "NaN is lost where inputs hold NaN or infinities"


def test_nan_at_an_attended_key() -> None:
    assert title(RIGHT, spoilt(0, np.nan)) == "NaN is lost where inputs hold NaN or infinities"


def test_infinite_scores() -> None:
    """Those of attended keys are not looked at, those of masked ones are."""
    assert title(RIGHT, spoilt(0, np.inf)) is None
    masked = np.where(np.arange(3)[:, None] == 2, np.float32(-np.inf), KEY)
    assert title(RIGHT, masked) is None


def test_nan_of_a_value() -> None:
    value = PLAIN["v"].copy()
    value[0, 0] = np.nan
    assert title(RIGHT, value=value) == "NaN is lost where inputs hold NaN or infinities"
    expected = RIGHT.copy()
    expected[:, 0] = np.nan
    assert title(expected, value=value) is None
    assert title(np.full_like(RIGHT, np.nan), value=value) == "NaN is gained where inputs hold NaN or infinities"


def test_small_results_beside_a_masked_key() -> None:
    """ONNX Runtime's Sigmoid loses them, so what the result is without the key is known from the reference alone."""
    gated = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["": 17]>
        g (float[2,4] q, float[3,4] k, float[3,4] v, float[3] m, float[1] g) => (float[2,4] y)
        { t = Transpose(k) s = MatMul(q, t) a = Add(s, m) p = Softmax(a) o = MatMul(p, v) h = Sigmoid(g)
          y = Mul(o, h) }"""
    )
    gate = np.array([-30.0], np.float32)
    value = np.where(np.arange(3)[:, None] == 2, np.float32(np.inf), PLAIN["v"])
    arrays = {**PLAIN, "k": KEY, "m": MASK, "v": value, "g": gate}
    original = session(gated, custom=False)
    compared = Comparison(gated, original, Feed("", arrays, spoiled=("v",)))
    wanted = run_original(original, arrays)[0]
    right = RIGHT * np.exp(gate)
    assert np.isnan(wanted).all() and abs(right).max() > 1e-14
    assert compared.fault(0, wanted, right) is None
    assert compared.fault(0, wanted, 2 * right) is not None


def test_a_bias_masks_nothing() -> None:
    """ONNX Runtime gives NaN for the row; a fused model that has a bias may, and another must not lose a number."""
    nothing = np.full_like(RIGHT, np.nan)
    assert title(nothing, biased=True) == title(nothing) == "NaN is gained"


def test_a_mean_at_the_largest_number() -> None:
    value = np.full((3, 4), LARGEST, np.float32)
    assert title(np.full_like(RIGHT, np.inf), value=value) is None
    assert title(np.full_like(RIGHT, -np.inf), value=value) == "infinity is gained"


def fault(body: str, types: str, arrays: dict[str, Array], got: Array) -> str | None:
    """The title of the difference between a model of its own and `got`."""
    text = f"g ({types}) => (float[M,N] y) {{ {body} }}"
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 17]> {text}')
    model.graph.output[0].type.tensor_type.elem_type = model.graph.input[0].type.tensor_type.elem_type
    original = session(model, custom=False)
    found = Comparison(model, original, Feed("", arrays)).fault(0, run_original(original, arrays)[0], got)
    return None if found is None else found[0]


@pytest.mark.parametrize(
    ("keys", "number", "expected"), [(0, 0.0, None), (0, 1.0, "NaN is lost"), (2, 0.0, "NaN is lost")]
)
def test_no_keys(keys: int, number: float, expected: str | None) -> None:
    """A quotient of sums over none may be 0; one of sums that are 0 may not."""
    body = "e = Mul(q, k) t = ReduceSum<keepdims=1>(e, a) y = Div(t, t)"
    arrays: dict[str, Array] = {"q": np.zeros((2, keys), np.float32), "k": np.ones((2, keys), np.float32)}
    arrays["a"] = np.array([1], np.int64)
    got = np.full((2, 1), number, np.float32)
    assert fault(body, "float[M,K] q, float[M,K] k, int64[1] a", arrays, got) == expected


@pytest.mark.parametrize(("number", "expected"), [(3.0, None), (0.0, None), (1.0, "other numbers")])
def test_roundings_of_16_bits(number: float, expected: str | None) -> None:
    """-1e4 + 3 is rounded where it goes through an Identity, unless optimisations take the Identity away."""
    body = "a = Add(q, k) b = Identity(a) c = Reshape(b, n) y = Sub(c, q)"
    arrays: dict[str, Array] = {"q": np.full((1, 2), -1e4, np.float16), "k": np.full((1, 2), 3.0, np.float16)}
    arrays["n"] = np.array([1, 2], np.int64)
    got = np.full((1, 2), number, np.float16)
    assert fault(body, "float16[M,N] q, float16[M,N] k, int64[2] n", arrays, got) == expected


@pytest.mark.parametrize(("number", "expected"), [(6e4, None), (5e4, "infinity is lost")])
def test_numbers_beyond_16_bits(number: float, expected: str | None) -> None:
    """3 times 6e4 overflows in the middle. Where it does not, the result is 6e4, and any other number is a fault."""
    body = "a = Mul(q, k) b = Transpose(a) c = Reshape(b, n) y = Div(c, k)"
    arrays: dict[str, Array] = {"q": np.full((1, 2), 6e4, np.float16), "k": np.full((1, 2), 3.0, np.float16)}
    arrays["n"] = np.array([1, 2], np.int64)
    got = np.full((1, 2), number, np.float16)
    assert fault(body, "float16[M,N] q, float16[M,N] k, int64[2] n", arrays, got) == expected


def test_a_wrong_body_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The body of a fused node is judged like its kernel: here it negates the result."""
    plain = fa_compiler.optimize

    def negated(*arguments: object, **options: object) -> fa_compiler.Result:
        result = plain(*arguments, **options)
        (body,) = result.model.functions
        last = next(node for node in body.node if node.output[0] == "attention_out")
        last.output[0] = "negated"
        body.node.append(onnx.helper.make_node("Neg", ["negated"], ["attention_out"]))
        return result

    judge = Judge(MODEL, [Feed("", {**PLAIN, "k": KEY, "m": np.zeros(3, np.float32)})])
    monkeypatch.setattr(oracle, "BODIES_OF", 1)
    assert judge.outcome().finding is None
    monkeypatch.setattr(fa_compiler, "optimize", negated)
    finding = judge.outcome().finding
    assert finding is not None and finding.title.startswith("without the library: other numbers")


@pytest.mark.parametrize(("masked", "number", "excused"), [(2, 0.0, True), (2, 1.0, False), (1, 0.0, False)])
def test_a_bias_of_infinities_at_a_masked_key(masked: int, number: float, excused: bool) -> None:
    """The bias is -inf - -inf at the last key, which may be lost only where the window excludes the key."""
    body = "b = Sub(m, n) s = Add(q, b) h = Where(w, l, s) p = Softmax(h) y = MatMul(p, v)"
    lowest: Array = np.array(-np.inf, np.float32)
    scores: Array = np.array([[0.5, 1.0, 2.0]], np.float32)
    value: Array = np.arange(6, dtype=np.float32).reshape(3, 2)
    window = np.arange(3) == masked
    arrays: dict[str, Array] = {"q": scores, "m": MASK, "n": MASK, "w": window, "l": lowest, "v": value}
    weights = np.where(window, 0.0, np.exp(scores))
    got: Array = ((weights / weights.sum()) @ value + number).astype(np.float32)
    types = "float[M,K] q, float[K] m, float[K] n, bool[K] w, float l, float[K,N] v"
    assert (fault(body, types, arrays, got) is None) == excused


@pytest.mark.parametrize("kind", ["float", "float16"])
def test_integers_may_be_as_far_apart_as_the_last_bits_of_inputs_move_them(kind: str) -> None:
    """Steps of 0.5 beside 512: the last bit of float16 is one of them there, that of float32 none."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 9, opset_import: ["": 19]>
        g ({kind}[1,2] x, {kind}[1] big, {kind}[1] half) => (int8[1,2] y) <int8 zero = {{0}}>
        {{ s = Sub(x, big) y = QuantizeLinear(s, half, zero) }}"""
    )
    short = np.float16 if kind == "float16" else np.float32
    given = {"x": [[514.0, 524.0]], "big": [512.0], "half": [0.5]}
    arrays = {name: np.array(numbers, short) for name, numbers in given.items()}
    original = session(model, custom=False)
    compared = Comparison(model, original, Feed("", arrays))
    (right,) = run_original(original, arrays)
    np.testing.assert_array_equal(right, [[4, 24]])
    allowed = [gap for gap in (0, 1, 3, 90) if compared.fault(0, right, (right + gap).astype(np.int8)) is None]
    assert allowed == ([0, 1, 3] if kind == "float16" else [0, 1])


def test_nan_has_no_integer() -> None:
    """ONNX Runtime's ReduceMax loses the NaN beside -inf, onnx's reference evaluation does not: so every integer is as
    good in the first row, and only the original's in the second."""
    model = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["": 17]>
        g (float[2,2] x) => (int8[2,1] y) <float low = {-inf}, float zero = {0}, float step = {0.5}, int8 none = {0}>
        { m = ReduceMax<axes=[1]>(x) e = Equal(m, low) w = Where(e, zero, m) y = QuantizeLinear(w, step, none) }"""
    )
    arrays: dict[str, Array] = {"x": np.array([[-np.inf, np.nan], [1.0, 2.0]], np.float32)}
    original = session(model, custom=False)
    compared = Comparison(model, original, Feed("", arrays))
    (wanted,) = run_original(original, arrays)
    np.testing.assert_array_equal(wanted, [[0], [4]])
    assert compared.fault(0, wanted, np.array([[-128], [4]], np.int8)) is None
    assert compared.fault(0, wanted, np.array([[-128], [-128]], np.int8)) is not None
