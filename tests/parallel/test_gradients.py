"""Gradients on several ranks: against one call of the kernel, and training graphs against one process."""

from __future__ import annotations

import lzma
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import fa_compiler
from fa_compiler.errors import InputError
from fa_compiler.lowering.ort import eager
from fa_compiler.op_registry.collectives import (
    FORWARD_OUTPUTS,
    GATHER,
    GRADIENT_OUTPUTS,
    ORDERS,
    RING,
    STATISTICS,
    ZIGZAG,
)
from fa_compiler.op_registry.geometry import SEQUENCE_AXIS
from fa_compiler.parallel.communicator import Array, Communicator
from fa_compiler.parallel.methods import sequence_attention, sequence_gradient
from fa_compiler.parallel.parts import Parts
from fa_compiler.parallel.threads import run_threads
from tests.graphs import harness
from tests.pairs import pairwise

from .running import BANDS, by_one, by_ranks, check
from .test_methods import BATCH, HEADS, LENGTH, attrs_of, drawn, mask_of

EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mean": {"cpu_empty_rows": "mean"},
    "nan": {"cpu_empty_rows": "nan"},
    "soft cap": {"cpu_softcap": 1.5},
    "score of masked keys": {"cpu_mask_value": -2.0},
}

TRAINING = Path(__file__).parents[2] / "examples" / "models" / "gpt_training.onnx.xz"


def by_kernel(attrs: Mapping[str, Any], inputs: Mapping[str, Array], dy: Array) -> dict[str, Array]:
    """The outputs of both directions for the whole sequence; the band applies without a mask, too."""
    every = {"atten_mask": np.zeros((1, 1), np.bool_), **inputs}
    forward = eager.run("FlashAttentionScore", every, attrs, FORWARD_OUTPUTS)
    return {**forward, **eager.run("FlashAttentionScoreGrad", of_gradient(every, forward, dy), attrs, GRADIENT_OUTPUTS)}


def of_gradient(inputs: Mapping[str, Array], forward: Mapping[str, Array], dy: Array) -> dict[str, Array]:
    """The inputs of the gradient."""
    made = {name.replace("real_shift", "pse_shift"): array for name, array in inputs.items()}
    statistics = {name: forward[name] for name in STATISTICS}
    return {**made, **statistics, "attention_in": forward["attention_out"], "dy": dy}


@pytest.mark.parametrize(
    "layout, band, mask, bias, extra, ranks, order, method",
    pairwise(
        ["BSH", "SBH", "BSND", "BNSD"],
        [*BANDS],
        ["none", "keys", "rows"],
        ["", "keys", "rows"],
        [*EXTRAS],
        [1, 2, 3, 5],
        ORDERS,
        [GATHER, RING],
    ),
)
def test_both_directions(
    layout: str, band: str, mask: str, bias: str, extra: str, ranks: int, order: str, method: str
) -> None:
    if extra in ("mean", "nan") or ranks == 1:  # refused in a ring
        method = GATHER
    attrs = attrs_of(layout, band, pse_type=0 if bias else 1, **EXTRAS[extra])
    inputs = {**drawn(layout), **mask_of(mask)}
    if bias:
        rows = 1 if bias == "keys" else LENGTH
        inputs["real_shift"] = np.random.default_rng(8).standard_normal((1, HEADS, rows, LENGTH), np.float32)
    compare(attrs, inputs, ranks, order, method)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("rule", ["mean", "nan"])
def test_rows_without_a_key(rule: str, ranks: int) -> None:
    """Such a row had probabilities for all keys, also those that the band excludes: all of them get gradients of it."""
    mask = np.zeros((BATCH, 1, LENGTH, LENGTH), np.bool_)
    mask[0, :, 2] = True
    attrs = attrs_of("BNSD", "causal", cpu_empty_rows=rule)
    compare(attrs, {**drawn("BNSD"), "atten_mask": mask}, ranks, ZIGZAG, GATHER)


def compare(attrs: Mapping[str, Any], inputs: dict[str, Array], ranks: int, order: str, method: str) -> None:
    """Both directions by ranks and by the kernel, with NaN at the same places."""
    dy = np.random.default_rng(9).standard_normal(inputs["query"].shape, np.float32)
    expected = by_kernel(attrs, inputs, dy)
    axis, parts = SEQUENCE_AXIS[attrs["input_layout"]], Parts(order, ranks, LENGTH)

    def own(name: str, array: Array, rank: int) -> Array:
        if name in ("query", "key", "value"):
            return parts.own(array, axis, rank)
        return parts.own(array, array.ndim - 2, rank) if array.shape[-2] != 1 else array

    def task(communicator: Communicator) -> dict[str, Array]:
        mine = {name: own(name, array, communicator.rank) for name, array in inputs.items()}
        made = sequence_attention(communicator, parts, {**attrs, "method": method}, mine, FORWARD_OUTPUTS)
        forward = dict(zip(FORWARD_OUTPUTS, made, strict=True))
        backward = of_gradient(mine, forward, parts.own(dy, axis, communicator.rank))
        made = sequence_gradient(communicator, parts, {**attrs, "method": method}, backward)
        return {**forward, **dict(zip(GRADIENT_OUTPUTS, made, strict=True))}

    results = run_threads(ranks, task, 60)
    for name, array in expected.items():
        whole = parts.joined([each[name] for each in results], 2 if name.startswith("softmax") else axis)
        np.testing.assert_allclose(whole, array, rtol=1e-5, atol=1e-5, err_msg=name)


GRAPHS = {
    "train_block_gpt__fxjoint_op21": "two layers, a loss, and the gradients of all weights",
    "train_causal__fxjoint_op18": "attention alone",
    "train_gpt2_masks__ts_op17": "masked keys with a score of their own, so that every row has all keys",
}


@pytest.mark.parametrize(
    "name, ranks, method", [(name, ranks, method) for name in GRAPHS for ranks, method in ((2, RING), (3, GATHER))]
)
def test_training_graphs(name: str, ranks: int, method: str, tmp_path: Path) -> None:
    feeds = harness.inputs(harness.read_index()[name])
    result = fa_compiler.shard(harness.load(name), tmp_path / "out", ranks, method=method)
    assert {choice.method for choice in result.report.choices} == {method}
    check(by_one(name, feeds), by_ranks(result.path, ranks, feeds))


@pytest.mark.parametrize(
    "name, method, said",
    [
        ("train_causal__fxjoint_op18", "all-to-all", "all-to-all is not possible: it has a gradient"),
        ("train_sdpa__fxjoint_op18", "ring", "ring is not possible: it has a gradient, also of rows without"),
    ],
)
def test_methods_without_a_gradient(name: str, method: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        fa_compiler.shard(harness.load(name), tmp_path / "out", 2, method=method)


def test_there_is_no_gradient_for_ascend(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a training graph has no form for single ranks; shard writes one"):
        fa_compiler.compile_for_atc(
            harness.load("train_causal__fxjoint_op18"), tmp_path / "out", "Ascend910B2", sequence_parallel=2
        )
    with pytest.raises(InputError, match="a training graph has no form for single ranks"):  # its axes are not asked for
        model = onnx.load_model_from_string(lzma.decompress(TRAINING.read_bytes()))
        fa_compiler.compile_for_atc(model, tmp_path / "out", "Ascend910B2", sequence_parallel=2)
    assert list(tmp_path.iterdir()) == []


def test_a_weight_of_which_a_dimension_has_the_size_of_the_sequence(tmp_path: Path) -> None:
    """The refusal says which dimension counts as the sequence, and how to name the inputs that carry it."""
    model = onnx.load_model_from_string(lzma.decompress(TRAINING.read_bytes()))
    said = r"'layers.0.up.weight' of all tokens; dimension 0 of this input has the size 512 .* by `axes`"
    with pytest.raises(InputError, match=said):
        fa_compiler.shard(model, tmp_path / "out", 2)
    result = fa_compiler.shard(model, tmp_path / "out", 2, axes={"tokens": 1, "targets": 1})
    assert [name for name, axis in result.report.inputs.items() if axis is not None] == ["tokens", "targets"]


def test_the_products_that_have_a_gradient_are_named() -> None:
    model = harness.load("train_causal__fxjoint_op18")
    declined, *_ = fa_compiler.inspect(model, target="ascend", soc_version="Ascend310P3").blocks
    assert declined.hint == "A2, A3 and 950 have one: give one of their SoC versions with --soc-version"
