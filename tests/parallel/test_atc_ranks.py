"""`atc --sequence-parallel`: the files of the ranks compute what one process computes; wrong requests write nothing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

import fa_compiler
from fa_compiler.command_line.main import main
from fa_compiler.errors import InputError
from fa_compiler.lowering.ascend.air import read
from fa_compiler.lowering.ascend.air.check import ACCEPTED, check, verdict
from fa_compiler.op_registry.collectives import METHODS
from fa_compiler.parallel.parts import Parts
from tests.graphs import harness
from tests.pairs import pairwise

from .air_ranks import run_ranks
from .running import EXAMPLES, by_one, text
from .running import check as compare

LENGTH = 16
SIZES = {"input_ids": (1, LENGTH), "attention_mask": (1, LENGTH)}
SHAPES = "input_ids:1,16;attention_mask:1,16"


@pytest.mark.parametrize("name, ranks, method", pairwise(["bert", "gpt2", "llama"], [2, 4], METHODS))
def test_the_ranks_compute_what_one_process_computes(name: str, ranks: int, method: str, tmp_path: Path) -> None:
    """With this assumption the causal models are in zigzag order, and their masks are triangles."""
    out = tmp_path / "out"
    options = {"sequence_parallel": ranks, "method": method, "assume": ["no-empty-rows"]}
    fa_compiler.compile_for_atc(EXAMPLES / f"{name}.onnx", out, "Ascend910B2", input_shape=SIZES, **options)
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))["parallel"]
    assert {entry["method"] for entry in report["attentions"]} == {method}
    assert report["order"] == ("zigzag" if name != "bert" and method != "all-to-all" else "contiguous")
    files = [out / entry["file"] for entry in report["models"]]
    for file in files:
        assert verdict(check(file)) == ACCEPTED
    parts = Parts(report["order"], ranks, LENGTH)
    for rank, entry in enumerate(report["models"]):
        assert entry["tokens"] == [[start, stop - 1] for start, stop in parts.chunks(rank)]
    feeds = text(name, LENGTH, batch=1)
    own = [
        {key: parts.own(array, report["inputs"][key], rank) for key, array in feeds.items()} for rank in range(ranks)
    ]
    outputs = run_ranks([read(file) for file in files], own)
    ((key, axis),) = report["outputs"].items()
    compare(by_one(name, feeds), {key: parts.joined([each[0] for each in outputs], axis)})


@pytest.mark.parametrize("method", METHODS)
def test_a_bias_in_the_place_of_a_mask(method: str, tmp_path: Path) -> None:
    """Without an assumption the mask of GPT-2 is a bias of all rows and keys, with numbers that are finite."""
    out = tmp_path / "out"
    fa_compiler.compile_for_atc(
        EXAMPLES / "gpt2.onnx", out, "Ascend910B2", input_shape=SIZES, sequence_parallel=2, method=method
    )
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))["parallel"]
    feeds, parts = text("gpt2", LENGTH, batch=1), Parts(report["order"], 2, LENGTH)
    own = [{key: parts.own(array, 1, rank) for key, array in feeds.items()} for rank in range(2)]
    outputs = run_ranks([read(out / entry["file"]) for entry in report["models"]], own)
    compare(by_one("gpt2", feeds), {"logits": parts.joined([each[0] for each in outputs], 1)})


def test_a_token_that_is_taken_out(tmp_path: Path) -> None:
    """A classifier reads the first token: every rank has the result."""
    name = "bert_tt__tsn_sdpa_op17"
    feeds = text(name, LENGTH, batch=1)
    shapes = {key: array.shape for key, array in feeds.items()}
    fa_compiler.compile_for_atc(
        harness.load(name), tmp_path / "out", "Ascend910B2", input_shape=shapes, sequence_parallel=4
    )
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))["parallel"]
    parts = Parts(report["order"], 4, LENGTH)
    own = [{key: parts.own(array, 1, rank) for key, array in feeds.items()} for rank in range(4)]
    for (found,) in run_ranks([read(tmp_path / "out" / entry["file"]) for entry in report["models"]], own):
        compare(by_one(name, feeds), {"logits": found})


def test_a_sum_of_sizes_is_one_number(tmp_path: Path) -> None:
    """The mask of batch * sequence bytes becomes one of batch * sequence * sequence."""
    report = fa_compiler.compile_for_atc(
        EXAMPLES / "bert.onnx",
        tmp_path / "out",
        "Ascend910B2",
        input_shape=SIZES,
        sequence_parallel=2,
        assume=["no-empty-rows"],
    )
    (missed,) = report.blocks[0].missed
    assert missed.reason == "the operator takes it in full only: 240 bytes are added"


def test_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    words = [str(EXAMPLES / "bert.onnx"), "-o", str(out), "--soc-version", "Ascend910_9391", "--input-shape", SHAPES]
    assert main(["atc", *words, "--sequence-parallel", "2", "--sequence-axis", "input_ids:1"]) == 0
    printed = capsys.readouterr().out
    assert "2 ranks, contiguous order; attentions: 2 by" in printed
    assert "the operator takes it in full only: 3072 bytes are added" in printed  # 12 * batch * sequence * sequence
    files = sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file())
    configs = ["cluster_config.json", "model_relation_config.json"]
    assert files == ["atc.sh", *configs, "ranks/rank_0.air", "ranks/rank_1.air", "report.json"]
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert report["inputs"][0] == {"name": "input_ids", "type": "DT_INT64", "shape": "1,8"}
    for word in (
        "--framework=1",
        "--distributed_cluster_build=1",
        "--cluster_config=cluster_config.json",
        "--shard_model_dir=ranks",
        "--model_relation_config=model_relation_config.json",
        "--output=model",
        "--soc_version=Ascend910_9391",
    ):
        assert word in report["command"]
        assert word in (out / "atc.sh").read_text(encoding="utf-8")
    assert not [word for word in report["command"] if word.startswith(("--model=", "--input_shape"))]
    relation = json.loads((out / configs[1]).read_text(encoding="utf-8"))
    assert relation == {
        "deploy_config": [
            {"submodel_name": f"rank_{rank}.air", "deploy_device_id_list": f"0:0:{rank}"} for rank in (0, 1)
        ],
        "model_name_to_instance_id": [
            {"submodel_name": f"rank_{rank}.air", "model_instance_id": rank} for rank in (0, 1)
        ],
        "rank_table": [{"rank_id": rank, "model_instance_id": rank} for rank in (0, 1)],
    }
    cluster = json.loads((out / configs[0]).read_text(encoding="utf-8"))
    (node,) = cluster["cluster"][0]["cluster_nodes"]
    assert [item["item_id"] for item in node["item_list"]] == [0, 1]
    (device,) = cluster["item_def"]
    assert device["item_type"] == "Ascend910_9391"
    assert (device["memory"], device["aic_type"]) == ("[DDR:64GB]", "[DAVINCI_V100:24]")


@pytest.mark.parametrize(
    ("soc", "memory", "cores"), [("Ascend910B4", 32, 20), ("Ascend910B2", 64, 24), ("Ascend910B2C", 64, 24)]
)
def test_the_devices_are_those_of_the_soc_version(soc: str, memory: int, cores: int, tmp_path: Path) -> None:
    bert = EXAMPLES / "bert.onnx"
    fa_compiler.compile_for_atc(bert, tmp_path / "out", soc, input_shape=SHAPES, sequence_parallel=2)
    (device,) = json.loads((tmp_path / "out" / "cluster_config.json").read_text(encoding="utf-8"))["item_def"]
    assert (device["memory"], device["aic_type"]) == (f"[DDR:{memory}GB]", f"[DAVINCI_V100:{cores}]")


def test_more_ranks_than_a_node_may_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-o", str(tmp_path / "out"), "--soc-version", "Ascend910B2", "--sequence-parallel", "16"]
    assert main(["atc", str(EXAMPLES / "bert.onnx"), *words, "--input-shape", SHAPES, "--method", "gather"]) == 0
    printed = capsys.readouterr().out
    assert "1. edit cluster_config.json: ipaddr, port, node_type, resource_type and device_id are examples" in printed
    assert "2. if your nodes have fewer than 16 devices, write an entry of cluster_nodes for each node" in printed


REQUESTS: dict[str, tuple[list[str], str]] = {
    "no equal chunks": (
        ["--sequence-parallel", "3"],
        "16 tokens cannot be cut into 3 equal chunks, which 3 ranks need; 15 or 18 can",
    ),
    "one rank": (["--sequence-parallel", "1"], "--sequence-parallel 1 is one model: leave it out"),
    "fewer ranks": (["--sequence-parallel", "-2"], "-2 ranks: give a number from 2 to 65536"),
    "no number": (["--method", "ring"], "--method and --sequence-axis go with --sequence-parallel"),
    "a method": (["--sequence-parallel", "2", "--method", "star"], "unknown method 'star'"),
    "a slip": (["--sequence-parallel", "2", "--method", "rnig"], "unknown method 'rnig', did you mean 'ring'?"),
    "a method for these heads": (
        ["--sequence-parallel", "8", "--method", "all-to-all"],
        "all-to-all is not possible: 8 ranks do not divide its 4 heads",
    ),
    "an axis": (["--sequence-parallel", "2", "--sequence-axis", "ids:1"], "there is no input 'ids'"),
    "an open size": (
        ["--sequence-parallel", "2", "--input-shape", "input_ids:1,1~16;attention_mask:1,1~16"],
        "'input_ids' has an open one",
    ),
    "gears": (
        ["--sequence-parallel", "2", "--input-shape", "input_ids:1,-1;attention_mask:1,-1", "--dynamic-dims", "8;16"],
        "does not go with --dynamic-dims",
    ),
    "no sizes": (
        ["--sequence-parallel", "2", "--input-shape", ""],
        "'input_ids:batch,sequence;attention_mask:batch,sequence', and replace each name by a number",
    ),
    "a route": (["--sequence-parallel", "2", "--route", "onnx"], "goes with --route air, not onnx"),
    "single operators": (["--sequence-parallel", "2", "--single-op"], "--single-op does not go with"),
    "a product": (
        ["--sequence-parallel", "2", "--soc-version", "Ascend310P3"],
        "needs FlashAttentionScore, which Ascend310P3 does not have",
    ),
    "a ring where scores may be infinite": (
        ["--sequence-parallel", "2", "--method", "ring", "--assume", "non-finite-scores"],
        "ring is not possible: scores may be infinite, by --assume non-finite-scores",
    ),
    "a version": (
        ["--sequence-parallel", "2", "--cann", "7.0"],
        "no variant of FlashAttentionScore is known for CANN 7.0",
    ),
    "a ring in an older version": (
        ["--sequence-parallel", "2", "--method", "ring", "--cann", "8.0"],
        "ring is not possible: Ascend910B2 with CANN 8.0 has no RingAttentionUpdate",
    ),
    "a ring without its operator": (
        ["--sequence-parallel", "2", "--method", "ring", "--soc-version", "Ascend950PR_9599"],
        "ring is not possible: Ascend950PR_9599 has no RingAttentionUpdate",
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_wrong_requests(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, said = REQUESTS[name]
    first = [str(EXAMPLES / "bert.onnx"), "-o", str(tmp_path / "out"), "--soc-version", "Ascend910B2"]
    assert main(["atc", *first, "--input-shape", SHAPES, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert "a range" not in line  # no size of a rank is open
    assert list(tmp_path.iterdir()) == []


def test_an_older_version(tmp_path: Path) -> None:
    """The operators of a rank have the attributes of the prototype of that version."""
    options = {"sequence_parallel": 2, "cann": "8.0", "input_shape": SIZES}
    report = fa_compiler.compile_for_atc(EXAMPLES / "llama.onnx", tmp_path / "out", "Ascend910B2", **options)
    assert report.count("fused") == 2


def test_a_folder_with_other_files(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(InputError, match=r"holds note\.txt, which fa-compiler did not write"):
        fa_compiler.compile_for_atc(
            EXAMPLES / "bert.onnx", tmp_path, "Ascend910B2", input_shape=SIZES, sequence_parallel=2
        )
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]


def test_a_model_that_mixes_the_sequence(tmp_path: Path) -> None:
    """A convolution over the tokens is refused by its name."""
    model = onnx.load(EXAMPLES / "bert.onnx")
    (hidden,) = (output.name for output in model.graph.output)
    weight = onnx.numpy_helper.from_array(np.ones((64, 64, 3), np.float32), "window")
    model.graph.initializer.append(weight)
    model.graph.node.extend(
        [
            onnx.helper.make_node("Transpose", [hidden], ["turned"], perm=[0, 2, 1]),
            onnx.helper.make_node("Conv", ["turned", "window"], ["y"], name="over_tokens", pads=[1, 1]),
        ]
    )
    model.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [None, 64, None]))
    with pytest.raises(InputError, match=r"node 'over_tokens' \(Conv\): it mixes the sequence"):
        fa_compiler.compile_for_atc(model, tmp_path / "out", "Ascend910B2", input_shape=SIZES, sequence_parallel=2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("keys", [8, 9])
def test_a_decoder_with_caches(keys: int, tmp_path: Path) -> None:
    """Its caches are in parts, for which a graph of one rank has no form, whatever their length is."""
    model = harness.load("gpt2_past__tsn_eager_op17")
    caches = ";".join(f"past_{what}_{layer}:1,4,{keys},16" for layer in (0, 1) for what in ("key", "value"))
    sizes = f"input_ids:1,1;position_ids:1,1;attention_mask:1,{keys + 1};{caches}"
    with pytest.raises(InputError, match="caches have no form for single ranks; shard writes one for ranks of MPI"):
        fa_compiler.compile_for_atc(model, tmp_path / "out", "Ascend910B2", input_shape=sizes, sequence_parallel=2)
    assert list(tmp_path.iterdir()) == []


def test_a_ring_and_a_bias_that_may_be_infinite(tmp_path: Path) -> None:
    """Every rank would need a key that the bias does not exclude, in each part."""
    model = onnx.load(EXAMPLES / "bert.onnx")
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT and not tensor.dims:
            number = float(onnx.numpy_helper.to_array(tensor))
            if number < -1e30:
                tensor.CopyFrom(onnx.numpy_helper.from_array(np.array(-np.inf, np.float32), tensor.name))
    for node in model.graph.node:
        if node.op_type == "Constant":
            value = onnx.numpy_helper.to_array(node.attribute[0].t)
            if value.dtype == np.float32 and value.size == 1 and value.min() < -1e30:
                node.attribute[0].t.CopyFrom(onnx.numpy_helper.from_array(np.full_like(value, -np.inf)))
    with pytest.raises(InputError, match="ring is not possible: its bias may be infinite"):
        fa_compiler.compile_for_atc(
            model, tmp_path / "out", "Ascend910B2", input_shape=SIZES, sequence_parallel=2, method="ring"
        )
