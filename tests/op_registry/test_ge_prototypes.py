"""The prototypes of all of GE's operators."""

from fa_compiler.op_registry import get, names
from fa_compiler.op_registry.ge_prototypes import ge_operators, ge_prototype
from fa_compiler.op_registry.spec import ATTR_TYPES, Kind


def test_every_line_is_readable() -> None:
    operators = ge_operators()
    assert len(operators) > 1900
    for name in operators:
        prototype = ge_prototype(name)
        assert prototype is not None
        assert prototype.name == name
        assert all(attr.type in ATTR_TYPES for attr in prototype.attrs)


def test_own_operators_come_from_the_registry() -> None:
    for name in names():
        assert ge_prototype(name) is get(name)


def test_what_a_prototype_says() -> None:
    product = ge_prototype("BatchMatMulV2")
    assert product is not None
    assert [(entry.name, entry.kind) for entry in product.inputs] == [
        ("x1", Kind.REQUIRED),
        ("x2", Kind.REQUIRED),
        ("bias", Kind.OPTIONAL),
        ("offset_w", Kind.OPTIONAL),
    ]
    assert product.input("bias").dtypes == ("DT_FLOAT", "DT_FLOAT16", "DT_INT32", "DT_BF16")
    assert [(attr.name, attr.type, attr.default) for attr in product.attrs] == [
        ("adj_x1", "Bool", False),
        ("adj_x2", "Bool", False),
        ("offset_x", "Int", 0),
    ]
    cast = ge_prototype("Cast")
    assert cast is not None
    assert cast.attr("dst_type").required


def test_an_unknown_operator_has_none() -> None:
    assert ge_prototype("NoSuchOperator") is None
