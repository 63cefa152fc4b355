"""Mutated files never crash what reads, checks, lists and draws them; they give findings or one error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_compiler.lowering.ascend.air import AirError, parse, serialise
from fa_compiler.lowering.ascend.air.check import NOT_AIR, REJECTED, check_message, verdict
from fa_compiler.lowering.ascend.air.draw import draw
from fa_compiler.lowering.ascend.air.encode import encode
from fa_compiler.lowering.ascend.air.files import parse_message
from fa_compiler.lowering.ascend.air.show import lines, summary
from fa_compiler.lowering.ascend.graph import Op, Output, TensorDesc
from fa_compiler.lowering.ascend.single_op import check_text, to_json
from tests.examples import examples
from tests.lowering.ascend.graphs import attention, branches, const

EXAMPLES = examples(40)


def whole() -> Any:
    """A model with everything the format has: branches, constants of several types, lists."""
    model = branches()
    model.root.ops += attention().root.ops[:-1]
    model.root.ops[0].attrs["index"], model.root.ops[1].attrs["index"] = (
        model.root.ops[1].attrs["index"],
        model.root.ops[0].attrs["index"],
    )
    model.root.ops.append(const("scale", np.array(0.5, np.float32), "DT_FLOAT"))
    model.root.ops.append(
        Op("end", "Neg", [Output("scale")], [TensorDesc("x", "DT_FLOAT")], [TensorDesc("y", "DT_FLOAT")])
    )
    return model


BYTES = serialise(whole())[0]
NUMBERS = st.sampled_from([-(1 << 63), -3, -2, -1, 0, 1, 2, 3, 7, 100, (1 << 31) - 1, (1 << 63) - 1])
TEXTS = st.sampled_from(
    ["", ":", "q", "q:0", "q:-1", "q:99", "a:b:c", "x\u0000y", "kept", "main", "../../etc", "\u00e9" * 300]
)


def read_all(data: bytes) -> None:
    """Everything that can be done with a file."""
    try:
        proto = parse_message(data)
    except AirError:
        return
    findings = check_message(proto, Path("/nonexistent"))
    assert all(str(finding) for finding in findings)
    try:
        model = parse(data, Path("/nonexistent"))
    except AirError as error:
        assert "\n" not in str(error)
        return
    assert verdict(findings) != REJECTED
    assert summary(model)
    assert [list(lines(graph)) for graph in model.graphs]
    assert draw(model, ".svg")
    assert draw(model, ".dot")


@settings(max_examples=EXAMPLES)
@given(st.lists(st.tuples(st.integers(0, len(BYTES) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_bytes(changes: list[tuple[int, int]]) -> None:
    data = bytearray(BYTES)
    for place, value in changes:
        data[place] = value
    read_all(bytes(data))
    read_all(bytes(data[: changes[0][0]]))


@settings(max_examples=EXAMPLES)
@given(st.data())
def test_fields(data: st.DataObject) -> None:
    """Fields that are there get other values, go away or come twice: these files all parse as a message."""
    proto = encode(whole())
    for _ in range(data.draw(st.integers(1, 4))):
        mutate(proto, data)
    read_all(proto.SerializeToString())


def mutate(proto: Any, data: st.DataObject) -> None:
    while True:
        fields = [field for field, _ in proto.ListFields()]
        if not fields:
            return
        field = data.draw(st.sampled_from(fields))
        value = getattr(proto, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key = data.draw(st.sampled_from(sorted(value)))
            if data.draw(st.booleans()):
                value.pop(key)
                return
            proto = value[key]
        elif field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED:
            place = data.draw(st.integers(0, len(value) - 1))
            action = data.draw(st.sampled_from(["inside", "remove", "twice"]))
            if action == "remove":
                del value[place]
                return
            if action == "twice":
                value.append(value[place])
                return
            if field.message_type is None:
                value[place] = other(field, data)
                return
            proto = value[place]
        elif field.message_type is not None:
            if data.draw(st.integers(0, 4)) == 0:
                proto.ClearField(field.name)
                return
            proto = value
        else:
            setattr(proto, field.name, other(field, data))
            return


def other(field: Any, data: st.DataObject) -> Any:
    if field.type == field.TYPE_STRING:
        return data.draw(TEXTS)
    if field.type == field.TYPE_BYTES:
        return data.draw(TEXTS).encode()
    if field.type == field.TYPE_BOOL:
        return data.draw(st.booleans())
    if field.type == field.TYPE_FLOAT:
        return data.draw(st.sampled_from([0.0, float("nan"), float("inf"), 1e30]))
    number = data.draw(NUMBERS)
    if field.type == field.TYPE_ENUM:
        return number % (1 << 31)
    return number % (1 << 32) if field.type == field.TYPE_UINT32 else number


JSON = [to_json(attention().root.ops[-2], "fas")]
VALUES = st.sampled_from(
    [
        "null",
        "true",
        "-1",
        "0",
        str(1 << 70),
        "0.5",
        '""',
        '"ND"',
        '"float16"',
        '"RESERVED"',
        "[]",
        "[-1]",
        "[[1, 2]]",
        "{}",
    ]
).map(json.loads)


@settings(max_examples=EXAMPLES)
@given(st.data())
def test_json(data: st.DataObject) -> None:
    document = json.loads(json.dumps(JSON))
    for _ in range(data.draw(st.integers(1, 4))):
        place = document
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = data.draw(st.sampled_from(keys))
            if isinstance(place[key], dict | list) and place[key] and data.draw(st.integers(0, 3)):
                place = place[key]
                continue
            if isinstance(place, dict) and data.draw(st.booleans()):
                del place[key]
            else:
                place[key] = data.draw(VALUES)
            break
    for finding in check_text(json.dumps(document).encode()):
        assert str(finding)


@settings(max_examples=EXAMPLES)
@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    read_all(data)
    assert all(str(finding) for finding in check_text(data))


def test_names_of_several_lines() -> None:
    proto = encode(whole())
    op = next(op for op in proto.graph[0].op if op.type == "FlashAttentionScore")
    op.name = "two\nlines"
    op.input.append("q:0")
    with pytest.raises(AirError, match="two lines"):
        parse(proto.SerializeToString())


def test_deep_nesting() -> None:
    assert check_text(b"[" * 100_000)[0].rule == "not-json"
    assert NOT_AIR.name == "not-air"
