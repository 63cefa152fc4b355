"""The JSON of `atc --singleop`: verdicts of ATC's parser, every rule, and what is written is what is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fa_compiler.lowering.ascend.air.check import ACCEPTED, REJECTED, verdict
from fa_compiler.lowering.ascend.diagnostic import Rule
from fa_compiler.lowering.ascend.graph import Attr, Op, Output, TensorDesc, absent
from fa_compiler.lowering.ascend.single_op import check, check_text, from_json, rules, to_json
from tests.lowering.ascend.graphs import attention, weight
from tests.lowering.ascend.vector_table import verdicts


@pytest.mark.parametrize(("file", "expected"), verdicts(".json"))
def test_verdict(vectors: Path, file: str, expected: str) -> None:
    """The verdict ATC's own parser gave. There are no differences."""
    diagnostics = check(vectors / file)
    assert verdict(diagnostics) == expected, [str(diagnostic) for diagnostic in diagnostics]


@pytest.mark.parametrize("file", [file for file, expected in verdicts(".json") if expected == ACCEPTED])
def test_good_samples_are_read_and_written_again(vectors: Path, file: str) -> None:
    entry = json.loads((vectors / file).read_text(encoding="utf-8"))[0]
    if file.endswith("bad_const_bool.json"):
        entry["input_desc"] = [{k: v for k, v in t.items() if not k.startswith("const")} for t in entry["input_desc"]]
    op, constants = from_json(entry)
    again, values = from_json(to_json(op, op.name, constants))
    again.name = op.name
    assert again == op
    assert values == constants
    assert verdict(check_text(json.dumps([to_json(op, op.name, constants)]).encode())) == ACCEPTED


def fused() -> dict[str, Any]:
    return to_json(attention().root.ops[-2], "fas")


def test_what_is_written() -> None:
    entry = fused()
    assert [tensor["name"] for tensor in entry["input_desc"]] == [
        *("query", "key", "value", "real_shift", "drop_mask", "padding_mask", "atten_mask")
    ]
    assert entry["input_desc"][3] == {"name": "real_shift", "type": "UNDEFINED", "format": "RESERVED", "shape": []}
    assert entry["input_desc"][6] == {"name": "atten_mask", "type": "bool", "format": "ND", "shape": [128, 128]}
    assert len(entry["output_desc"]) == 4
    assert {"name": "scale_value", "type": "float", "value": 0.125} in entry["attr"]
    assert check_text(json.dumps([entry]).encode()) == []


def test_open_sizes_have_a_range_each() -> None:
    op = Op("add", "Add", [Output("a"), Output("b")])
    op.input_descs = [
        TensorDesc("x1", "DT_FLOAT", (-1, 4, -1), "ND", ((1, 8), (4, 4), (2, -1))),
        TensorDesc("x2", "DT_FLOAT", None),
    ]
    op.output_descs = [TensorDesc("y", "DT_FLOAT", (-1, 4, -1))]
    entry = to_json(op, "add/1")
    assert entry["name"] == "add_1"
    assert entry["input_desc"][0]["shape_range"] == [[1, 8], [2, -1]]
    assert entry["input_desc"][1]["shape"] == [-2]
    assert entry["output_desc"][0]["shape_range"] == [[1, -1], [1, -1]]
    assert check_text(json.dumps([entry]).encode()) == []
    again, _ = from_json(entry)
    assert again.input_descs == op.input_descs


def test_constants_and_dynamic_inputs() -> None:
    op = Op("fia", "FusedInferAttentionScore", [Output("q"), Output("k"), Output("v"), None, None, Output("lengths")])
    shape = (1, 12, 128, 64)
    op.input_descs = [TensorDesc(name, "DT_FLOAT16", shape) for name in ("query", "key0", "value0")]
    op.input_descs += [absent("pse_shift"), absent("atten_mask")]
    op.input_descs.append(TensorDesc("actual_seq_lengths", "DT_INT64", (1,)))
    op.output_descs = [TensorDesc("attention_out", "DT_FLOAT16", shape), TensorDesc("softmax_lse", "DT_FLOAT", (1,))]
    op.attrs = {"num_heads": Attr("Int", 12), "input_layout": Attr("String", "BNSD")}
    lengths = {"actual_seq_lengths": weight(np.array([77]), "DT_INT64")}
    entry = to_json(op, "fia", lengths)
    assert entry["input_desc"][5]["const_value"] == [77]
    assert check_text(json.dumps([entry]).encode()) == []
    again, values = from_json(entry)
    assert [desc.name for desc in again.input_descs] == [desc.name for desc in op.input_descs]
    assert values["actual_seq_lengths"].load() == lengths["actual_seq_lengths"].load()


def test_what_atc_has_no_word_for() -> None:
    op = Op("q", "Relu", [Output("a")], [TensorDesc("x", "DT_QINT8", (1,))], [TensorDesc("y", "DT_QINT8", (1,))])
    with pytest.raises(ValueError, match="x is DT_QINT8"):
        to_json(op, "q")
    op = Op("c", "Const", [], [], [], {"value": Attr("Tensor", weight(np.zeros(1), "DT_DOUBLE"))})
    with pytest.raises(ValueError, match="value is of type Tensor"):
        to_json(op, "c")


Change = Callable[[list[Any]], object]

BROKEN: list[tuple[Rule, Change]] = [
    (rules.KEY, lambda d: d.__setitem__(0, 1)),
    (rules.KEY, lambda d: d.__setitem__(0, {"compile_flag": "x"})),
    (rules.NO_OP, lambda d: d[0].pop("op")),
    (rules.NO_OP, lambda d: d[0].__setitem__("op", 3)),
    (rules.KEY, lambda d: d[0].__setitem__("input_desc", {})),
    (rules.KEY, lambda d: d[0].__setitem__("name", 1)),
    (rules.KEY, lambda d: d[0]["input_desc"][0].pop("shape")),
    (rules.KEY, lambda d: d[0]["input_desc"][0].pop("type")),
    (rules.KEY, lambda d: d[0]["input_desc"][0].__setitem__("shape", [1.5])),
    (rules.KEY, lambda d: d[0]["input_desc"][0].__setitem__("shape_range", [[1]])),
    (rules.KEY, lambda d: d[0]["input_desc"][0].__setitem__("is_const", 1)),
    (rules.KEY, lambda d: d[0]["input_desc"][0].update(is_const=True, const_value=[[1]])),
    (rules.KEY, lambda d: d[0]["attr"][0].pop("value")),
    (rules.KEY, lambda d: d[0]["attr"][0].update(type="int", value="12")),
    (rules.KEY, lambda d: d[0]["attr"][0].update(type="data_type", value="DT_NONE")),
    (rules.KEY, lambda d: d[0]["attr"][0].update(type="float", value=1e39)),
    (rules.NAME, lambda d: d[0].__setitem__("name", "..")),
    (rules.WORDS, lambda d: d[0]["input_desc"][0].__setitem__("type", "bf16")),
    (rules.WORDS, lambda d: d[0]["input_desc"][0].__setitem__("format", "NHDW")),
    (rules.HALF_ABSENT, lambda d: d[0]["input_desc"][3].__setitem__("format", "ND")),
    (rules.ABSENT_OUTPUT, lambda d: d[0]["output_desc"][0].update(type="UNDEFINED", format="RESERVED")),
    (rules.RANGE, lambda d: d[0]["input_desc"][0].__setitem__("shape", [-1, 12, 128, 64])),
    (rules.RANGE, lambda d: d[0]["input_desc"][0].__setitem__("shape", [-3])),
    (rules.INPUTS, lambda d: d[0].__setitem__("input_desc", d[0]["input_desc"][:2])),
    (rules.OUTPUTS, lambda d: d[0].__setitem__("output_desc", d[0]["output_desc"][:3])),
    (rules.ATTR_TYPE, lambda d: d[0]["attr"][0].__setitem__("type", "int32")),
    (rules.CONST_TYPE, lambda d: d[0]["input_desc"][6].update(is_const=True, const_value=[1])),
    (rules.CONST_SIZE, lambda d: d[0]["input_desc"][0].update(is_const=True, const_value=[1])),
    (rules.CONSTRAINT, lambda d: next(attr for attr in d[0]["attr"] if attr["name"] == "head_num").update(value=3)),
]


@pytest.mark.parametrize(("rule", "change"), BROKEN, ids=[rule.name for rule, _ in BROKEN])
def test_one_change_breaks_the_rule(rule: Rule, change: Change) -> None:
    document = [fused()]
    change(document)
    diagnostics = [
        diagnostic for diagnostic in check_text(json.dumps(document).encode()) if diagnostic.rule == rule.name
    ]
    assert diagnostics
    assert diagnostics[0].severity is rule.severity


def test_what_is_no_array() -> None:
    for text, rule in ((b"{", rules.NOT_JSON), (b"{}", rules.NOT_ARRAY), (b"\xff", rules.NOT_JSON)):
        diagnostics = check_text(text)
        assert (verdict(diagnostics), diagnostics[0].rule) == (REJECTED, rule.name)


def test_what_is_no_operator_is_named_in_words_of_json() -> None:
    for data, words in (
        (b'{"op": "Add"}', "the file holds an object"),
        (b"1", "the file holds a number"),
        (b"[[]]", "an array stands where an operator should"),
        (b"\x08\x9c\xff", "the file is not JSON, and no text at all"),
    ):
        (diagnostic,) = check_text(data)
        assert diagnostic.message == words


def test_every_rule_has_a_test() -> None:
    known = {value.name for value in vars(rules).values() if isinstance(value, Rule)}
    assert known == {rule.name for rule, _ in BROKEN} | {rules.NOT_JSON.name, rules.NOT_ARRAY.name}


def test_constraints_need_a_right_prototype() -> None:
    """A file that breaks the prototype has no constraints to speak of; what only some products refuse is no fault."""
    document = [fused()]
    heads = next(attr for attr in document[0]["attr"] if attr["name"] == "head_num")
    heads.update(name="heads", value=3)
    assert rules.CONSTRAINT.name not in {found.rule for found in check_text(json.dumps(document).encode())}
    wide = [fused()]
    for tensor in (*wide[0]["input_desc"], *wide[0]["output_desc"]):
        if tensor["type"] == "float16":
            tensor["type"] = "bfloat16"
    assert check_text(json.dumps(wide).encode()) == []


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_does_not_have(word: str) -> None:
    """Python reads them, ATC's parser does not."""
    text = json.dumps([fused()]).replace("0.125", word)
    (diagnostic,) = check_text(text.encode())
    assert diagnostic.rule == rules.NOT_JSON.name
    assert word in diagnostic.message
