"""Every reason code: a model that provokes it, the node it names, and what it tells to change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from fa_compiler.passes import Code, Options, Report, fuse
from fa_compiler.passes.answer import budget
from fa_compiler.passes.answer.decline import label
from fa_compiler.passes.answer.options import Target
from fa_compiler.passes.fusion import NEWEST_OPSET
from tests.passes.backward.test_rejects import model as training
from tests.passes.ir.test_scopes import ATTENTION, branches, calling, function
from tests.passes.running import PRODUCT_PV, PRODUCT_QK, SOFTMAX, parse
from tests.passes.tape import Training, compose

pytestmark = pytest.mark.usefixtures("declines_change_nothing")

NEGATIVE = "f = Constant<value=float {-1e4}>() "
NO_HINT = {
    Code.ALREADY_FUSED,
    Code.NO_SCORES_MATMUL,
    Code.NO_VALUE_MATMUL,
    Code.NOT_ATTENTION,
}
"""What the model computes there is no FlashAttentionScore, however it is exported, or it is fused."""


@dataclass(frozen=True)
class Provoked:
    """A model and options that end in one code."""

    model: Callable[[], onnx.ModelProto]
    target: Target = "ort"
    steps: int = budget.STEPS
    parser_plugins: bool = False

    def report(self, model: onnx.ModelProto) -> Report:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(budget, "STEPS", self.steps)
            return fuse(ir.from_proto(model), Options(self.target, parser_plugins=self.parser_plugins))


def text(body: str, more: str = "", **options: str) -> Callable[[], onnx.ModelProto]:
    return lambda: parse(body, more, **options)  # type: ignore[arg-type]


def after(body: str, more: str = "", **options: str) -> Callable[[], onnx.ModelProto]:
    """Plain attention with something between the product s and the softmax, which takes x."""
    return text(PRODUCT_QK + body + " " + SOFTMAX.format("x") + PRODUCT_PV, more, **options)


def behind(body: str, more: str = "", **options: str) -> Callable[[], onnx.ModelProto]:
    """Plain attention with something between the probabilities p and their product, which takes x."""
    return text(PRODUCT_QK + SOFTMAX.format("s") + body + " y = MatMul(x, v)", more, **options)


def bias_with_gradient() -> onnx.ModelProto:
    """A training graph whose bias wants a gradient, too: that of the scores."""
    composed = compose(Training(mask="bias"))
    for node in reversed(composed.model.graph.node):
        if node.op_type != "Mul":
            continue
        model = onnx.ModelProto()
        model.CopyFrom(composed.model)
        model.graph.output.append(helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, [None] * 4))
        blocks = fuse(ir.from_proto(model), Options()).blocks
        if any(block.code == Code.BIAS_GRADIENT for block in blocks):
            return model
    raise AssertionError("no value is the gradient of the scores")


def of_an_unknown_opset() -> onnx.ModelProto:
    """Plain attention of an opset that does not exist yet."""
    model = parse(ATTENTION)
    model.opset_import[0].version = NEWEST_OPSET + 1
    return model


PLAIN = SOFTMAX.format("s") + PRODUCT_PV
SQUARE = "float[B,4,8,8] q, float[B,4,8,8] k, float[B,4,8,8] v"
WIDE = "float[B,4,S,769] q, float[B,4,T,769] k, float[B,4,T,8] v"
LONG = "float[B,4,S,8] q, float[B,4,T,8] k, float[B,4,T,16] v"
DOUBLE = "double[B,4,S,8] q, double[B,4,T,8] k, double[B,4,T,8] v"

PROVOKED: dict[Code, Provoked] = {
    Code.SOFTCAP: Provoked(after("a = Tanh(s) t = Neg(a) x = Tanh(t)")),
    Code.SCORES_ARE_OUTPUT: Provoked(after("x = Identity(s)", outputs="float[B,4,S,8] y, float[B,4,S,T] s")),
    Code.PROBABILITIES_ARE_OUTPUT: Provoked(behind("x = Identity(p)", outputs="float[B,4,S,8] y, float[B,4,S,T] p")),
    Code.HEAD_SIZE_OVER_768: Provoked(after("x = Identity(s)", inputs=WIDE)),
    Code.NO_SCORES_MATMUL: Provoked(text(SOFTMAX.format("x") + PRODUCT_PV, "float[B,4,S,T] x")),
    Code.NO_VALUE_MATMUL: Provoked(
        behind("x = Transpose<perm=[0,1,3,2]>(p)", inputs=SQUARE, outputs="float[B,4,8,8] y"),
    ),
    Code.AXIS: Provoked(text(PRODUCT_QK + "p = Softmax<axis=1>(s) " + PRODUCT_PV)),
    Code.OVERFLOW: Provoked(
        text(
            PRODUCT_QK + "e = Exp(s) a = Constant<value=int64[1] {-1}>() t = ReduceSum(e, a) p = Div(e, t)" + PRODUCT_PV
        )
    ),
    Code.SPELLING: Provoked(text(PRODUCT_QK + "e = Exp(s) p = LpNormalization<p=1>(e)" + PRODUCT_PV)),
    Code.RANK: Provoked(text("r = Reshape(q, shape) " + PRODUCT_QK.replace("q,", "r,") + PLAIN, "int64[R] shape")),
    Code.SHAPE: Provoked(after("x = Add(s, b)", "float[2,B,4,S,T] b", outputs="float[2,B,4,S,8] y")),
    Code.DTYPE: Provoked(after("x = Identity(s)", inputs=DOUBLE, outputs="double[B,4,S,8] y")),
    Code.CAST: Provoked(after("h = Cast<to=10>(s) x = Cast<to=1>(h)")),
    Code.SCALE: Provoked(after("x = Mul(s, c)", "float[S,T] c")),
    Code.SCORE_TERM: Provoked(after("x = Relu(s)")),
    Code.PROBABILITY_TERM: Provoked(behind("x = Mul(p, h)", "float[S,T] h")),
    Code.MASK_VALUE: Provoked(after(NEGATIVE + "x = Where(m, s, f)", "bool[B,1,1,T] m"), "ascend"),
    Code.EMPTY_ROWS: Provoked(
        text(
            PRODUCT_QK + "z = Constant<value=float {0.0}>() x = Add(s, b) p0 = Softmax<axis=-1>(x) i = IsNaN(p0) "
            "p = Where(i, z, p0) " + PRODUCT_PV,
            "float[B,1,S,T] b",
        ),
        "ascend",
    ),
    Code.FUNCTION: Provoked(lambda: calling(function(ATTENTION, opset=12))),
    Code.SCOPE: Provoked(text(PRODUCT_QK + SOFTMAX.format("s") + branches("a = MatMul(p, v)", "b = Neg(q)"), "bool c")),
    Code.TRAINING: Provoked(lambda: training({"ds": "ds = Identity(t)"})),
    Code.BIAS_GRADIENT: Provoked(bias_with_gradient),
    Code.OPSET: Provoked(of_an_unknown_opset),
    Code.READY_MADE: Provoked(
        text(
            "y = com.microsoft.GroupQueryAttention<num_heads=4, kv_num_heads=4, do_rotary=1>(q, k, v, pk, pv, l, t)",
            "float[B,4,T,8] pk, float[B,4,T,8] pv, int32[B] l, int32 t",
            inputs="float[B,S,32] q, float[B,S,32] k, float[B,S,32] v",
            outputs="float[B,S,32] y",
        ),
    ),
    Code.ALREADY_FUSED: Provoked(
        text(
            "y = com.microsoft.MultiHeadAttention<num_heads=4>(q, k, v)",
            inputs="float[B,S,32] q, float[B,T,32] k, float[B,T,32] v",
            outputs="float[B,S,32] y",
        ),
        "contrib",
    ),
    Code.ILLEGAL: Provoked(after("x = Identity(s)", inputs=LONG, outputs="float[B,4,S,16] y"), "ascend"),
    Code.RUNTIME: Provoked(after("x = Tanh(s)"), "contrib"),
    Code.PARSER: Provoked(
        text(
            "a, b = Split<axis=-1>(q) s = Sigmoid(a) t = Mul(a, s) y = Mul(t, b)",
            outputs="float[B,4,S,4] y",
        ),
        "ascend",
        parser_plugins=True,
    ),
    Code.LINEAR: Provoked(
        text(
            "s = Conv(q, w) a = Relu(s) at = Transpose<perm=[0,2,1]>(a) m = MatMul(at, a) y = MatMul(m, at)",
            inputs="float[B,2,T] q",
            outputs="float[B,T,2] y",
            initializers="<float[2,2,1] w = {1,2,3,4}>",
        )
    ),
    Code.CONVOLUTION: Provoked(
        text(
            "y = Conv<group=2, pads=[2,0], dilations=[2]>(q, w)",
            inputs="float[B,2,T] q",
            outputs="float[B,2,T] y",
            initializers="<float[2,1,2] w = {1,2,3,4}>",
        )
    ),
    Code.READ_INSIDE: Provoked(
        text(
            "s = Mul(q, q) m = ReduceMean<axes=[-1]>(s) r = Sqrt(m) n = Div(q, r) y = Add(n, r)",
            outputs="float[B,4,S,8] y",
        ),
        "ascend",
    ),
    Code.WEIGHTS: Provoked(
        text(
            "".join(
                f"{name} = Constant<value=float[8,8] {{{','.join([name[1]] * 64)}}}>() " for name in ("w1", "w2", "w3")
            )
            + "s = Mul(q, q) m = ReduceMean<axes=[-1]>(s) r = Sqrt(m) n = Div(q, r) "
            "a = MatMul(n, w1) b = MatMul(n, w2) c = MatMul(n, w3) d = Add(a, b) e = Add(c, d) y = Add(e, w1)",
            outputs="float[B,4,S,8] y",
        ),
        "ascend",
    ),
    Code.BUDGET: Provoked(after("x = Identity(s)"), steps=1),
    Code.NOT_ATTENTION: Provoked(text("p = Softmax<axis=-1>(q)", outputs="float[B,4,S,8] p")),
}


def test_every_code_is_provoked() -> None:
    assert set(PROVOKED) == set(Code)


@pytest.mark.parametrize("code", PROVOKED)
def test_code(code: Code) -> None:
    provoked = PROVOKED[code]
    model = provoked.model()
    report = provoked.report(model)
    block = next((block for block in [*report.blocks, *report.around] if block.code == code), None)
    assert block is not None, report.blocks
    assert block.status == (code if code in (Code.NOT_ATTENTION, Code.LINEAR, Code.ALREADY_FUSED) else "declined")
    assert block.reason
    # One sentence that can follow a colon: no capital, no full stop.
    assert not block.reason.endswith(".")
    names = {label(node) for graph in ir.from_proto(model).graphs() for node in graph}
    assert block.culprit in names
    assert (block.hint is None) == (code in NO_HINT), block.hint
