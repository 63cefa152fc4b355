"""`python -m bench.neon`: finds the loops in the assembly of both compilers. Without a cross-compiler and llvm-mca."""

from __future__ import annotations

import pytest

from bench.neon import Unavailable, busiest_loop, main
from tests.systems import TOOLS

CLANG = """
_ZN2fa8baseline6scoresENS0_8RowMajorE: // @scores
// %bb.0:
\tb.lt\t.LBB0_4
.LBB0_1:                // =>This Loop Header: Depth=1
\tsub\tx1, x1, #1
.LBB0_2:                //   Parent Loop
\tldr\tq0, [x0], #16
\tfmla\tv1.4s, v0.4s, v2.s[0]
\tsubs\tx7, x7, #4
\tb.gt\t.LBB0_2
\tcbnz\tx1, .LBB0_1
.LBB0_4:
\tret
\t.size\t_ZN2fa8baseline6scoresENS0_8RowMajorE, 4
"""
GCC = """
_ZN2fa8baseline6scoresENS0_8RowMajorE:
.L3:
\tadd\tx3, x3, 1
\tcmp\tx3, x4
\tbne\t.L3
.L5:
\tldr\tq0, [x0], 16
\tfmla\tv1.4s, v0.4s, v2.s[0]
\tfmla\tv3.4s, v0.4s, v2.s[1]
\tbgt\t.L5
\tret
\t.size\t_ZN2fa8baseline6scoresENS0_8RowMajorE, .-_ZN2fa8baseline6scoresENS0_8RowMajorE
"""


@pytest.mark.parametrize(("text", "instructions", "multiply_adds"), [(CLANG, 3, 1), (GCC, 3, 2)])
def test_the_loop_with_the_products(text: str, instructions: int, multiply_adds: int) -> None:
    loop = busiest_loop(text, "scores")
    assert (len(loop.instructions), loop.multiply_adds) == (instructions, multiply_adds)


def test_a_function_that_is_not_there() -> None:
    with pytest.raises(Unavailable, match="no function 'exponentials'"):
        busiest_loop(CLANG, "exponentials")


@TOOLS
def test_a_missing_compiler_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--compiler", "no-such-compiler"]) == 1
    assert capsys.readouterr().err.startswith("error: no-such-compiler cannot be run (No such file or directory)")
