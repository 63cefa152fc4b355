"""The SoC versions of ATC."""

import pytest

from fa_compiler.op_registry import UnknownProduct, product
from fa_compiler.op_registry.soc import check_name, soc_version, soc_versions

A2 = "Ascend910B1, Ascend910B2, Ascend910B2C, Ascend910B3, Ascend910B4-1, Ascend910B4"


def test_the_table() -> None:
    assert len(soc_versions()) == 73
    assert soc_version("Ascend910B2").short == "Ascend910B"
    assert soc_version("Ascend910B2").has_bfloat16
    assert not soc_version("Ascend310P3").has_bfloat16
    # The spelling without a digit is the first generation, which the families know, too.
    assert soc_version("Ascend910B").short == "Ascend910"
    assert product("Ascend910B").name == "910"
    assert not soc_version("Ascend910B").has_bfloat16
    assert soc_version("Ascend950PR_9589").has_hifloat8


def test_a_name_of_the_form_of_a_soc_version_is_none() -> None:
    """`optimize` and `inspect` take products, too, and refuse the chips that `atc` refuses."""
    for known in ("A2", "ascend910_93", "950", "Ascend910B", "Ascend910B4-1", "Ascend950PR_9589"):
        check_name(known)
    for unknown in ("Ascend910B9", "Ascend910B22", "Ascend910_9300", "Ascend310P9"):
        assert product(unknown).name in ("A2", "A3", "310P")
        with pytest.raises(UnknownProduct, match=f"unknown SoC version '{unknown}'; those of "):
            check_name(unknown)
    with pytest.raises(UnknownProduct, match="unknown product or SoC version 'Ascend910X'"):
        check_name("Ascend910X")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Ascend910B22", f"unknown SoC version 'Ascend910B22'; those of A2 are {A2}"),
        ("Ascend910B5", f"unknown SoC version 'Ascend910B5'; those of A2 are {A2}"),
        (
            "Ascend310",
            "unknown SoC version 'Ascend310'; known are Ascend310B1, Ascend310B2, Ascend310B3, ",
        ),
        ("910 B2", "unknown SoC version '910 B2', did you mean 'Ascend910B2'?"),
        ("9391", "unknown SoC version '9391', did you mean 'Ascend910_9391'?"),
        ("Ascend", "unknown SoC version 'Ascend'; give a family to see those of it: A2, A3, "),
        ("B2", "unknown SoC version 'B2'; known are Ascend310B2, Ascend910B2"),
        ("910b2c", "unknown SoC version '910b2c', did you mean 'Ascend910B2C'?"),
        ("910B", f"910B is a family; ATC wants one SoC version of it: {A2}"),
        ("ascend910b", f"ascend910b is a family; ATC wants one SoC version of it: {A2}"),
        ("Ascend910C", "Ascend910C is a family; ATC wants one SoC version of it: Ascend910_9362, Ascend910_9363"),
        ("Ascend310P", "Ascend310P is a family; ATC wants one SoC version of it: Ascend310P1, Ascend310P3"),
        ("Ascend950", "Ascend950 is a family; ATC wants one SoC version of it: Ascend950DT_950x"),
        ("ascend910b2", "unknown SoC version 'ascend910b2', did you mean 'Ascend910B2'?"),
        ("A3", "A3 is a family; ATC wants one SoC version of it: Ascend910_9362, Ascend910_9363"),
        ("910", "910 is a family; ATC wants one SoC version of it: Ascend910A, Ascend910B, Ascend910PremiumA"),
    ],
)
def test_a_wrong_name_is_answered_with_the_right_one(name: str, message: str) -> None:
    with pytest.raises(UnknownProduct) as caught:
        soc_version(name)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(("name", "short"), [("910B", "A2"), ("Ascend910C", "A3"), ("910c", "A3")])
def test_an_everyday_name_of_a_product_is_answered_with_its_short_name(name: str, short: str) -> None:
    with pytest.raises(UnknownProduct) as caught:
        product(name)
    assert str(caught.value) == f"unknown product or SoC version {name!r}; Atlas {short} is {short!r}"


@pytest.mark.parametrize("name", ["A5", ""])
def test_of_many_names_the_families_are_listed(name: str) -> None:
    with pytest.raises(UnknownProduct, match="give a family to see those of it: A2, A3, 950, 310P, 310B, 910"):
        soc_version(name)


def test_a_soc_version_is_a_text() -> None:
    with pytest.raises(UnknownProduct, match="a SoC version is a text such as 'Ascend910B2', not None"):
        soc_version(None)  # type: ignore[arg-type]
