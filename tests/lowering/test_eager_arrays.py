"""What may be given as an array to `ops.run` and `reference.run`: the same numbers in any form give the same result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fa_compiler import ops, reference
from fa_compiler.op_registry import InputError

OP = "FlashAttentionScore"
ATTRS = {"head_num": 2, "input_layout": "TND", "scale_value": 0.5}
RUNS = {"kernel": ops.run, "reference": reference.run}


def inputs(dtype: Any = np.float32) -> dict[str, Any]:
    """Two packed sequences, of 2 and 3 queries, 3 and 4 keys."""
    rng = np.random.default_rng(1)
    shapes = {"query": (5, 2, 4), "key": (7, 2, 4), "value": (7, 2, 4)}
    tensors: dict[str, Any] = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    tensors["atten_mask"] = np.triu(np.ones((3, 4), np.uint8), 2)
    return tensors | {"actual_seq_qlen": np.array([2, 5]), "actual_seq_kvlen": np.array([3, 7])}


def swapped(array: Any) -> Any:
    """The same numbers, the bytes of each in the order that the machine does not have."""
    return array.astype(array.dtype.newbyteorder("S"))


def strided(array: Any) -> Any:
    """The same numbers, not next to each other, backwards in memory, and not to be written to."""
    wide = np.zeros(tuple(3 * size for size in array.shape), array.dtype)
    view = wide[tuple(slice(None, None, -3) for _ in array.shape)]
    view[...] = array
    view.flags.writeable = False
    return view


FORMS: dict[str, Callable[[Any], Any]] = {
    "other byte order": swapped,
    "strides": strided,
    "both": lambda array: strided(swapped(array)),
    "read-only": lambda array: np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape),
    "masked array without masked elements": np.ma.masked_array,
    "matrix of memory": lambda array: memoryview(array) if array.dtype.kind != "V" else array,
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("form", FORMS)
def test_the_form_of_an_array_does_not_matter(form: str, dtype: Any, run: Any) -> None:
    given = inputs(dtype)
    changed = {name: FORMS[form](array) for name, array in given.items()}
    got, want = run(OP, changed, ATTRS), run(OP, given, ATTRS)
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array, strict=True)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_bfloat16_with_strides(run: Any) -> None:
    given = inputs(ml_dtypes.bfloat16)
    changed = {name: strided(array) for name, array in given.items()}
    got, want = run(OP, changed, ATTRS)["attention_out"], run(OP, given, ATTRS)["attention_out"]
    assert got.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_python_numbers_take_the_type_of_their_input(run: Any) -> None:
    """INT64 here, INT32 in the sparse family."""
    given = inputs()
    want = run(OP, given, ATTRS)["attention_out"]
    got = run(OP, given | {"actual_seq_qlen": [2, 5], "actual_seq_kvlen": (3, 7)}, ATTRS)["attention_out"]
    np.testing.assert_array_equal(got, want)
    indexed = {name: np.ones((5, 2, 4), np.float32) for name in ("query", "key")}
    indexed = {"query": indexed["query"], "key": indexed["key"][:, :1], "weights": np.ones((5, 2), np.float32)}
    ends = {"actual_seq_lengths_query": [2, 5], "actual_seq_lengths_key": [2, 5]}
    attrs = {"layout_query": "TND", "layout_key": "TND", "sparse_count": 2}
    assert run("LightningIndexer", indexed | ends, attrs)["sparse_indices"].shape == (5, 1, 2)


def test_a_scalar_stays_one() -> None:
    """It was made a vector of one number on the way to ONNX Runtime."""
    with pytest.raises(ops.KernelError, match="actual_seq_qlen has rank 0, expected 1"):
        ops.run(OP, inputs() | {"actual_seq_qlen": np.array(5)}, ATTRS)


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (
            np.ma.masked_array(np.ones((5, 2, 4)), mask=np.eye(5, 8).reshape(5, 2, 4)),
            "is an array with masked elements",
        ),
        (np.full((5, 2, 4), None), "is an array of dtype object, which no input has"),
        (np.ones((5, 2, 4)).astype("U4"), "is an array of dtype <U4, which no input has"),
        (np.ones((5, 2, 4), "datetime64[s]"), "is an array of dtype datetime64[s], which no input has"),
        (np.ones((5, 2, 4), [("a", "f4")]), "is an array of dtype [('a', '<f4')], which no input has"),
        ([np.ones((2, 4)), None], "is a list of 2, expected one tensor"),
        ([np.ones((2, 4)), np.ones((3, 4))], "is a list of 2, expected one tensor"),
        ([[1.0, 2.0], [3.0]], "is no array: "),
        ({"query": 1}, "is a dict, expected an array of numbers"),
        ("query", "is an array of dtype <U5, which no input has"),
    ],
)
def test_what_is_no_tensor_is_refused_by_name(value: Any, problem: str, run: Any) -> None:
    with pytest.raises((InputError, reference.ReferenceInputError)) as error:
        run(OP, inputs() | {"query": value}, ATTRS)
    assert str(error.value).startswith(f"{OP}: query: {problem}")


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e39, np.float32("nan")])
def test_an_attribute_that_is_no_finite_number(value: float, run: Any) -> None:
    with pytest.raises(
        ValueError, match=r"attribute scale_value of FlashAttentionScore is .*, expected a finite float32"
    ):
        run(OP, inputs(), ATTRS | {"scale_value": value})
