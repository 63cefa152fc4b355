"""`single-op` with whatever words a user may type: a file that ATC takes, or one sentence that says what to change."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fa_compiler.__main__ import main
from fa_compiler.atc.single import by_hand
from fa_compiler.errors import InputError
from fa_compiler.lowering.ascend.infer import can_infer
from fa_compiler.lowering.ascend.single_op.spelling import TYPES, type_spelling
from fa_compiler.op_registry.errors import RegistryError
from fa_compiler.op_registry.ge_prototypes import ge_operators, ge_prototype
from fa_compiler.op_registry.ge_types import input_types
from fa_compiler.op_registry.spec import Kind, OpSpec

SHAPES = ("", "4", "2,3", "1,3,8,8", "-1,4", "1~4,8", "0", "1,1,8,8,8")
NUMBERS = ("0", "1", "2", "-1", "7", "4611686018427387904")
VALUES = {
    "Int": NUMBERS,
    "Float": ("0.5", "1e40", "nan", "x"),
    "Bool": ("true", "2"),
    "String": ("SAME", "CALCULATED", "BSH", "TND", "", "x"),
    "Type": ("float16", "DT_NONE"),
    "ListBool": ("true",),
    "ListString": ("a,b", ""),
    "ListFloat": ("1,2", "x"),
    "ListListInt": ("[[1,2]]", "[1]"),
}


@dataclass
class Words:
    """What is typed for one operator."""

    op_type: str
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    attrs: list[str] = field(default_factory=list)
    constants: list[str] = field(default_factory=list)

    def given(self) -> str | None:
        """The file's content; None where the words are refused."""
        try:
            return by_hand(self.op_type, self.inputs, self.outputs, self.attrs, self.constants, None, None)
        except (InputError, RegistryError) as error:
            assert "\n" not in str(error)
            return None


def drawn(spec: OpSpec, draw: random.Random, legal: bool) -> Words:
    """Words for an operator; the types are among those of the prototype or any."""
    words = Words(spec.name)
    for entry in spec.inputs:
        if entry.kind is Kind.OPTIONAL and draw.random() < 0.5:
            continue
        known = [word for name in input_types(spec, entry.name) or () if (word := type_spelling(name))]
        for name in _names(entry.name, entry.kind, draw):
            word = draw.choice(known if legal and known else list(TYPES))
            words.inputs.append(f"{name}={draw.choice(SHAPES)}:{word}")
            if draw.random() < 0.2:
                words.constants.append(f"{name}={','.join(draw.choices(NUMBERS, k=draw.randint(0, 4)))}")
    for attr in spec.attrs:
        if attr.required or draw.random() < 0.5:
            lists = ",".join(draw.choices(NUMBERS, k=draw.choice((0, 1, 2, 4, 4))))
            words.attrs.append(f"{attr.name}={draw.choice(VALUES.get(attr.type, (lists,)))}")
    if draw.random() < 0.7:
        for output in spec.outputs:
            for name in _names(output.name, output.kind, draw):
                words.outputs.append(f"{name}={draw.choice(SHAPES)}:{draw.choice(list(TYPES))}")
    return words


def _names(name: str, kind: Kind, draw: random.Random) -> Iterator[str]:
    if kind is Kind.DYNAMIC:
        yield from (f"{name}{number}" for number in range(draw.randint(1, 2)))
    else:
        yield name


@pytest.mark.parametrize("seed", range(4))
def test_words_of_all_operators(seed: int) -> None:
    """What is written passes our own check, or else `by_hand` would raise an internal error."""
    draw = random.Random(seed)
    written = 0
    for name in ge_operators():
        spec = ge_prototype(name)
        assert spec is not None
        for _ in range(3 if can_infer(name) else 1):
            written += drawn(spec, draw, legal=seed % 2 == 0).given() is not None
    assert written > 100


def test_a_wrong_type_is_answered_with_the_types_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "op.json"
    assert main(["single-op", "Abs", "--input", "x=2:uint8", "-o", str(out)]) == 2
    said = capsys.readouterr().err
    assert "input x is uint8, Abs takes float16, bfloat16, float, double, int8, int16, int32, int64" in said
    assert not out.exists()


def test_dynamic_outputs_stand_where_the_prototype_has_them() -> None:
    inputs = ["params_nested_splits=3:int64", "params_dense_values=2:int64", "indices=2:int64"]
    outputs = ["output_nested_splits0=2:int64", "output_dense_values=2:int64"]
    text = Words("RaggedGather", inputs, outputs, ["Tsplits=int64"]).given()
    assert text is not None
    names = [tensor["name"] for tensor in json.loads(text)[0]["output_desc"]]
    assert names == ["output_nested_splits0", "output_dense_values"]


@pytest.mark.parametrize(
    ("words", "phrase"),
    [
        (
            Words(
                "MaxPoolV3",
                ["x=1,1,4,4:float16"],
                attrs=["ksize=1,1,1,1", "strides=1,1,1,1", "pads=4611686018427387904,4611686018427387904,0,0"],
            ),
            "a size of its output is 9223372036854775812",
        ),
        (
            Words("AdaCast", ["x=1~4,8:int16"], ["y=2,3:int16"], constants=["x="]),
            "the sizes of --input x=... must all be numbers",
        ),
    ],
    ids=["huge", "open constant"],
)
def test_what_fits_no_file_is_refused(words: Words, phrase: str) -> None:
    with pytest.raises(InputError) as error:
        by_hand(words.op_type, words.inputs, words.outputs, words.attrs, words.constants, None, None)
    assert phrase in str(error.value)


def test_an_unknown_layout_breaks_a_numbered_constraint() -> None:
    inputs = [f"{name}=1,8,8,16:float16" for name in ("query", "key", "value")]
    for layout in ("SAME", "BNSD_XYZ", "BSNN"):
        attrs = ["num_heads=2", f"input_layout={layout}"]
        with pytest.raises(InputError, match="input_layout"):
            by_hand("PromptFlashAttention", inputs, ["attention_out=1,8,8,16:float16"], attrs, [], "Ascend910B2", None)


def test_what_no_product_runs_is_refused_without_a_product() -> None:
    inputs = [f"{name}=1,2,128,64:float16" for name in ("query", "key", "value")]
    with pytest.raises(InputError, match="cannot run on any product in this form: FA.3 .* head_num is 3, expected 2"):
        by_hand("FlashAttentionScore", inputs, [], ["head_num=3", "input_layout=BNSD"], [], None, None)
    by_hand("FlashAttentionScore", inputs, [], ["head_num=2", "input_layout=BNSD"], [], None, None)


def test_each_fault_is_named() -> None:
    inputs = [f"{name}=1,2,128,64:float16" for name in ("query", "key", "value")]
    attrs = ["head_num=3", "input_layout=BNSD", "keep_prob=2.0"]
    with pytest.raises(InputError, match="not available on .*310P.*; FA.3 .*head_num is 3.*; FA.7 .*keep_prob is 2.0"):
        by_hand("FlashAttentionScore", inputs, [], attrs, [], "Ascend310P3", None)


def test_an_operator_that_ascend_does_not_have() -> None:
    with pytest.raises(InputError, match="for ONNX Runtime, which no Ascend product has"):
        by_hand("FlashLinearAttention", ["query=1,4,8:float16"], [], [], [], None, None)
