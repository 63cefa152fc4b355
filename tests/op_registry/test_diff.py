"""The diff against headers written here: one change each, and what it is called."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from fa_compiler.op_registry import RegistryError, UnknownVariant, get, names
from fa_compiler.op_registry.commands import diff_paths
from fa_compiler.op_registry.diff import Change, Difference, diff_op
from fa_compiler.op_registry.reg_op import parse, print_op

RING = print_op(get("RingAttentionUpdate"))
ATTENTION = print_op(get("FlashAttentionScore", "8.0"))
ALL = {name: print_op(get(name)) for name in names()}


def compare(text: str) -> list[Difference]:
    (theirs,) = parse(text)
    return diff_op(get(theirs.name), theirs, "a.h:1")


@pytest.fixture
def cann(tmp_path: Path) -> Path:
    """A folder as an installation has it: our own prototypes, some files in a sub-folder."""
    (tmp_path / "inc").mkdir()
    for number, (name, text) in enumerate(sorted(ALL.items())):
        folder = tmp_path / "inc" if number % 2 else tmp_path
        (folder / f"{name.lower()}_proto.h").write_text(f"namespace ge {{\n{text}\n}}\n")
    (tmp_path / "readme.txt").write_text("REG_OP(broken")
    return tmp_path


def test_our_own_prototypes_do_not_differ(cann: Path) -> None:
    assert diff_paths([cann]) == []
    assert diff_paths([str(path) for path in cann.rglob("*.h")]) == []


CHANGES = [
    (
        ".INPUT(cur_softmax_sum, TensorType({DT_FLOAT32}))\n    ",
        "",
        (Change.MISSING_INPUT, "cur_softmax_sum", "required", "", True),
    ),
    (
        ".OPTIONAL_INPUT(actual_seq_qlen, TensorType({DT_INT64}))",
        ".OPTIONAL_INPUT(actual_seq_qlen, TensorType({DT_INT64}))\n    .OPTIONAL_INPUT(more, TensorType({DT_BOOL}))",
        (Change.EXTRA_INPUT, "more", "", "optional", False),
    ),
    (
        ".OPTIONAL_INPUT(actual_seq_qlen, TensorType({DT_INT64}))",
        ".OPTIONAL_INPUT(actual_seq_qlen, TensorType({DT_INT64}))\n    .INPUT(more, TensorType({DT_BOOL}))",
        (Change.EXTRA_INPUT, "more", "", "required", True),
    ),
    (
        ".OPTIONAL_INPUT(actual_seq_qlen",
        ".INPUT(actual_seq_qlen",
        (Change.INPUT_KIND, "actual_seq_qlen", "optional", "required", True),
    ),
    (
        ".INPUT(prev_softmax_max",
        ".OPTIONAL_INPUT(prev_softmax_max",
        (Change.INPUT_KIND, "prev_softmax_max", "required", "optional", False),
    ),
    (
        ".INPUT(cur_softmax_max",
        ".DYNAMIC_INPUT(cur_softmax_max",
        (Change.INPUT_KIND, "cur_softmax_max", "required", "dynamic", True),
    ),
    (
        ".OPTIONAL_INPUT(actual_seq_qlen, TensorType({DT_INT64}))",
        ".OPTIONAL_INPUT(actual_seq_qlen, TensorType({DT_INT32}))",
        (Change.INPUT_TYPES, "actual_seq_qlen", "DT_INT64", "DT_INT32", True),
    ),
    (
        ".OPTIONAL_INPUT(actual_seq_qlen, TensorType({DT_INT64}))",
        ".OPTIONAL_INPUT(actual_seq_qlen, TensorType({DT_INT32, DT_INT64}))",
        (Change.INPUT_TYPES, "actual_seq_qlen", "DT_INT64", "DT_INT32, DT_INT64", False),
    ),
    (
        ".OPTIONAL_INPUT(actual_seq_qlen, TensorType({DT_INT64}))",
        ".OPTIONAL_INPUT(actual_seq_qlen, TensorType::IndexNumberType())",
        (Change.INPUT_TYPES, "actual_seq_qlen", "TensorType({DT_INT64})", "TensorType::IndexNumberType()", False),
    ),
    (
        "    .OUTPUT(softmax_sum, TensorType({DT_FLOAT32}))\n",
        "",
        (Change.MISSING_OUTPUT, "softmax_sum", "required", "", True),
    ),
    (
        "    .ATTR(input_layout",
        "    .OUTPUT(extra, TensorType({DT_FLOAT}))\n    .ATTR(input_layout",
        (Change.EXTRA_OUTPUT, "extra", "", "required", False),
    ),
    (
        ".OUTPUT(softmax_max, TensorType({DT_FLOAT32}))",
        ".OUTPUT(softmax_max, TensorType({DT_FLOAT16}))",
        (Change.OUTPUT_TYPES, "softmax_max", "DT_FLOAT", "DT_FLOAT16", True),
    ),
    (
        ".OUTPUT(softmax_max",
        ".DYNAMIC_OUTPUT(softmax_max",
        (Change.OUTPUT_KIND, "softmax_max", "required", "dynamic", True),
    ),
    (
        '    .ATTR(input_softmax_layout, String, "")\n',
        "",
        (Change.MISSING_ATTR, "input_softmax_layout", 'String, default ""', "", True),
    ),
    (
        "    .OP_END",
        "    .ATTR(more, Bool, true)\n    .OP_END",
        (Change.EXTRA_ATTR, "more", "", "Bool, default true", False),
    ),
    (
        "    .OP_END",
        "    .REQUIRED_ATTR(more, Bool)\n    .OP_END",
        (Change.EXTRA_ATTR, "more", "", "Bool, required", True),
    ),
    (
        '.ATTR(input_layout, String, "SBH")',
        ".ATTR(input_layout, Int, 1)",
        (Change.ATTR_TYPE, "input_layout", "String", "Int", True),
    ),
    (
        '.ATTR(input_layout, String, "SBH")',
        '.ATTR(input_layout, String, "BSH")',
        (Change.ATTR_DEFAULT, "input_layout", '"SBH"', '"BSH"', False),
    ),
    (
        '.ATTR(input_layout, String, "SBH")',
        ".REQUIRED_ATTR(input_layout, String)",
        (Change.ATTR_REQUIRED, "input_layout", 'String, default "SBH"', "String, required", False),
    ),
]


@pytest.mark.parametrize(("old", "new", "expected"), CHANGES)
def test_one_change_is_one_difference(old: str, new: str, expected: tuple[Change, str, str, str, bool]) -> None:
    assert RING.count(old) == 1
    (difference,) = compare(RING.replace(old, new))
    assert (
        difference.change,
        difference.name,
        difference.ours,
        difference.theirs,
        difference.serious,
    ) == expected
    assert difference.name in difference.sentence
    assert str(difference) == f"a.h:1: RingAttentionUpdate: {difference.sentence}"


def test_every_change_of_one_operator_is_tested() -> None:
    elsewhere = {
        Change.MISSING_OP,
        Change.UNREADABLE,
        Change.NOT_COMPARED,
        Change.OTHER_VARIANT,
        Change.INPUT_ORDER,
        Change.OUTPUT_ORDER,
    }
    assert {expected[0] for _, _, expected in CHANGES} == set(Change) - elsewhere


def swapped(text: str, first: str, second: str) -> str:
    lines = text.splitlines()
    i, j = (next(n for n, line in enumerate(lines) if f"({name}," in line) for name in (first, second))
    lines[i], lines[j] = lines[j], lines[i]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("first", "second", "change"),
    [("prev_softmax_max", "cur_softmax_max", Change.INPUT_ORDER), ("attn_out", "softmax_sum", Change.OUTPUT_ORDER)],
)
def test_another_order_is_one_difference(first: str, second: str, change: Change) -> None:
    (difference,) = compare(swapped(RING, first, second))
    assert (difference.change, difference.name, difference.serious) == (change, first, True)
    assert difference.theirs.startswith(second) or second in difference.theirs


def test_the_spelling_of_types_and_defaults_is_no_difference() -> None:
    text = RING.replace("DT_FLOAT32", "DT_FLOAT").replace("TensorType(", "ge::TensorType(")
    assert compare(text) == []
    assert compare(text.replace("ge::TensorType({DT_INT64})", "TensorType::ALL()")) == []


def test_a_header_that_is_another_variant_is_recognised() -> None:
    found = compare(ATTENTION)
    assert found[0].change is Change.OTHER_VARIANT
    assert not found[0].serious
    assert "compare with --cann 8.0" in found[0].sentence
    assert {d.change for d in found[1:]} == {Change.MISSING_INPUT, Change.MISSING_ATTR, Change.INPUT_TYPES}


def test_a_version_is_compared_with_its_variant(tmp_path: Path) -> None:
    header = tmp_path / "ops.h"
    header.write_text(f"{ATTENTION}\n{RING}\n")
    found = diff_paths([header], cann="8.0")
    assert [(d.op, d.change) for d in found if d.op == "FlashAttentionScore"] == []
    assert (Change.NOT_COMPARED, "RingAttentionUpdate") in {(d.change, d.op) for d in found}
    assert {d.op for d in found if d.change is Change.MISSING_OP} == {
        "FlashAttentionScoreGrad",
        "FusedInferAttentionScore",
    }


def test_missing_and_unreadable_operators(cann: Path) -> None:
    next(cann.rglob("attentionupdate_proto.h")).write_text("// gone\n")
    ring = next(cann.rglob("ringattentionupdate_proto.h"))
    ring.write_text(ring.read_text(encoding="utf-8").replace(".OUTPUT(attn_out", ".OUTPT(attn_out"))
    found = diff_paths([cann])
    assert [(d.op, d.change, d.where) for d in found] == [
        ("AttentionUpdate", Change.MISSING_OP, ""),
        ("RingAttentionUpdate", Change.UNREADABLE, f"{ring}:10"),
    ]
    assert "unknown macro .OUTPT" in found[1].sentence
    assert all(d.serious for d in found)


def test_other_operators_and_copies_are_not_looked_at(cann: Path) -> None:
    (cann / "abs.h").write_text("REG_OP(Abs).NONSENSE(x)\n")
    (cann / "copy.h").write_text(ALL["AttentionUpdate"])
    assert diff_paths([cann]) == []
    (cann / "changed.h").write_text(ALL["AttentionUpdate"].replace("(sp, Int)", "(sp, Float)"))
    assert [(d.where, d.change) for d in diff_paths([cann])] == [(f"{cann / 'changed.h'}:1", Change.ATTR_TYPE)]


def test_a_folder_that_cannot_be_read_is_an_error(cann: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prototypes would be missed without a word."""

    def scandir(folder: str) -> object:
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(RegistryError, match=f"cannot read {re.escape(str(cann))}: Permission denied"):
        diff_paths([cann])


def test_nothing_to_compare_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match="no such file or folder; the prototypes of CANN.* set_env.sh sets"):
        diff_paths([tmp_path / "none"])
    with pytest.raises(RegistryError, match="no REG_OP prototype in"):
        diff_paths([tmp_path])
    (tmp_path / "a.h").write_text(RING)
    with pytest.raises(UnknownVariant, match="neither a CANN version"):
        diff_paths([tmp_path], cann="latest")


def test_the_operators_of_this_package_are_in_no_header(tmp_path: Path) -> None:
    """An installation that has all operators of CANN has no difference."""
    own = {"FlashLinearAttention", "ShortConvolution"}
    (tmp_path / "all.h").write_text("\n".join(text for name, text in ALL.items() if name not in own))
    assert diff_paths([tmp_path]) == []
