"""Constants of any size: what a reading in pieces says of them is what every element says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from fa_compiler.passes.ir.nodes import constant
from fa_compiler.passes.values.constant_patterns import Diagonals
from fa_compiler.passes.values.large_constants import LargeConstants, LargeContent, content_of
from tests.passes.running import PRODUCT_PV, PRODUCT_QK, SOFTMAX, assert_same, fused, parse, random_feeds, run

ROWS, COLUMNS = 7, 9
DISTANCE = np.arange(COLUMNS)[None] - np.arange(ROWS)[:, None]
BANDS = {
    "causal": (None, 0, 0),
    "causal from the right": (None, COLUMNS - ROWS, 0),
    "few rows without keys": (None, -2, 0),
    "window": (-2, 0, 0),
    "band": (-1, 2, 0),
    "lower": (1, None, 0),
    "rows without keys behind a band": (4, 6, 0),
    "prefix": (None, 0, 4),
    "prefix and a lower band": (None, -2, 2),
    "prefix of all keys but one": (None, COLUMNS - ROWS, COLUMNS - 1),
}
"""The lower and upper bound on key minus row, and the prefix."""
BLOCKS = (5, 6, 9, 13)
"""The ends of blocks: of five, one, three and four positions."""
NUMBERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "bool": lambda kept: kept,
    "excluded": lambda kept: ~kept,
    "float32": lambda kept: np.where(kept, 0.0, -np.inf).astype(np.float32),
    "float16": lambda kept: np.where(kept, 0.0, -65504.0).astype(np.float16),
    "bfloat16": lambda kept: np.where(kept, 0.0, -1e38).astype(ml_dtypes.bfloat16),
    "int64": lambda kept: np.where(kept, 1, 0),
}


def within(band: tuple[int | None, int | None, int]) -> np.ndarray:
    """The positions of a band."""
    lower, upper, prefix = band
    kept: np.ndarray = np.ones_like(DISTANCE, np.bool_) if lower is None else lower <= DISTANCE
    kept = kept if upper is None else kept & (upper >= DISTANCE)
    return kept | (np.arange(COLUMNS) < prefix)[None]


def shown(content: LargeContent) -> np.ndarray | None:
    """The matrix that a pattern describes."""
    found = content.pattern
    if found is None:
        return None
    return np.where(within((found.lower, found.upper, found.prefix)), float(found.inside), float(found.outside))


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("name", BANDS)
def test_bands_are_found_and_each_element_counts(name: str, numbers: str) -> None:
    """Pieces of one row, of three, and of all. Then elements are changed, each in some of these tests."""
    right = NUMBERS[numbers](within(BANDS[name]))
    for piece in (1, 3 * COLUMNS, 1 << 20):
        content = content_of(ir.tensor(np.stack([right, right])[:, None]), piece)
        assert content is not None
        np.testing.assert_array_equal(shown(content), right.astype(np.float64), err_msg=f"{content}")
        assert content.numbers == set(right.astype(np.float64).reshape(-1))
        zero = right.astype(np.float64) == 0
        assert (content.zeros_only, content.no_zeros) == (zero.all(axis=1).any(), (~zero.any(axis=1)).any())
    few = sorted(content.numbers)
    for place in range((7 * list(NUMBERS).index(numbers) + list(BANDS).index(name)) % 13, 2 * right.size, 13):
        wrong = np.stack([right, right])
        flat = wrong.reshape(-1)
        flat[place] = few[0] if flat[place] == few[1] else few[1]
        found = content_of(ir.tensor(wrong), 2 * COLUMNS)
        assert found is not None
        assert found.pattern is None
        single = content_of(ir.tensor(wrong[place // right.size]), 2 * COLUMNS)
        assert single is not None
        if single.pattern is not None:  # another band
            np.testing.assert_array_equal(shown(single), wrong[place // right.size].astype(np.float64))


def test_numbers_that_are_not_few() -> None:
    """A third number, a NaN, an integer that is no float, and bytes that are no booleans."""
    mask = NUMBERS["float32"](within((None, 0, 0)))
    third = mask.copy()
    third[-1, -1] = -1.0
    assert content_of(ir.tensor(third), 1) == LargeContent(frozenset((0.0, -np.inf, -1.0)), None, False, False)
    third[-1, -1] = np.nan
    assert content_of(ir.tensor(third), 1) == LargeContent(None)
    assert content_of(ir.tensor(np.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS)), 1) == LargeContent(None)
    wide = np.where(within((None, 0, 0)), 2**53 + 1, 0)
    assert content_of(ir.tensor(wide), 1) == LargeContent(None)
    zeros = content_of(ir.tensor(np.zeros((1, ROWS, COLUMNS), np.float32)), 1)
    assert zeros == LargeContent(frozenset((0.0,)), Diagonals(None, None, 0, 0.0, 0.0), True, False)


def test_a_file_is_read_in_pieces_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that share bytes are read once, whatever their names; the largest piece is a small part. A file that is
    too short, or that holds other bytes than booleans, tells nothing."""
    size, path = 4096, tmp_path / "mask.bin"
    (np.tri(size, dtype=np.bool_) ^ np.tri(size, k=-100, dtype=np.bool_)).tofile(path)
    read: list[int] = []
    fromfile = np.fromfile

    def counted(file: str, dtype: np.dtype, count: int, *, offset: int) -> np.ndarray:
        read.append(count)
        return fromfile(file, dtype, count, offset=offset)

    monkeypatch.setattr(np, "fromfile", counted)
    constants = LargeConstants()

    def value(name: str, offset: int = 0) -> ir.Value:
        tensor = ir.ExternalTensor(
            path, offset, size * size, ir.DataType.BOOL, shape=ir.Shape([1, 1, size, size]), name=name
        )
        return ir.Value(name=name, const_value=tensor)

    for name in ("layer 0", "layer 1"):
        content = constants.of(value(name))
        assert content is not None
        assert content.pattern == Diagonals(-99, 0, 0, 1, 0)
    assert sum(read) == size * size
    assert max(read) <= 1 << 20
    assert constants.of(value("behind the end", size)) is None
    with path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\2")
    assert LargeConstants().of(value("two")) is None


def in_blocks(lower: int | None, upper: int | None, ends: tuple[int, ...]) -> np.ndarray:
    """The positions of a band in blocks."""
    size = ends[-1]
    distance = np.arange(size)[None] - np.arange(size)[:, None]
    block = np.searchsorted(ends, np.arange(size), side="right")
    kept: np.ndarray = block[:, None] == block[None]
    kept = kept if lower is None else kept & (lower <= distance)
    return kept if upper is None else kept & (distance <= upper)


@pytest.mark.parametrize("band", [(None, None), (None, 0), (0, None), (-1, 0), (-1, 2)])
def test_blocks_are_found_and_each_element_counts(band: tuple[int | None, int | None]) -> None:
    """Whole blocks, triangles and windows in them. One element more or less is another pattern, or none."""
    right = in_blocks(*band, BLOCKS)
    for matrix in (right, ~right):
        content = content_of(ir.tensor(matrix), 2 * len(right))
        assert content is not None and content.pattern is not None
        pattern = content.pattern
        assert (pattern.ends, pattern.inside, pattern.outside) == (BLOCKS, int(matrix[0, 0]), int(not matrix[0, 0]))
        assert np.array_equal(in_blocks(pattern.lower, pattern.upper, pattern.ends), right)
        for place in range(right.size):
            wrong = matrix.copy()
            wrong.reshape(-1)[place] ^= True
            found = content_of(ir.tensor(wrong))
            assert found is not None
            if found.pattern is not None:
                assert found.pattern.ends
                kept = in_blocks(found.pattern.lower, found.pattern.upper, found.pattern.ends)
                assert np.array_equal(np.where(kept, found.pattern.inside, found.pattern.outside), wrong)


def attention(mask: np.ndarray, batch: str | int, size: int = 8) -> onnx.ModelProto:
    """Attention of one head under a constant mask, which is added or selects."""
    rows, columns = mask.shape[-2:]
    term = "Where(mask, s, low)" if mask.dtype == np.bool_ else "Add(s, mask)"
    kind, dims = "bool" if mask.dtype == np.bool_ else "float", ",".join(map(str, mask.shape))
    given = "".join(
        f"float[{batch},1,{length},{size}] {name}, "
        for name, length in zip("qkv", (rows, columns, columns), strict=True)
    )
    body = f"{PRODUCT_QK}low = Constant<value=float {{-inf}}>() x = {term} {SOFTMAX.format('x')}{PRODUCT_PV}"
    output = f"float[{batch},1,{rows},{size}] y"
    model = parse(body, inputs=f"{given}{kind}[{dims}] mask", outputs=output)
    model.graph.input.pop()
    model.graph.initializer.append(numpy_helper.from_array(mask, "mask"))
    return model


@pytest.mark.parametrize(
    ("band", "label"), [((None, None), "packed"), ((None, 0), "packed+causal"), ((-2, 1), "packed+band")]
)
@pytest.mark.parametrize("batch", ["B", 1, 2])
def test_blocks_are_packed_sequences(batch: str | int, band: tuple[int | None, int | None], label: str) -> None:
    """Chunks and packed sequences: the ends of the blocks are those of the sequences, in every batch entry. Ascend
    keeps the mask."""
    kept = in_blocks(*band, BLOCKS)
    for mask in (kept, np.where(kept, 0, -np.inf).astype(np.float32)[None, None]):
        model = attention(mask, batch)
        result, report = fused(model)
        assert [block.mask for block in report.blocks] == [label]
        feeds = random_feeds(model)
        for got, wanted in zip(run(result, feeds), run(model, feeds), strict=True):
            assert_same(got, wanted, 1e-5)
        _, report = fused(model, "ascend")
        assert [block.mask for block in report.blocks] == ["atten_mask"]


@pytest.mark.parametrize("numbers", ["bool", "float32", "bias"])
@pytest.mark.parametrize("large", [False, True])
def test_a_mask_that_repeats_its_row_becomes_one_row(
    large: bool, numbers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding of constant lengths, and a bias of few numbers. With another number in one row it stays as it is, as for
    Ascend, which needs all rows of a mask."""
    if large:
        monkeypatch.setattr("fa_compiler.passes.values.large_constants.FOLD_LIMIT", 16)
        monkeypatch.setattr(constant, "__defaults__", (16,))
    row = np.arange(COLUMNS) % 4 != 1
    row = NUMBERS[numbers](row) if numbers in NUMBERS else np.where(row, 0.25, -1.5).astype(np.float32)
    mask = np.broadcast_to(row, (1, 1, ROWS, COLUMNS)).copy()
    for rows in (1, ROWS):
        model = attention(mask, 2)
        result, report = fused(model)
        assert [block.mask for block in report.blocks] == ["real_shift" if numbers == "bias" else "atten_mask"]
        on_ascend, _ = fused(model, "ascend")
        for graph, kept in ((result.graph, rows), (on_ascend.graph, rows if numbers == "bias" else ROWS)):
            sizes = [list(tensor.dims) for tensor in graph.initializer if tensor.dims[-1:] == [COLUMNS]]
            assert sizes == [[1, 1, kept, COLUMNS]]
        feeds = random_feeds(model)
        for got, wanted in zip(run(result, feeds), run(model, feeds), strict=True):
            assert_same(got, wanted, 1e-5)
        mask[0, 0, -1, 0] = mask[0, 0, -1, 1]


def test_repeated_rows_in_pieces() -> None:
    """Each matrix repeats a row of its own. Every element counts."""
    right = np.repeat(NUMBERS["bfloat16"](within((None, 0, 0)))[:3, None], ROWS, axis=1)
    for piece in (1, 3 * COLUMNS, 1 << 20):
        content = content_of(ir.tensor(right), piece)
        assert content is not None and content.repeated is not None
        np.testing.assert_array_equal(content.repeated, right[:, :1])
        assert content.repeated.dtype == right.dtype
    for place in range(0, right.size, 5):
        wrong = right.copy()
        wrong.reshape(-1)[place] = 1.0
        found = content_of(ir.tensor(wrong), 2 * COLUMNS)
        assert found is not None and found.repeated is None


@pytest.mark.parametrize(("batch", "rows", "columns"), [("B", 70, 70), (2, 5, 9)])
def test_a_prefix_is_a_mode_of_the_operator(batch: str | int, rows: int, columns: int) -> None:
    """The keys of the prefix, and those up to the corner. On Ascend an open batch keeps the mask."""
    distance = np.arange(columns)[None] - np.arange(rows)[:, None]
    kept = (distance <= columns - rows) | (np.arange(columns) < 6)[None]
    for mask in (kept, np.where(kept, 0, -np.inf).astype(np.float32)[None, None]):
        model = attention(mask, batch)
        result, report = fused(model)
        assert [block.mask for block in report.blocks] == ["prefix"]
        feeds = random_feeds(model)
        for got, wanted in zip(run(result, feeds), run(model, feeds), strict=True):
            assert_same(got, wanted, 1e-5)
        _, report = fused(model, "ascend")
        assert [block.mask for block in report.blocks] == ["prefix" if isinstance(batch, int) else "atten_mask"]


def test_masks_of_4096_tokens() -> None:
    """A window is found. A float mask without structure is proven to hold two numbers, so it becomes boolean."""
    size = 4096
    window = np.tri(size, dtype=np.bool_) ^ np.tri(size, k=-100, dtype=np.bool_)
    random = window ^ (np.arange(size) == 7)[None]
    wanted = {"band": window, "atten_mask": np.where(random, np.float32(0), np.float32(-np.inf))}
    for label, mask in wanted.items():
        model = attention(mask[None, None], 1)
        _, report = fused(model)
        assert [block.mask for block in report.blocks] == [label]
