"""The SoC versions of ATC."""

import pytest

from fa_compiler.op_registry import UnknownProduct, product
from fa_compiler.op_registry.soc import soc_version, soc_versions


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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Ascend910B22", "unknown SoC version 'Ascend910B22', did you mean 'Ascend910B2'?"),
        ("ascend910b2", "unknown SoC version 'ascend910b2', did you mean 'Ascend910B2'?"),
        ("A3", "A3 is a family; ATC wants one SoC version of it: Ascend910_9362, Ascend910_9363"),
        ("910", "910 is a family; ATC wants one SoC version of it: Ascend910A, Ascend910B, Ascend910PremiumA"),
    ],
)
def test_a_wrong_name_is_answered_with_the_right_one(name: str, message: str) -> None:
    with pytest.raises(UnknownProduct) as caught:
        soc_version(name)
    assert str(caught.value).startswith(message)
