"""REG_OP text: the round trip, what is read out of real header text, and errors with their place."""

from __future__ import annotations

import keyword

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_compiler.op_registry import AttrSpec, InputSpec, Kind, OpSpec, OutputSpec, RegOpSyntaxError, names, variants
from fa_compiler.op_registry.dtypes import TABLE
from fa_compiler.op_registry.reg_op import format_default, parse, parse_located, print_op
from fa_compiler.op_registry.spec import AttrValue, GraphSpec, types_in
from tests.examples import examples

EVERY = [variant for name in names() for variant in variants(name)]


@pytest.mark.parametrize("spec", EVERY, ids=lambda spec: f"{spec.name}-{spec.variant}")
def test_round_trip_of_every_variant(spec: OpSpec) -> None:
    text = print_op(spec)
    assert parse(text) == [spec.prototype()]
    assert [print_op(found) for found in parse(text)] == [text]


identifiers = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,12}", fullmatch=True).filter(lambda w: not keyword.iskeyword(w))
type_names = st.lists(st.sampled_from([entry.ge for entry in TABLE] + ["DT_FLOAT32"]), min_size=1, max_size=4)
expressions = st.one_of(
    type_names.map(lambda listed: f"TensorType({{{', '.join(listed)}}})"),
    type_names.map(lambda listed: f"ge::TensorType({{{', '.join(listed)}}})"),
    st.sampled_from(["TensorType::ALL()", "TensorType::NumberType()", "TensorType({NumberType(), DT_BOOL})"]),
)
scalars: dict[str, st.SearchStrategy[AttrValue]] = {
    "Int": st.integers(-(2**63), 2**63 - 1),
    "Float": st.floats(allow_nan=False, allow_infinity=False),
    "Bool": st.booleans(),
    "String": st.text(max_size=8),
}
values: dict[str, st.SearchStrategy[AttrValue]] = scalars | {
    **{f"List{kind}": st.lists(strategy, max_size=3).map(tuple) for kind, strategy in scalars.items()},
    "ListListInt": st.lists(st.lists(scalars["Int"], max_size=3).map(tuple), max_size=3).map(tuple),
}


@st.composite
def prototypes(draw: st.DrawFn) -> OpSpec:
    def unique(limit: int) -> list[str]:
        return draw(st.lists(identifiers, unique=True, max_size=limit))

    def tensors(kind: type[InputSpec] | type[OutputSpec]) -> tuple[InputSpec | OutputSpec, ...]:
        kinds = st.sampled_from(list(Kind))
        written = [draw(expressions) for _ in range(6)]
        return tuple(
            kind(name, draw(kinds), text, types_in(text)) for name, text in zip(unique(6), written, strict=False)
        )

    def attribute(name: str) -> AttrSpec:
        kind = draw(st.sampled_from(sorted(values)))
        if draw(st.booleans()):
            return AttrSpec(name, kind, required=True)
        default = draw(values[kind])
        return AttrSpec(name, kind, False, default, format_default(kind, default))

    return OpSpec(
        draw(identifiers),
        tensors(InputSpec),  # type: ignore[arg-type]
        tensors(OutputSpec),  # type: ignore[arg-type]
        tuple(attribute(name) for name in unique(6)),
        graphs=tuple(GraphSpec(name, draw(st.booleans())) for name in unique(2)),
    )


@settings(max_examples=examples(40))
@given(st.lists(prototypes(), max_size=3))
def test_round_trip_of_any_prototype(specs: list[OpSpec]) -> None:
    text = "\n\n".join(map(print_op, specs))
    assert parse(text) == specs


HEADER = r"""
/* Copyright */
#define REG_OP(x) \
    REG_OP_IMPL(x)
#include "graph/operator_reg.h"
namespace ge {
/**
* @brief not a prototype: REG_OP(Brief)
*/
REG_OP(AddN) // sums
    .DYNAMIC_INPUT(x, TensorType({NumberType(), DT_VARIANT}))
    .OUTPUT(y,
            TensorType({ DT_FLOAT16,DT_FLOAT32 }))
    .REQUIRED_ATTR(N, Int)
    .OP_END_FACTORY_REG(AddN)

REG_OP(Odd).INPUT(a, "T").OPTIONAL_INPUT(b, T).DYNAMIC_OUTPUT(c, ge::TensorType::ALL())
    .ATTR(pads, ListInt, {0, -1,  0x10})
    .ATTR(names, ListString, {"a,b", "c)"})
    .ATTR(empty, ListFloat, {})
    .ATTR(nested, ListListInt, {{1, 2}, {}})
    .ATTR(limit, Int, INT64_MAX)
    .ATTR(scale, Float, 1e-05f)  /* a, comment) */
    .ATTR(flag, Bool, false)
    .ATTR(text, String, "a // no comment \"q\"")
    .ATTR(dtype, Type, DT_FLOAT)
    .ATTR(value, Tensor, Tensor())
    .DATATYPE(T, TensorType({DT_BOOL, DT_INT8}))
    .GRAPH(body)
    .DYNAMIC_GRAPH(branches)
    .OP_END_FACTORY_REG(Odd)
}  // namespace ge
"""


def test_header_text_is_read() -> None:
    add, odd = parse_located(HEADER, "a.h")
    assert (add.spec.name, add.path, add.line) == ("AddN", "a.h", 10)
    assert (odd.spec.name, odd.line) == ("Odd", 17)
    assert add.spec.inputs[0].kind is Kind.DYNAMIC
    assert add.spec.outputs[0].dtypes == ("DT_FLOAT16", "DT_FLOAT")
    assert add.spec.outputs[0].written == "TensorType({DT_FLOAT16, DT_FLOAT32})"
    spec = odd.spec
    assert spec.input("b").dtypes == ("DT_BOOL", "DT_INT8")
    assert spec.output("c").dtypes == ()
    assert {attr.name: attr.default for attr in spec.attrs} == {
        "pads": (0, -1, 16),
        "names": ("a,b", "c)"),
        "empty": (),
        "nested": ((1, 2), ()),
        "limit": 2**63 - 1,
        "scale": 1e-05,
        "flag": False,
        "text": 'a // no comment "q"',
        "dtype": "DT_FLOAT",
        "value": "Tensor()",
    }
    assert spec.attr("limit").written == "INT64_MAX"
    assert [(graph.name, graph.dynamic) for graph in spec.graphs] == [("body", False), ("branches", True)]
    assert parse("\n".join(map(print_op, (add.spec, spec)))) == [add.spec, spec]


def wrap(macros: str, end: str = ".OP_END_FACTORY_REG(Op)") -> str:
    return f"// line 1\nREG_OP(Op)\n    .INPUT(x, TensorType({{DT_FLOAT}}))\n{macros}\n    {end}\n"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (wrap(".OPTINAL_INPUT(y, T)"), 4, "unknown macro .OPTINAL_INPUT, did you mean 'OPTIONAL_INPUT'?"),
        (wrap(".INPUT(x, T)"), 4, ".INPUT names 'x' a second time"),
        (wrap(".OUTPUT(y)"), 4, "OUTPUT takes 2 arguments, found (y)"),
        (wrap(".ATTR(a, Int)"), 4, "ATTR takes 3 arguments"),
        (wrap(".ATTR(a, Integer, 1)"), 4, "unknown type Integer, did you mean 'Int'?"),
        (wrap(".ATTR(a, Int, one)"), 4, "one is no default for attribute a, a Int"),
        (wrap(".ATTR(a, Bool, 1)"), 4, "1 is no default"),
        (wrap(".ATTR(a, String, 'x')"), 4, "'x' is no default"),
        (wrap(".ATTR(a, ListInt, 1)"), 4, "1 is no default"),
        (wrap(".ATTR(a, ListInt, {1, x})"), 4, "is no default"),
        (wrap("\n.ATTR(a, Float, 1..0)"), 5, "1..0 is no default"),
        (wrap("", end=".OP_END_FACTORY_REG(Other)"), 5, "closed by OP_END_FACTORY_REG(Other)"),
        (wrap("", end=";"), 3, "expected another macro"),
        ("\n\nREG_OP(Op", 3, "the bracket is never closed"),
        ("REG_OP()", 1, "REG_OP takes 1 argument, found ()"),
    ],
)
def test_errors_carry_file_and_line(text: str, line: int, message: str) -> None:
    with pytest.raises(RegOpSyntaxError) as caught:
        parse(text, "ops/bad.h")
    assert str(caught.value).startswith(f"ops/bad.h:{line}: ")
    assert message in str(caught.value)
    assert (caught.value.path, caught.value.line) == ("ops/bad.h", line)
