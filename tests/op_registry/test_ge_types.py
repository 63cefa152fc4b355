"""Type expressions of GE's prototypes: named sets, lists, mixtures, and what says nothing."""

import pytest

from fa_compiler.op_registry.ge_prototypes import ge_operators, ge_prototype
from fa_compiler.op_registry.ge_types import input_types, types_of


@pytest.mark.parametrize(
    ("written", "inside", "outside"),
    [
        ("TensorType({DT_FLOAT32, DT_BOOL})", {"DT_FLOAT", "DT_BOOL"}, {"DT_FLOAT16"}),
        ("TensorType::IndexNumberType()", {"DT_INT32", "DT_INT64"}, {"DT_INT16", "DT_FLOAT"}),
        ("TensorType({BasicType(), DT_BOOL})", {"DT_FLOAT", "DT_BF16", "DT_BOOL", "DT_UINT64"}, {"DT_STRING"}),
        ("TensorType({FloatingDataType, DT_BF16})", {"DT_BF16", "DT_DOUBLE"}, {"DT_INT32"}),
        ("TensorType::UnaryDataType()", {"DT_FLOAT", "DT_COMPLEX64"}, {"DT_INT64"}),
    ],
)
def test_a_type_expression_names_its_types(written: str, inside: set[str], outside: set[str]) -> None:
    types = set(types_of(written) or ())
    assert inside <= types
    assert not outside & types


@pytest.mark.parametrize("written", ["TensorType::ALL()", "T", "", "TensorType({ALL()})"])
def test_what_allows_everything_or_says_nothing_gives_none(written: str) -> None:
    assert types_of(written) is None


def test_types_bound_elsewhere_are_listed_for_inputs_that_exist() -> None:
    spec = ge_prototype("Fill")
    assert spec is not None
    assert "DT_BOOL" in (input_types(spec, "value") or ())
    assert input_types(spec, "dims") == ("DT_INT32", "DT_INT64")


def test_the_registrys_own_operators_answer_with_what_they_know() -> None:
    spec = ge_prototype("FlashAttentionScore")
    assert spec is not None
    assert set(input_types(spec, "query") or ()) >= {"DT_FLOAT16", "DT_BF16", "DT_FLOAT"}


def test_few_inputs_of_all_operators_are_left_without_types() -> None:
    specs = [spec for name in ge_operators() if (spec := ge_prototype(name)) is not None]
    unknown = [
        (spec.name, entry.name)
        for spec in specs
        for entry in spec.inputs
        if input_types(spec, entry.name) is None and "ALL" not in entry.written
    ]
    assert len(unknown) < 120, unknown


def test_mul_takes_what_its_clauses_name() -> None:
    spec = ge_prototype("Mul")
    assert spec is not None
    for name in ("x1", "x2"):
        types = set(input_types(spec, name) or ())
        assert {"DT_COMPLEX64", "DT_COMPLEX128", "DT_UINT16", "DT_BOOL"} <= types
        assert not {"DT_UINT32", "DT_UINT64"} & types


def test_another_spelling_of_a_type_is_that_type() -> None:
    """One header writes DT_Int32."""
    spec = ge_prototype("GroupedDynamicMxQuant")
    assert spec is not None
    assert input_types(spec, "group_index") == ("DT_INT32",)
