"""Each hint that names an option is followed: the attention is then fused, or another reason is given, with another
hint."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

from fa_compiler.command_line.main import parser
from fa_compiler.op_registry import NodeView, TensorInfo, verify
from fa_compiler.passes import Block, Code, Options, fuse
from fa_compiler.passes.answer import options as words
from fa_compiler.passes.answer.option import options_of
from fa_compiler.passes.answer.options import DEFAULT_PRODUCT, Target
from fa_compiler.passes.masks.rounding import ONE_SIGN_HINT
from fa_compiler.passes.rewrite.cure import cure
from tests.passes.answer.test_codes import PROVOKED
from tests.passes.attention_ops.test_delta_rule import model_of as linear_model
from tests.passes.attention_ops.test_delta_rule import problem as linear_problem
from tests.passes.attention_ops.test_group_cache import Case
from tests.passes.backward.test_index_loss import model as index_loss
from tests.passes.prepare.test_differences import SPELLINGS as DIFFERENCES
from tests.passes.prepare.test_differences import attention as difference
from tests.passes.prepare.test_quantised_softmax import BODIES, built
from tests.passes.running import PRODUCT_PV, PRODUCT_QK, SOFTMAX, parse

ROOT = Path(__file__).parents[3]
NAMED = re.compile(r"--assume ([a-z0-9-]+(?:,[a-z0-9-]+)*)")
NUMBERS = (
    "zero = Constant<value=float {0.0}>() one = Constant<value=float {1.0}>() "
    "low = Constant<value=float {-3.4028234663852886e38}>() last = Constant<value=int64[1] {-1}>() "
)
BSH = "float[B,S,16] q, float[B,S,16] k, float[B,S,16] v"
HALF = "float16[2,2,4,8] q, float16[2,2,6,8] k, float16[2,2,6,8] v"
SIXTEEN = "float[B,4,S,16] q, float[B,4,T,16] k, float[B,4,T,16] v"
INTEGERS = "int64[B,1,1,T] m, int64[B,1,1,T] n"
OTHERWISE = "another"
"""What a hint leads to that gives another reason and another hint."""


@dataclass(frozen=True)
class Hinted:
    """A model that is declined with a hint, and what following the hint leads to."""

    model: Callable[[], onnx.ModelProto]
    target: Target = "ort"
    product: str | None = None
    assume: tuple[str, ...] = ()
    leads_to: str = "fused"

    def options(self) -> Options:
        return Options(self.target, self.product, assume=frozenset(self.assume))

    def followed(self, hint: str) -> list[Options]:
        """The options that a hint advises: two sets where it offers two words that exclude each other. A hint that
        names another option than --assume and --target ort needs a case here: it leads to the same options."""
        listed = [frozenset(each.split(",")) for each in NAMED.findall(hint)]
        before = frozenset(self.assume)
        if "--target ort" in hint:
            return [Options("ort", assume=before)]
        if "leave out --assume" in hint:
            return [Options(self.target, self.product, assume=before.difference(*listed))]
        apart = {words.SHARED_CACHES, words.SEPARATE_CACHES} <= frozenset[str]().union(*listed)
        sets = listed if apart else [frozenset[str]().union(*listed)]
        return [Options(self.target, self.product, assume=before | each) for each in sets]


def text(body: str, more: str = "", **options: str) -> Callable[[], onnx.ModelProto]:
    return lambda: parse(NUMBERS + body, more, **options)  # type: ignore[arg-type]


def plain(body: str, more: str = "", **options: str) -> Callable[[], onnx.ModelProto]:
    """Attention with something between the product s and the softmax, which takes x."""
    return text(PRODUCT_QK + body + SOFTMAX.format("x") + PRODUCT_PV, more, **options)


def operator(body: str, inputs: str, opset: int = 24) -> Callable[[], onnx.ModelProto]:
    rank = "[K,L,M,N]" if opset > 17 else "[K,L,M]"
    kind = inputs.partition("[")[0]
    return lambda: parse(NUMBERS + body, inputs=inputs, outputs=f"{kind}{rank} y", opset=opset, ir_version=10)


def linear(tokens: int, **more: str) -> Callable[[], onnx.ModelProto]:
    """A LinearAttention of open sizes where there are no tokens."""
    return lambda: linear_model(*linear_problem(tokens or 1, **more), is_open=not tokens)


LINEAR = (words.HALF_ATTENTION, words.UNIT_INPUTS, words.SLOW_DECAY)
INTEGER_MASK = "f = Cast<to=1>(m) r = Sub(one, f) a = Mul(r, low) "
OVERFLOWS = "e = Exp(x) t = ReduceSum<keepdims=1>(e, last) p = Div(e, t) "
GUARD = "w = Softmax<axis=-1>(x) i = IsNaN(w) p = Where(i, zero, w) "

HINTS: dict[str, Hinted] = {
    "empty rows": Hinted(PROVOKED[Code.EMPTY_ROWS].model, "ascend"),
    "what the operators of the target lack": Hinted(PROVOKED[Code.RUNTIME].model, "contrib"),
    "a bias for ONNX's Attention": Hinted(plain("x = Add(s, b) ", "float[1,4,S,T] b"), "onnx"),
    "a mask of 16 bits": Hinted(operator("y = Attention(q, k, v, mask)", f"{HALF}, float16[4,6] mask")),
    "a bias of any size": Hinted(
        operator(
            'y = com.microsoft.MultiHeadAttention<num_heads=2, unidirectional=1>(q, k, v, "", "", addend)',
            f"{BSH}, float[1,2,S,S] addend",
            17,
        )
    ),
    "a bias of any size behind padding": Hinted(
        operator(
            'y = com.microsoft.MultiHeadAttention<num_heads=2>(q, k, v, "", mask, addend)',
            f"{BSH}, int32[B,S] mask, float[1,2,S,S] addend",
            17,
        )
    ),
    "an integer mask": Hinted(
        operator(
            INTEGER_MASK + 'y = Attention(q, k, v, a, "", "", n)',
            "float[B,4,S,8] q, float[B,4,T,8] k, float[B,4,T,8] v, int64[B,1,S,T] m, int64[B] n",
            25,
        )
    ),
    "integer masks that add up": Hinted(
        plain(INTEGER_MASK + "g = Cast<to=1>(n) h = Sub(one, g) c = Mul(h, low) d = Add(s, a) x = Add(d, c) ", INTEGERS)
    ),
    "all that linear attention needs": Hinted(linear(5), "ascend"),
    "all that a step of linear attention needs": Hinted(linear(0, gate="key"), "ascend"),
    "linear attention in bfloat16": Hinted(linear(5), "ascend", assume=LINEAR[1:]),
    "what numbers chunks of linear attention need": Hinted(linear(5), "ascend", assume=(words.HALF_ATTENTION,)),
    "what numbers a step of linear attention needs": Hinted(linear(1), "ascend", assume=(words.HALF_ATTENTION,)),
    "a decay for each key dimension": Hinted(linear(0, gate="key"), "ascend", assume=LINEAR),
    "no maximum": Hinted(text(PRODUCT_QK + "x = Identity(s) " + OVERFLOWS + PRODUCT_PV)),
    "no maximum beside a mask": Hinted(
        text(PRODUCT_QK + "x = Where(m, s, low) " + OVERFLOWS + PRODUCT_PV, "bool[B,1,S,T] m"), leads_to=OTHERWISE
    ),
    "a row of no exponentials": Hinted(
        text(PRODUCT_QK + "x = Where(m, s, low) " + OVERFLOWS + PRODUCT_PV, "bool[B,1,S,T] m"),
        assume=(words.BOUNDED_SCORES,),
    ),
    "masked probabilities": Hinted(
        text(
            PRODUCT_QK + SOFTMAX.format("s") + "x = Where(m, p, zero) t = ReduceSum<keepdims=1>(x, last) w = Div(x, t) "
            "y = MatMul(w, v)",
            "bool[B,1,S,T] m",
        )
    ),
    "roundings": Hinted(lambda: built(BODIES["everywhere"])),
    "a difference": Hinted(lambda: difference(next(body for body, _ in DIFFERENCES.values() if "d = " in body), "BST")),
    "a guard": Hinted(
        text(PRODUCT_QK + "x = Identity(s) " + GUARD + PRODUCT_PV), "ascend", assume=(words.NON_FINITE_SCORES,)
    ),
    "one buffer or two": Hinted(
        operator(
            "y, pk, pv = com.microsoft.GroupQueryAttention<num_heads=4, kv_num_heads=2>(q, k, v, past_key, past_value, "
            "seqlens, total)",
            "float[B,1,64] q, float[B,1,32] k, float[B,1,32] v, float[B,2,P,16] past_key, float[B,2,P,16] past_value, "
            "int32[B] seqlens, int32 total",
            17,
        ),
        leads_to=OTHERWISE,
    ),
    "int8 caches": Hinted(lambda: Case(quantised="PER_TENSOR", length="S").model(), assume=(words.SEPARATE_CACHES,)),
    "the loss of an indexer": Hinted(lambda: index_loss({}), "ascend", leads_to=OTHERWISE),
    "float32 for 310P": Hinted(
        plain("x = Identity(s) ", inputs=SIXTEEN, outputs="float[B,4,S,16] y"), "ascend", "310P"
    ),
    "a mask that is a bias for 310P": Hinted(
        plain(
            "f = Constant<value=float {-65504.0}>() h = Cast<to=10>(f) x = Where(m, s, h) ",
            "bool[B,1,S,T] m",
            inputs=SIXTEEN.replace("float", "float16"),
            outputs="float16[B,4,S,16] y",
        ),
        "ascend",
        "310P",
    ),
    "a bias for 310P": Hinted(
        plain(
            "x = Add(s, b) ",
            "float16[1,1,S,T] b",
            inputs=SIXTEEN.replace("float", "float16"),
            outputs="float16[B,4,S,16] y",
        ),
        "ascend",
        "310P",
        leads_to=OTHERWISE,
    ),
    "a soft cap": Hinted(plain("t = Tanh(s) x = Identity(t) "), "ascend"),
    "a soft cap behind a mask": Hinted(
        plain("a = Where(m, s, low) x = Tanh(a) ", "bool[B,1,S,T] m"), "ascend", leads_to=OTHERWISE
    ),
    "a limit of the product": Hinted(PROVOKED[Code.ILLEGAL].model, "ascend"),
}


def declined(model: onnx.ModelProto, options: Options) -> list[Block]:
    return [block for block in fuse(ir.from_proto(model), options).blocks if block.status == "declined"]


@pytest.mark.parametrize("name", HINTS)
def test_a_hint_that_names_an_option_leads_on(name: str) -> None:
    hinted = HINTS[name]
    model = hinted.model()
    before = declined(model, hinted.options())
    assert before and before[0].hint is not None, before
    for options in hinted.followed(before[0].hint):
        assert options != hinted.options(), before[0].hint
        after = declined(model, options)
        assert not after or hinted.leads_to == OTHERWISE, after
        assert all(block.hint != before[0].hint and block.reason != before[0].reason for block in after), after


def test_every_code_that_advises_an_option_is_followed() -> None:
    flags = {option.flag for option in options_of(Options).values()}
    advising = {code for code in Code if not flags.isdisjoint(re.findall(r"--[a-z-]+", code.advice or ""))}
    followed = {declined(hinted.model(), hinted.options())[0].code for hinted in HINTS.values()}
    assert advising and advising <= followed, f"HINTS lacks {advising - followed}"


PRINTED_BY = {"ascend": ("atc",), "ort": ("bench", "plan", "shard", "verify")}
"""The commands that print hints and write for one target alone. Sessions and the provider take what `plan` takes."""
SHOWN = {name: (hinted.model, hinted.options()) for name, hinted in HINTS.items()} | {
    code.value: (provoked.model, Options(provoked.target)) for code, provoked in PROVOKED.items()
}


@pytest.mark.parametrize("target", PRINTED_BY)
@pytest.mark.parametrize("name", SHOWN)
def test_a_hint_names_options_that_its_command_has(name: str, target: Target) -> None:
    """A hint that leads to another command names it."""
    model, options = SHOWN[name]
    product = DEFAULT_PRODUCT if target == "ascend" else None
    report = fuse(ir.from_proto(model()), replace(options, target=target, soc_version=product, opset=0, runtime=None))
    hints = [*(block.hint for block in report.blocks), *(line.hint for line in report.around)]
    hints += [missed.hint for block in report.blocks for missed in block.missed]
    for command in PRINTED_BY[target]:
        has = {option for action in parser().commands[command]._actions for option in action.option_strings}
        for hint in filter(None, hints):
            own = re.sub(r"`fa-compiler [^`]*`", "", hint)
            assert has.issuperset(re.findall(r"--[a-z-]+", own)), (command, hint)


@pytest.mark.parametrize("assume", [(), (words.BINARY_MASKS,)])
def test_masks_of_both_signs_are_not_told_to_be_binary(assume: tuple[str, ...]) -> None:
    """They are already, and that does not help; an assumption is advised only where it does."""
    masks = "h = Neg(low) a = Where(m, zero, low) c = Where(n, h, zero) d = Add(s, a) x = Add(d, c) "
    model = plain(masks, "bool[B,1,1,T] m, bool[B,1,1,T] n")()
    (block,) = declined(model, Options("ascend", assume=frozenset(assume)))
    assert (block.code, block.hint) == (Code.MASK_VALUE, ONE_SIGN_HINT)


def test_ort_is_not_advised_for_ort() -> None:
    """What the CPU kernels do not take either."""
    body = "tiny = Constant<value=float {1e-30}>() big = Constant<value=float {1e30}>() a = Mul(s, big) t = Tanh(a) "
    (block,) = declined(plain(body + "x = Mul(t, tiny) ")(), Options())
    assert (block.code, block.hint) == (Code.ILLEGAL, None)


@pytest.mark.parametrize(
    ("soc", "more"),
    [
        ("Ascend910A", ""),
        (
            "Ascend910B",
            "; Ascend910B without a digit is a chip of the first generation, and A2 is Ascend910B1 to Ascend910B4",
        ),
    ],
)
def test_a_product_without_the_operator_is_told_those_that_have_it(soc: str, more: str) -> None:
    model = plain("x = Identity(s) ", inputs=SIXTEEN, outputs="float[B,4,S,16] y")()
    (block,) = declined(model, Options("ascend", soc))
    assert block.code == Code.ILLEGAL
    assert block.hint == f"A2, A3 and 950 take it: give one of their SoC versions with --soc-version{more}"
    assert not declined(model, Options("ascend", "Ascend910B2"))


def test_a_type_that_the_product_lacks_is_told_to_be_converted() -> None:
    tensors = dict.fromkeys(("query", "key", "value"), TensorInfo("DT_FLOAT", (1, 2, 32, 64)))
    attrs = {"num_heads": 2, "input_layout": "BNSD", "pre_tokens": 2147483647}
    node = NodeView("PromptFlashAttention", "node", tensors, {}, attrs)
    (broken, *_) = verify(node, "310P")
    assert cure(node, "310P", None, broken) == "convert the model to float16"


def test_every_word_that_a_hint_names_is_followed() -> None:
    """The constants between braces behind --assume, in all sentences of passes/."""
    constants = {name for name, value in vars(words).items() if isinstance(value, str) and value in words.ASSUMPTIONS}
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "passes").rglob("*.py"))
    written = set(re.findall(r"--assume \{([A-Z_]+)\}", sources)) & constants
    followed = {
        word
        for hinted in HINTS.values()
        for block in declined(hinted.model(), hinted.options())[:1]
        for each in NAMED.findall(block.hint or "")
        for word in each.split(",")
    }
    of_fused = {"UNBROKEN", "SAME_SIZES", "ANY_LENGTH"}
    """What is named by lines about fused attention alone: test_missed.py and linear/test_graphs.py follow these."""
    assert {getattr(words, name) for name in written - of_fused} <= followed
