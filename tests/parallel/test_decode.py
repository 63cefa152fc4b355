"""Decoding with caches that are sharded over ranks: equal to one process over several steps, and balanced."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import fa_compiler
from fa_compiler.command_line.main import main
from fa_compiler.comparison.feeds import save_arrays
from fa_compiler.errors import InputError
from fa_compiler.model_files.reading import load
from fa_compiler.op_registry.collectives import MERGE, ZIGZAG
from fa_compiler.parallel.communicator import Array, Communicator
from fa_compiler.parallel.run import ShardedRun, run_sharded
from fa_compiler.parallel.session import ShardedSession
from fa_compiler.parallel.threads import run_threads
from fa_compiler.passes.ir.nodes import reached
from fa_compiler.passes.parallel.entry_lengths import gathered_rows
from fa_compiler.passes.values.shapes import analyse
from fa_compiler.pipeline.fusing import fuse_loaded
from fa_compiler.pipeline.options import make_options
from tests.face import genai
from tests.face.test_merged_decoder import merged
from tests.graphs import harness
from tests.passes.rewrite.test_decode import VOUCHED, quantised

from .decoding import Feeds, by_one, by_ranks, inputs_of
from .running import check, content, sharded

STEPS = [
    # grouped heads, rotary positions, a padding mask
    ("llama_past__tsn_sdpa_op17", 1, 7, (1, 1)),
    ("llama_past__tsn_sdpa_op17", 2, 0, (1, 1, 1, 1)),
    ("llama_past__tsn_sdpa_op17", 3, 7, (1, 1, 1)),
    ("llama_past__tsn_sdpa_op17", 4, 2, (1, 1, 1)),
    # learned positions, causal
    ("gpt2_past__tsn_eager_op17", 3, 1, (1, 1, 1)),
    ("gpt2_past__tsn_eager_op17", 4, 9, (3, 1)),
    # a bias by position (ALiBi)
    ("bloom_past__dynamon_eager_op19", 3, 8, (1, 1)),
    # a window of four tokens, and a soft cap
    ("gemma2_past__dynamon_eager_op19", 4, 11, (1, 1, 1)),
    # a bias that is looked up; cross attention, whose caches are whole on every rank
    ("t5_decpast__tsn_eager_op14", 2, 5, (1, 1)),
    # chunks of a prompt: causal, and with a window
    ("chunk_gqa__tsn", 3, 0, (7, 6, 1)),
    ("chunk_window__dynamo", 4, 3, (6, 1)),
]


@pytest.mark.parametrize("name, ranks, past, counts", STEPS)
def test_steps(name: str, ranks: int, past: int, counts: tuple[int, ...]) -> None:
    result = sharded(name, ranks)
    caches = result.report.caches
    feeds = inputs_of(name, past, counts, caches)
    expected = by_one(content(name), feeds, caches)
    found, last = by_ranks(result, feeds)
    check(expected[0], found[0][0])
    for step, outputs in enumerate(expected[1:], 1):
        for each in found:
            check({name: array for name, array in outputs.items() if name not in caches.values()}, each[step])
    length = past + sum(counts)
    for rank, own in enumerate(last):
        assert own.length == length
        for each, present in caches.items():
            axis = result.report.inputs[each]
            assert axis is not None
            part = np.take(expected[-1][present], np.arange(rank, length, ranks), axis)
            check({each: part}, {each: own.arrays[each]})  # a share of the cache, in turn


@pytest.mark.parametrize(
    "name, past, counts, padded",
    [
        ("gptneo_past__tso_eager_op13", 3, (4, 1), 5),
        ("gptneo_past__tso_eager_op13", 2, (1, 3), 4),
        ("gptneo_past__dynamon_eager_op19", 4, (1, 1), 6),
    ],
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_that_are_padded(name: str, past: int, counts: tuple[int, ...], padded: int, ranks: int) -> None:
    """All scores of such a row are the lowest number, so that it is the mean of the values. A rank whose keys the band
    excludes has no part in it."""
    result = sharded(name, ranks)
    caches = result.report.caches
    feeds = inputs_of(name, past, counts, caches, padded)
    found, _ = by_ranks(result, feeds)
    for step, outputs in enumerate(by_one(content(name), feeds, caches)):
        check({"logits": outputs["logits"]}, {"logits": found[0][step]["logits"]})


def test_a_cache_with_nan() -> None:
    name = "gpt2_past__tsn_eager_op17"
    result = sharded(name, 3)
    feeds = inputs_of(name, 7, (1, 1), result.report.caches)
    feeds[0]["past_key_1"][0, 1, 3, 2] = np.nan
    expected = by_one(content(name), feeds, result.report.caches)
    found, _ = by_ranks(result, feeds)
    assert np.isnan(expected[1]["logits"]).any()
    for each in found:
        check({"logits": expected[1]["logits"]}, each[1])


Shapes = dict[str, Sequence[int | str]]

B, N, D, W = 2, 2, 6, 24
BY_HEAD = ("batch", N, "past", D)
RNG = np.random.default_rng(0)
WEIGHTS = {f"w{each}": RNG.standard_normal((W, N * D)).astype(np.float32) for each in "qkv"}
CONSTANTS: dict[str, Array] = {
    "heads": np.array([0, 0, N, D]),
    "scale": np.array(D**-0.5, np.float32),
    "zero": np.array(0),
    "one": np.array(1),
    "first": np.array([0]),
    "flat": np.array([0, 0, -1]),
    "end": np.array([2]),
    "split": np.array([N, D]),
    "step": np.array(0.1, np.float32),
    "point": np.array(0, np.int8),
}


def node(op: str, inputs: str, output: str, **attrs: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), output.split(), name=f"{op}_{output.split()[0]}", **attrs)


def step_model(caches: Shapes, nodes: Sequence[onnx.NodeProto], kind: int = 1) -> onnx.ModelProto:
    """An attention of x [batch, seq, 24] over caches. The nodes make k and v [batch, heads, keys, size] of k_new and
    v_new [batch, seq, heads, size], and each cache's present."""
    ends = [
        *(node("MatMul", f"x w{each}", f"{each}_wide") for each in "qkv"),
        *(node("Reshape", f"{each}_wide heads", f"{each}_new") for each in "qkv"),
        node("Transpose", "q_new", "q", perm=[0, 2, 1, 3]),
        *nodes,
        node("Transpose", "k", "kt", perm=[0, 1, 3, 2]),
        node("MatMul", "q kt", "scores"),
        node("Mul", "scores scale", "scaled"),
        node("Softmax", "scaled", "probabilities", axis=-1),
        node("MatMul", "probabilities v", "mixed"),
        node("Transpose", "mixed", "back", perm=[0, 2, 1, 3]),
        node("Reshape", "back flat", "y"),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "seq", W])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    for name, shape in caches.items():
        inputs.append(helper.make_tensor_value_info(name, kind, shape))
        outputs.append(helper.make_tensor_value_info(name.replace("past", "present"), kind, None))
    read = {name for each in ends for name in each.input}
    weights = [numpy_helper.from_array(a, name) for name, a in {**WEIGHTS, **CONSTANTS}.items() if name in read]
    graph = helper.make_graph(ends, "step", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def both(op: str, inputs: str, output: str, **attrs: Any) -> list[onnx.NodeProto]:
    """The same node for key and value: * in a name stands for k and v."""
    return [node(op, inputs.replace("*", each), output.replace("*", each), **attrs) for each in "kv"]


FORMS: dict[str, tuple[Shapes, list[onnx.NodeProto], int]] = {
    "tokens before heads": (
        dict.fromkeys(("past_k", "past_v"), ("batch", "past", N, D)),
        [
            *both("Concat", "past_* *_new", "present_*", axis=1),
            *both("Transpose", "present_*", "*", perm=[0, 2, 1, 3]),
        ],
        1,
    ),
    "heads in one dimension, and sizes that are computed": (
        dict.fromkeys(("past_k", "past_v"), ("batch", "past", N * D)),
        [
            *both("Concat", "past_* *_wide", "present_*", axis=1),
            *both("Shape", "present_*", "*_shape"),
            *both("Slice", "*_shape first end", "*_sizes"),
            *both("Concat", "*_sizes split", "*_target", axis=0),
            *both("Reshape", "present_* *_target", "*_split"),
            *both("Transpose", "*_split", "*", perm=[0, 2, 1, 3]),
        ],
        1,
    ),
    "a cache that is moved before new keys are joined with it": (
        dict.fromkeys(("past_k", "past_v"), ("batch", "past", N, D)),
        [
            *both("Transpose", "past_*", "*_past", perm=[0, 2, 1, 3]),
            *both("Transpose", "*_new", "*_heads", perm=[0, 2, 1, 3]),
            *both("Concat", "*_past *_heads", "*", axis=2),
            *both("Transpose", "*", "present_*", perm=[0, 2, 1, 3]),
        ],
        1,
    ),
    "key and value in one cache": (
        {"past": (2, *BY_HEAD)},
        [
            node("Gather", "past zero", "past_k", axis=0),
            node("Gather", "past one", "past_v", axis=0),
            *both("Transpose", "*_new", "*_heads", perm=[0, 2, 1, 3]),
            *both("Concat", "past_* *_heads", "*", axis=2),
            *both("Unsqueeze", "* first", "*_row"),
            node("Concat", "k_row v_row", "present", axis=0),
        ],
        1,
    ),
    "caches of float16": (
        dict.fromkeys(("past_k", "past_v"), BY_HEAD),
        [
            *both("Transpose", "*_new", "*_heads", perm=[0, 2, 1, 3]),
            *both("Cast", "*_heads", "*_half", to=TensorProto.FLOAT16),
            *both("Concat", "past_* *_half", "present_*", axis=2),
            *both("Cast", "present_*", "*", to=TensorProto.FLOAT),
        ],
        TensorProto.FLOAT16,
    ),
    "caches of int8": (
        dict.fromkeys(("past_k", "past_v"), BY_HEAD),
        [
            *both("Transpose", "*_new", "*_heads", perm=[0, 2, 1, 3]),
            *both("QuantizeLinear", "*_heads step point", "*_rounded"),
            *both("Concat", "past_* *_rounded", "present_*", axis=2),
            *both("DequantizeLinear", "present_* step point", "*"),
        ],
        TensorProto.INT8,
    ),
    "names of their own for the lengths": (
        {"past_k": BY_HEAD, "past_v": ("batch", N, "past_of_values", D)},
        [
            *both("Transpose", "*_new", "*_heads", perm=[0, 2, 1, 3]),
            *both("Concat", "past_* *_heads", "present_*", axis=2),
            *both("Identity", "present_*", "*"),
        ],
        1,
    ),
}


@pytest.mark.parametrize("past", [0, 5])
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_caches(form: str, past: int, tmp_path: Path) -> None:
    shapes, nodes, kind = FORMS[form]
    model = step_model(shapes, nodes, kind)
    result = fa_compiler.shard(model, tmp_path / "out", 3)
    caches = result.report.caches
    assert caches == {name: name.replace("past", "present") for name in shapes}
    rng = np.random.default_rng(past)
    sizes = {"batch": B, "past": past, "past_of_values": past}
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    feeds: list[Feeds] = [{"x": rng.standard_normal((B, count, W)).astype(np.float32)} for count in (2, 1, 1)]
    for name, shape in shapes.items():
        own = [sizes.get(str(size), size) for size in shape]
        feeds[0][name] = (9 * rng.standard_normal(own)).astype(dtype)  # type: ignore[arg-type]
    expected = by_one(model, feeds, caches)
    found, last = by_ranks(result, feeds)
    check(expected[0], found[0][0])
    for own_outputs in found:
        check({"y": expected[-1]["y"]}, own_outputs[-1])
    counts = [next(iter(each.arrays.values())).shape[result.report.inputs[next(iter(caches))] or 0] for each in last]
    assert sum(counts) == past + 4 and max(counts) - min(counts) <= 1


@pytest.mark.parametrize("room", [0, 14])
def test_entries_of_several_lengths(room: int, tmp_path: Path) -> None:
    """GroupQueryAttention, as onnxruntime-genai writes it: the new keys of each text are behind its own last one. The
    caches grow by the new tokens, or have room for more."""
    decoder = genai.Decoder().model
    result = fa_compiler.shard(decoder, tmp_path / "out", 3)
    caches = result.report.caches
    assert len(caches) == 4
    rng = np.random.default_rng(room)
    feeds: list[Feeds] = []
    lengths = np.array([5, 3])
    for count in (5, 1, 1, 1):
        total = int(lengths.max())
        mask = (np.arange(total)[None] < lengths[:, None]).astype(np.int64)
        feeds.append({"input_ids": rng.integers(0, genai.WORDS, (2, count)), "attention_mask": mask})
        lengths = lengths + 1
    held = (2, genai.KEY_HEADS, room, genai.SIZE)
    feeds[0] |= {name: np.full(held, 7, np.float32) for name in caches}  # a prompt does not read them
    expected = by_one(decoder, feeds, caches)
    found, last = by_ranks(result, feeds)
    check(expected[0], found[0][0])
    for own_outputs in found:
        for outputs, wanted in zip(own_outputs[1:], expected[1:], strict=True):
            check({"logits": wanted["logits"]}, outputs)
    for rank, own in enumerate(last):
        for name, present in caches.items():
            check({name: expected[-1][present][:, :, rank::3]}, {name: own.arrays[name]})
    empty = ShardedSession(fa_compiler.shard(decoder, tmp_path / "one", 1).path).empty_caches(3)
    assert {each.shape for each in empty.arrays.values()} == {(3, genai.KEY_HEADS, 0, genai.SIZE)}


# The nearest node of a type above the entry of the rows, and which of its inputs another one replaces.
WRONG_ROWS = {
    "a Where that keeps other rows": ("Where", 1, 2),
    "a Range that begins elsewhere": ("Range", 0, 2),
    "another number of keys before": ("Sub", 1, 0),
    "a place that is not compared": ("Less", 0, 1),
}


@pytest.mark.parametrize("wrong", WRONG_ROWS)
def test_rows_that_may_change_their_places(wrong: str) -> None:
    """Each condition of the grammar of gathered rows counts."""
    options = replace(make_options(assume=["separate-caches"]), divided=True)
    fused, _, _ = fuse_loaded(load(genai.Decoder().model), options, None)
    gather = next(each for each in fused.graph if each.op_type == "GatherND")
    found = gathered_rows(gather, analyse(fused))
    assert found is not None
    op_type, place, other = WRONG_ROWS[wrong]
    maker = found.entries[found.axis].producer()
    assert maker is not None
    node = next(each for each in reached([maker], lambda each: each.predecessors()) if each.op_type == op_type)
    node.replace_input_with(place, node.inputs[other])
    assert gathered_rows(gather, analyse(fused)) is None


@pytest.mark.parametrize("name, ranks", [("gpt2_past__tsn_eager_op17", 3), ("chunk_window__dynamo", 2)])
def test_a_prompt_in_a_ring_and_then_steps(name: str, ranks: int, tmp_path: Path) -> None:
    """The ranks divide the prompt in zigzag order, and hand their keys over to the order of caches."""
    steps = sharded(name, ranks)
    caches = steps.report.caches
    feeds = inputs_of(name, 0, (13, 1, 2), caches)
    expected = by_one(content(name), feeds, caches)
    given = {each: array for each, array in feeds[0].items() if each not in caches}
    prompt = fa_compiler.shard(content(name), tmp_path / "prompt", ranks, method="ring", prompt=True)
    assert prompt.report.order == ZIGZAG
    assert not set(prompt.report.inputs) & set(caches)

    def task(own: Communicator) -> list[Feeds]:
        whole, session = ShardedSession(prompt.path, own, 1), ShardedSession(steps.path, own, 1)
        outputs = whole.run(given)
        parts = whole.parts({each: array.shape for each, array in given.items()})
        held = session.take_caches(outputs, parts.positions(own.rank))
        found = [whole.gather(outputs, given)]
        for step in feeds[1:]:
            outputs, held = session.step(step, held)
            found.append(outputs)
        return found

    every = run_threads(ranks, task, 60)
    check(expected[0], every[0][0])
    for found in every:
        for outputs, wanted in zip(found[1:], expected[1:], strict=True):
            check({each: array for each, array in wanted.items() if each not in caches.values()}, outputs)


def test_parts_in_files(tmp_path: Path) -> None:
    """A run reads whole caches, each rank its part, and writes its part; the next one continues with these files. The
    last one gathers the caches."""
    name = "llama_past__tsn_sdpa_op17"
    result = sharded(name, 3)
    feeds = inputs_of(name, 4, (1, 1, 1), result.report.caches)
    expected = by_one(content(name), feeds, result.report.caches)
    loaded = load(result.path)
    for number, step in enumerate(feeds):
        save_arrays(tmp_path / f"x{number}.npz", step)
    tasks = [
        ShardedRun(
            loaded,
            tmp_path / f"x{number}.npz",
            tmp_path / f"y{number}.npz",
            threads=1,
            keep_parts=number < 2,
            caches=tmp_path / f"y{number - 1}.npz" if number else None,
        )
        for number in range(3)
    ]
    for task in tasks:
        run_threads(3, lambda own, task=task: run_sharded(task, own), 60)
    with np.load(tmp_path / "y1.1-of-3.npz") as archive:
        np.testing.assert_array_equal(archive["positions"], [1, 4])
        check({"logits": expected[1]["logits"]}, {"logits": archive["logits"]})
    with np.load(tmp_path / "y2.npz") as archive:
        check(expected[2], dict(archive))


@pytest.mark.parametrize(
    "wrong, said",
    [
        ("no file", "y.0-of-1.npz: no such file"),
        ("one file", "--caches takes the files that `run --parts` wrote, here y.0-of-1.npz; give whole caches with"),
        ("no cache", "lacks 'present_value_1'; give a file that `run --parts` wrote of caches"),
        ("positions", "the positions of the ranks' caches are not those of one sequence of 3 tokens"),
        ("tokens", "the caches of rank 0 have another number of tokens than its positions"),
        ("the caches are the outputs", "holds the caches; choose another name for the outputs"),
        ("no caches", "has no caches: --caches does not go with it"),
    ],
)
def test_caches_that_do_not_fit(wrong: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "llama_past__tsn_sdpa_op17"
    result = sharded("bert" if wrong == "no caches" else name, 1)
    (step,) = inputs_of(name, 3, (1,), {f"past_{kind}_{layer}": "" for kind in ("key", "value") for layer in (0, 1)})
    held = {each.replace("past", "present"): step.pop(each) for each in list(step) if each.startswith("past")}
    held["positions"] = np.arange(1, 4) if wrong == "positions" else np.arange(2 if wrong == "tokens" else 3)
    if wrong == "no cache":
        del held["present_value_1"]
    if wrong != "no file":
        save_arrays(tmp_path / ("y.npz" if wrong == "one file" else "y.0-of-1.npz"), held)
    save_arrays(tmp_path / "x.npz", step)
    before = sorted(each.name for each in tmp_path.iterdir())
    words = ["run", str(result.path), "--inputs", str(tmp_path / "x.npz"), "--caches", str(tmp_path / "y.npz")]
    z = tmp_path / ("y.npz" if wrong == "the caches are the outputs" else "z.npz")
    assert main([*words, "--outputs", str(z), "--parts"]) == 2
    assert said in capsys.readouterr().err
    assert sorted(each.name for each in tmp_path.iterdir()) == before


def test_inputs_without_caches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message says which option takes those of an earlier run."""
    result = sharded("llama_past__tsn_sdpa_op17", 1)
    save_arrays(tmp_path / "x.npz", {"input_ids": np.array([[1]])})
    assert main(["run", str(result.path), "--inputs", str(tmp_path / "x.npz"), "--outputs", "z.npz"]) == 2
    assert "x.npz lacks the cache 'past_key_0'; give --caches the outputs of" in capsys.readouterr().err


def test_a_file_that_was_fused_for_ascend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its operators have no rules. The command takes the original."""
    fa_compiler.optimize(harness.load("bert__dynamon_sdpa_op20"), tmp_path / "fused.onnx", target="ascend")
    words = ["shard", str(tmp_path / "fused.onnx"), "-o", str(tmp_path / "out"), "--sequence-parallel", "2"]
    assert main(words) == 2
    assert "give the model as it was before it was fused" in capsys.readouterr().err


def test_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content("llama_past__tsn_sdpa_op17"))
    words = ["shard", str(path), "-o", str(tmp_path / "out"), "--sequence-parallel", "4", "--length", "4000"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    for part in (
        "the milliseconds that the cost model expects, for 4,000 keys in the caches",
        "input past_key_0: in parts along dimension 2",
        "each rank has its part of the caches in turn",
    ):
        assert part in shown
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["caches"]["past_key_0"] == "present_key_0"
    attention = told["attentions"][0]
    assert attention["method"] == MERGE
    assert attention["bytes_sent_by_a_rank"] == {MERGE: 3 * 4 * (16 * 4 + 8)}
    assert attention["bytes_of_the_caches_of_a_rank"] == 1000 * 2 * 32 * 4


def refused(model: onnx.ModelProto | bytes, folder: Path, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        fa_compiler.shard(model, folder / "out", 2, **options)
    assert not (folder / "out").exists()
    return str(caught.value)


def test_a_file_with_its_caches_in_place(tmp_path: Path) -> None:
    """The message names what to divide in its place. The word of an operator's input would be no help."""
    name = "llama_past__tsn_sdpa_op17"
    written = fa_compiler.optimize(content(name), tmp_path / "in_place.onnx", in_place_caches=True).model
    assert "has its caches in place; give the model from which it was made" in refused(written, tmp_path)


def test_what_is_refused(tmp_path: Path) -> None:
    llama = content("llama_past__tsn_sdpa_op17")
    assert "ring is not possible: its keys are those of caches, of which each rank has" in refused(
        llama, tmp_path, method="ring"
    )
    assert "merge is not possible: its keys are not those of caches" in refused(
        content("llama"), tmp_path, method="merge"
    )
    shapes, nodes, _ = FORMS["names of their own for the lengths"]
    lost = step_model(shapes, nodes)
    lost.graph.output[1].name = "kt"  # the keys in another order
    assert "no output has the cache 'past_k' with its new tokens" in refused(lost, tmp_path)
    shapes, nodes, _ = FORMS["a cache that is moved before new keys are joined with it"]
    twice = step_model(shapes, [*nodes, node("Identity", "present_k", "again")])
    twice.graph.output.append(helper.make_tensor_value_info("again", TensorProto.FLOAT, None))
    assert "several outputs may have the cache 'past_k' with its new tokens" in refused(twice, tmp_path)
    shapes, nodes, _ = FORMS["names of their own for the lengths"]
    read = step_model(shapes, [*nodes, node("ReduceSum", "past_k", "summed"), node("Add", "v summed", "w")])
    for each in read.graph.node:
        each.input[:] = ["w" if name == "v" and each.op_type == "MatMul" else name for name in each.input]
    told = refused(read, tmp_path)
    assert "node 'ReduceSum_summed' (ReduceSum): each rank would need all tokens of the cache 'past_k'" in told
    assert "not proven to be as long as the sequence" in refused(content("chunk_static__dynamo"), tmp_path)
    assert "(IncreFlashAttention, in the place of 'MatMul'): this kind of attention is not divided" in refused(
        quantised(), tmp_path, assume=VOUCHED
    )
    branch = refused(merged(), tmp_path)
    assert "(FlashAttentionScore, in the place of 'Reshape'): attention in a branch or loop is not divided" in branch
    apart = refused(content("t5__dynamon_sdpa_op20"), tmp_path)
    assert "(FlashAttentionScore, in the place of 'node_" in apart
    assert "divide encoder and decoder as models of their own" in apart
    assert "name the inputs of both by `axes`" in apart
    assert "no cache was found that a prompt could fill" in refused(content("llama"), tmp_path, prompt=True)
    one = refused(content("t5_decpast__tsn_eager_op14"), tmp_path, prompt=True)
    assert "the model takes one token at a time; export it with an open number of tokens" in one
    fixed = refused(content("onnx_attention_3d_gqa_with_past_and_present__onnx119"), tmp_path, prompt=True)
    assert "the model fixes the number of tokens of the cache 'past_key' to 12" in fixed
    shared = refused(genai.Decoder().model, tmp_path, assume=["shared-caches"])
    assert "(FlashAttentionScore): its key is not proven to be as long as the sequence" in shared


def test_caches_of_several_lengths() -> None:
    result = sharded("llama_past__tsn_sdpa_op17", 1)
    (step,) = inputs_of("llama_past__tsn_sdpa_op17", 3, (1,), result.report.caches)
    step["past_value_1"] = step["past_value_1"][:, :, :2]
    with pytest.raises(InputError, match=r"the inputs need sequences of one length .*'past_value_1' has 2"):
        ShardedSession(result.path).run(step)


def test_empty_caches() -> None:
    """Decoding begins without a token. A step sends nothing but what the report says, for each of two texts."""
    name = "gpt2_past__tsn_eager_op17"
    result = sharded(name, 3)
    feeds = inputs_of(name, 0, (1, 1), result.report.caches)
    expected = by_one(content(name), feeds, result.report.caches)

    def task(own: Communicator) -> Feeds:
        session = ShardedSession(result.path, own, threads=1)
        caches = session.empty_caches(2)
        for step in feeds:
            given = {each: array for each, array in step.items() if each not in result.report.caches}
            before = own.sent
            outputs, caches = session.step(given, caches)
            assert own.sent - before == 2 * sum(each.sent[MERGE] for each in result.report.choices)
        return outputs

    for outputs in run_threads(3, task, 60):
        check({"logits": expected[-1]["logits"]}, outputs)
    with pytest.raises(InputError, match="takes the input 'attention_mask', which is missing"):
        session = ShardedSession(sharded(name, 1).path)
        session.step({"input_ids": feeds[0]["input_ids"]}, session.empty_caches())
    with pytest.raises(InputError, match="continues with the output 'present_key_0', which is missing"):
        session.take_caches({}, np.arange(3))
