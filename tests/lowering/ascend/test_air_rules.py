"""Every rule of the checker: one change to a good file that breaks it, and the diagnostic that follows."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fa_compiler.lowering.ascend.air import (
    check_declared,
    check_edges,
    check_ends,
    check_names,
    check_prototypes,
    check_shapes,
    check_tensors,
)
from fa_compiler.lowering.ascend.air.check import NOT_AIR, check, check_message
from fa_compiler.lowering.ascend.air.decode import split_edge
from fa_compiler.lowering.ascend.air.encode import encode
from fa_compiler.lowering.ascend.air.files import read, write
from fa_compiler.lowering.ascend.air.schema import ModelDef
from fa_compiler.lowering.ascend.diagnostic import AirError, Rule, Severity
from fa_compiler.op_registry.ge_prototypes import ge_prototype
from fa_compiler.op_registry.spec import Kind
from tests.lowering.ascend.graphs import attention, branches

Change = Callable[[Any], object]


def op(proto: Any, name: str, graph: int = 0) -> Any:
    return next(entry for entry in proto.graph[graph].op if entry.name == name)


def rename(entry: Any, side: str, old: str, new: str) -> None:
    names = entry.attr[f"_{side}_name_key"].list.s
    names[list(names).index(old.encode())] = new.encode()


def swap(entry: Any, side: str, first: str, second: str) -> None:
    rename(entry, side, first, "swapping")
    rename(entry, side, second, first)
    rename(entry, side, "swapping", second)


def absent(desc: Any) -> None:
    desc.ClearField("dtype")
    desc.ClearField("layout")


def declare(
    proto: Any, names: Sequence[str] = (), kinds: Sequence[int] = (), more: tuple[str, int] | None = None
) -> None:
    """Write `_ir_inputs_*` on the attention: these names and kinds, or the prototype's and one more."""
    if more is not None:
        spec = ge_prototype("FlashAttentionScore")
        assert spec is not None
        numbers = {Kind.REQUIRED: 0, Kind.OPTIONAL: 1, Kind.DYNAMIC: 2}
        names = [*(entry.name for entry in spec.inputs), more[0]]
        kinds = [*(numbers[entry.kind] for entry in spec.inputs), more[1]]
    op(proto, "attn").attr["_ir_inputs_key"].list.s.extend(name.encode() for name in names)
    op(proto, "attn").attr["_ir_inputs_value"].list.i.extend(kinds)


OUTPUTS = ("softmax_max", "softmax_sum", "softmax_out", "attention_out")


def declare_outputs(proto: Any, names: Sequence[str], kinds: Sequence[int]) -> None:
    """Write `_ir_outputs_*` on the attention."""
    op(proto, "attn").attr["_ir_outputs_key"].list.s.extend(name.encode() for name in names)
    op(proto, "attn").attr["_ir_outputs_value"].list.i.extend(kinds)


def number_layout(desc: Any, number: int) -> None:
    desc.attr["format_for_int"].i = number


def newer_attr(proto: Any) -> None:
    spec = ge_prototype("FlashAttentionScore")
    assert spec is not None
    op(proto, "attn").attr["newer"].i = 1
    op(proto, "attn").attr["_ir_attr_names"].list.s.extend(name.encode() for name in (*spec.attr_names, "newer"))


def listed(proto: Any, *ends: str) -> None:
    proto.graph[0].output.extend(ends)


def many(*changes: Change) -> Change:
    def change(proto: Any) -> None:
        for one in changes:
            one(proto)

    return change


def set_list(attr: Any, field: str, kind: int) -> None:
    getattr(attr.list, field).extend([1])
    attr.list.val_type = kind


def ranges(desc: Any, *rows: tuple[int, ...]) -> None:
    for row in rows:
        desc.attr["shape_range"].list_list_int.list_list_i.add().list_i.extend(row)


ATTENTION: list[tuple[Rule, Change]] = [
    (check_edges.NO_GRAPH, lambda p: p.ClearField("graph")),
    (check_edges.SOURCE, lambda p: op(p, "attn").input.__setitem__(0, "nobody:0")),
    (check_edges.SOURCE, lambda p: op(p, "attn").input.append("nobody:-1")),
    (check_edges.OUTPUT, lambda p: op(p, "attn").input.__setitem__(0, "q:1")),
    (check_edges.ANCHOR, lambda p: op(p, "attn").input.append("q:0")),
    (check_edges.INDEX, lambda p: op(p, "attn").input.__setitem__(0, "q:x")),
    (check_edges.INDEX, lambda p: op(p, "attn").input.__setitem__(0, "q:")),
    (check_edges.INDEX, lambda p: op(p, "attn").input.__setitem__(0, "q:0abc")),
    (check_edges.INDEX, lambda p: op(p, "attn").input.__setitem__(0, "q:4294967296")),
    (check_edges.INDEX, lambda p: p.graph[0].input.append("q:x")),
    (check_edges.OUTPUT, lambda p: op(p, "attn").input.__setitem__(0, "q:4294967297")),
    (check_edges.NO_OPERATORS, lambda p: p.graph[0].ClearField("op")),
    (check_edges.NO_TYPE, lambda p: absent(op(p, "attn").input_desc[0])),
    (check_edges.NO_TYPE, lambda p: absent(op(p, "NetOutput").input_desc[0])),
    (check_edges.GRAPH_INPUT, lambda p: p.graph[0].input.append("nobody:0")),
    (check_edges.GRAPH_OUTPUT, lambda p: listed(p, "nobody:0")),
    (check_edges.GRAPH_OUTPUT_IGNORED, lambda p: listed(p, "attn")),
    (check_edges.GRAPH_OUTPUT_INDEX, lambda p: listed(p, "attn:9")),
    (check_edges.DUPLICATE, lambda p: p.graph[0].op.add().CopyFrom(op(p, "mask"))),
    (check_edges.UNLINKED, lambda p: op(p, "attn").input.__setitem__(0, "")),
    (check_edges.UNLINKED, lambda p: setattr(op(p, "attn").input_desc[3], "layout", "ND")),
    (check_edges.CYCLE, lambda p: op(p, "q").input.append("attn:-1")),
    (check_edges.NAME, lambda p: setattr(p.graph[0].op.add(), "type", "Data")),
    (check_names.MISSING, lambda p: [op(p, "attn").attr.pop(f"_input_name_{part}") for part in ("key", "value")]),
    (check_names.UNEQUAL, lambda p: op(p, "attn").attr["_input_name_value"].list.i.pop()),
    (check_names.PAST, lambda p: op(p, "attn").attr["_input_name_value"].list.i.__setitem__(0, 99)),
    (check_names.PAST_OUTPUTS, lambda p: op(p, "attn").attr["_output_name_value"].list.i.__setitem__(0, 99)),
    (check_names.TWICE, lambda p: op(p, "attn").attr["_input_name_value"].list.i.__setitem__(0, 1)),
    (check_names.UNNAMED, lambda p: drop(p)),
    (check_names.LOST, lambda p: op(p, "attn").attr["odd"].list.i.append(1)),
    (check_names.LOST, lambda p: op(p, "attn").attr["odd"].SetInParent()),
    (check_names.LOST, lambda p: op(p, "attn").input_desc[0].attr["odd"].list.i.append(1)),
    (check_names.MIXED, lambda p: set_list(op(p, "attn").attr["odd"], "i", 1)),
    (check_names.EXPRESSION, lambda p: setattr(op(p, "attn").attr["odd"], "expression", b"s0 + 1")),
    (check_names.EXPRESSION, lambda p: setattr(op(p, "attn").attr["odd"].func.attr["in"], "expression", b"s0")),
    (check_names.EXPRESSION, lambda p: setattr(op(p, "q").output_desc[0].attr["odd"], "expression", b"s0")),
    (check_names.EXPRESSION, lambda p: setattr(p.attr["odd"], "expression", b"s0")),
    (check_names.UNKNOWN_KIND, lambda p: set_list(op(p, "attn").attr["odd"], "i", 99)),
    (check_declared.INPUTS, lambda p: declare(p, ["query", "value"], [0, 0])),
    (check_declared.INPUTS, lambda p: declare(p, ["query", "key"], [0, 1])),
    (check_declared.DROPPED, lambda p: declare(p, ["query", "key"], [0])),
    (check_declared.DROPPED, lambda p: declare_outputs(p, ["softmax_max"], [])),
    (check_declared.OUTPUTS, lambda p: declare_outputs(p, ["softmax_sum"], [0])),
    (check_declared.OUTPUTS, lambda p: declare_outputs(p, ["softmax_max"], [1])),
    (check_declared.OUTPUTS, lambda p: declare_outputs(p, [*OUTPUTS, "newer"], [0] * 5)),
    (check_declared.INPUTS, lambda p: declare(p, more=("newer", 0))),
    (check_declared.ATTRS, lambda p: op(p, "attn").attr["_ir_attr_names"].list.s.extend([b"keep_prob"])),
    (check_declared.ATTRS, lambda p: newer_attr(p)),
    (check_names.GRAPH_NAME, lambda p: p.graph[0].ClearField("name")),
    (check_tensors.DIMS, lambda p: op(p, "q").output_desc[0].shape.dim.__setitem__(0, -3)),
    (check_tensors.TYPE, lambda p: setattr(op(p, "q").output_desc[0], "dtype", 77)),
    (check_tensors.LAYOUT, lambda p: setattr(op(p, "q").output_desc[0], "layout", "XYZ")),
    (check_tensors.LAYOUT_NUMBER, lambda p: number_layout(op(p, "attn").input_desc[0], 77)),
    (check_tensors.LAYOUT_NUMBER, lambda p: number_layout(op(p, "attn").input_desc[0], 0)),
    (check_tensors.RANGE, lambda p: ranges(op(p, "q").output_desc[0], (1, 4))),
    (check_tensors.RANGE, lambda p: ranges(op(p, "q").output_desc[0], (2, 4), (12, 12), (128, 128), (64, 64))),
    (check_tensors.CONST_FORM, lambda p: op(p, "mask").attr.pop("value")),
    (check_tensors.CONST_FORM, lambda p: op(p, "mask").input.append("q:-1")),
    (check_tensors.CONST_FORM, lambda p: setattr(op(p, "mask").output_desc[0], "dtype", 3)),
    (check_tensors.CONST_SIZE, lambda p: setattr(op(p, "mask").attr["value"].t, "data", b"few")),
    (
        check_tensors.CONSTANT_SIZE,
        many(
            lambda p: setattr(op(p, "mask"), "type", "Constant"),
            lambda p: setattr(op(p, "mask").attr["value"].t, "data", b"few"),
        ),
    ),
    (check_ends.GRAPH_TWICE, lambda p: setattr(p.graph.add(), "name", "fas_graph")),
    (check_ends.UNREACHABLE, lambda p: setattr(p.graph.add(), "name", "more")),
    (check_ends.SUBGRAPH_LOST, lambda p: op(p, "attn").subgraph_name.append("nowhere")),
    (check_ends.SHARED, lambda p: op(p, "attn").subgraph_name.append("fas_graph")),
    (check_ends.DATA_FORM, lambda p: op(p, "q").ClearField("input_desc")),
    (check_ends.DATA_FORM, lambda p: op(p, "q").input.append("k:0")),
    (check_ends.DATA_EQUAL, lambda p: setattr(op(p, "q").input_desc[0], "dtype", 1)),
    (check_ends.DATA_INDEX, lambda p: setattr(op(p, "q").attr["index"], "i", 2)),
    (check_ends.NO_OUTPUT, lambda p: p.graph[0].op.pop()),
    (check_ends.TWO_ENDS, lambda p: setattr(p.graph[0].op.add(), "type", "NetOutput")),
    (check_ends.DISAGREE, lambda p: listed(p, "attn:0")),
    (check_prototypes.UNKNOWN_OP, lambda p: setattr(op(p, "attn"), "type", "FlashAttentionScor")),
    (check_prototypes.INPUT_NAME, lambda p: rename(op(p, "attn"), "input", "query", "queri")),
    (check_prototypes.OUTPUT_NAME, lambda p: rename(op(p, "attn"), "output", "attention_out", "out")),
    (check_prototypes.REQUIRED_INPUT, lambda p: rename(op(p, "attn"), "input", "query", "q_start_idx")),
    (check_prototypes.REQUIRED_OUTPUT, lambda p: rename(op(p, "attn"), "output", "softmax_max", "more")),
    (check_prototypes.INPUT_ORDER, lambda p: swap(op(p, "attn"), "input", "query", "key")),
    (check_prototypes.OUTPUT_ORDER, lambda p: swap(op(p, "attn"), "output", "softmax_max", "softmax_sum")),
    (check_prototypes.DTYPE, lambda p: setattr(op(p, "attn").input_desc[0], "dtype", 7)),
    (check_prototypes.REQUIRED_ATTR, lambda p: op(p, "attn").attr.pop("head_num")),
    (check_prototypes.ATTR_KIND, lambda p: setattr(op(p, "attn").attr["scale_value"], "i", 1)),
    (check_shapes.INFERENCE, lambda p: setattr(op(p, "attn").attr["input_layout"], "s", b"TND")),
    (check_shapes.INFERENCE, lambda p: setattr(op(p, "attn").attr["scale_value"], "f", float("nan"))),
    (check_shapes.DECLARED, lambda p: op(p, "attn").output_desc[3].shape.dim.__setitem__(0, 5)),
    (check_prototypes.UNKNOWN_ATTR, lambda p: setattr(op(p, "attn").attr["head_nun"], "i", 1)),
]

BRANCHES: list[tuple[Rule, Change]] = [
    (check_ends.SUBGRAPH, lambda p: op(p, "choice").subgraph_name.__setitem__(0, "nowhere")),
    (check_ends.SHARED, lambda p: op(p, "choice").subgraph_name.__setitem__(0, "kept")),
    (check_ends.PARENT, lambda p: op(p, "inner", 1).attr.pop("_parent_node_index")),
    (check_ends.PARENT, lambda p: setattr(op(p, "inner", 1).attr["_parent_node_index"], "i", 7)),
    (check_ends.PARENT, lambda p: op(p, "NetOutput", 1).input_desc[0].attr.pop("_parent_node_index")),
    (check_shapes.NO_RULE, lambda p: setattr(op(p, "change", 1), "type", "Spence")),
    (check_prototypes.DYNAMIC, lambda p: rename(op(p, "choice"), "input", "input0", "input1")),
]


def drop(proto: Any) -> None:
    for part in ("key", "value"):
        values = getattr(op(proto, "attn").attr[f"_input_name_{part}"].list, "s" if part == "key" else "i")
        values.pop()


@pytest.mark.parametrize(
    ("make", "rule", "change"),
    [(attention, *row) for row in ATTENTION] + [(branches, *row) for row in BRANCHES],
    ids=[row[0].name for row in ATTENTION + BRANCHES],
)
def test_one_change_breaks_the_rule(make: Callable[[], Any], rule: Rule, change: Change) -> None:
    proto = encode(make())
    assert check_message(proto) == []
    change(proto)
    diagnostics = check_message(ModelDef.FromString(proto.SerializeToString()))
    found = [diagnostic for diagnostic in diagnostics if diagnostic.rule == rule.name]
    assert found, [str(diagnostic) for diagnostic in diagnostics]
    assert found[0].severity is rule.severity
    assert found[0].message
    assert found[0].hint


def test_files_of_weights(tmp_path: Path) -> None:
    place = tmp_path / "m.air"
    write(attention(), place, inline_limit=0)
    proto = ModelDef.FromString(place.read_bytes())
    location = op(proto, "mask").attr["location"].s
    for elsewhere, rule in (("/etc/passwd", check_tensors.WEIGHT_PLACE), ("../x", check_tensors.WEIGHT_PLACE)):
        op(proto, "mask").attr["location"].s = elsewhere.encode()
        place.write_bytes(proto.SerializeToString())
        assert [diagnostic.rule for diagnostic in check(place)] == [rule.name]
    op(proto, "mask").attr["location"].s = b"air_weight/elsewhere"
    place.write_bytes(proto.SerializeToString())
    diagnostic = check(place)[0]
    assert (diagnostic.rule, diagnostic.severity) == (check_tensors.WEIGHT_FILE.name, Severity.REJECTED)
    op(proto, "mask").attr["location"].s = location
    op(proto, "mask").attr["length"].i += 1
    place.write_bytes(proto.SerializeToString())
    broken = [check_tensors.WEIGHT_LENGTH.name, check_tensors.CONST_SIZE.name]
    assert [diagnostic.rule for diagnostic in check(place)] == broken


@pytest.mark.parametrize(
    ("text", "edge"),
    [
        ("a:b:1", ("a:b", 1)),
        ("a:x", ("a", 0)),
        ("a:", ("a", 0)),
        ("a:0abc", ("a", 0)),
        ("a: 2", ("a", 2)),
        ("a:+2", ("a", 2)),
        ("a:-7", ("a", -1)),
        ("a:4294967296", ("a", 0)),
        ("a:4294967299", ("a", 3)),
        ("a:2147483648", ("a", -1)),
        ("a:-4294967295", ("a", 1)),
        ("a:99999999999999999999", ("a", -1)),
        ("a:" + "9" * 5000, ("a", -1)),
        ("a:" + "0" * 5000 + "1", ("a", 1)),
        ("a", None),
        ("", None),
    ],
)
def test_an_index_is_read_as_the_loader_reads_it(text: str, edge: tuple[str, int] | None) -> None:
    """strtol into 32 bits."""
    assert split_edge(text) == edge


def test_a_file_may_declare_the_prototype_it_was_written_with() -> None:
    proto = encode(attention())
    declare(proto, more=("newer", 1))
    assert check_message(proto) == []


def test_the_number_of_the_same_layout_is_no_finding() -> None:
    """GE writes both, and in the bytes behind the first one how the layout is split into groups."""
    proto = encode(attention())
    number_layout(op(proto, "attn").input_desc[0], 2 | 16 << 8)
    op(proto, "attn").input_desc[3].layout = "FORMAT_RESERVED"
    number_layout(op(proto, "attn").input_desc[3], 40)
    op(proto, "mask").output_desc[0].layout = "NC1HWC0_C04"
    number_layout(op(proto, "mask").output_desc[0], 12)
    assert "layout-number" not in {diagnostic.rule for diagnostic in check_message(proto)}


def test_a_file_without_its_subgraph_is_not_read() -> None:
    """GE takes a file with one graph, but an operator without its body is no model to go on with."""
    proto = encode(attention())
    op(proto, "attn").subgraph_name.append("nowhere")
    assert "rejected" not in {str(diagnostic.severity) for diagnostic in check_message(proto)}
    with pytest.raises(AirError, match="its subgraph 'nowhere' is not in the file"):
        decoded(proto)


def decoded(proto: Any) -> object:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "m.air"
        place.write_bytes(proto.SerializeToString())
        return read(place)


def test_an_unknown_operator_is_no_list_of_all() -> None:
    proto = encode(attention())
    op(proto, "attn").type = "ZZZZZZZZ"
    assert max(len(diagnostic.message) for diagnostic in check_message(proto)) < 200


def test_bytes_that_are_no_model(tmp_path: Path) -> None:
    place = tmp_path / "m.air"
    place.write_bytes(b"\x07garbage")
    diagnostic = check(place)[0]
    assert (diagnostic.rule, diagnostic.severity) == (NOT_AIR.name, Severity.REJECTED)


def test_every_rule_has_a_test() -> None:
    modules = (check_declared, check_edges, check_ends, check_names, check_prototypes, check_shapes, check_tensors)
    rules = {value.name for module in modules for value in vars(module).values() if isinstance(value, Rule)}
    weights = (check_tensors.WEIGHT_FILE, check_tensors.WEIGHT_PLACE, check_tensors.WEIGHT_LENGTH)
    elsewhere = {rule.name for rule in weights}
    assert rules == {rule.name for rule, _ in ATTENTION + BRANCHES} | elsewhere
