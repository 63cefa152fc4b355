"""Ranks that fail, hang or disagree: one clear error on each, in time, and nothing half-written."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import fa_compiler
from fa_compiler.command_line.main import main
from fa_compiler.comparison.feeds import save_arrays
from fa_compiler.errors import InputError
from fa_compiler.lowering.ort import eager
from fa_compiler.lowering.ort.own_session import OwnSession
from fa_compiler.model_files.reading import load
from fa_compiler.op_registry import collectives
from fa_compiler.parallel import cores
from fa_compiler.parallel.communicator import Alone, Array, Communicator, RankError
from fa_compiler.parallel.cores import share_of_cores
from fa_compiler.parallel.input_file import load_part
from fa_compiler.parallel.parts import Parts
from fa_compiler.parallel.run import ShardedRun, run_sharded
from fa_compiler.parallel.session import ShardedSession
from fa_compiler.parallel.threads import run_threads
from fa_compiler.passes.parallel.methods import AttentionSizes, Machine, choose
from tests.graphs import harness

from .running import EXAMPLES, by_one, by_ranks, check, content, sharded, text

RANKS = 3


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def inputs(folder: Path, feeds: dict[str, Array]) -> Path:
    save_arrays(folder / "x.npz", feeds)
    return folder / "x.npz"


def errors_of_ranks(task: ShardedRun, changed: dict[int, ShardedRun]) -> list[str]:
    """What each rank says, when some of them have another task."""

    def run(communicator: Communicator) -> str:
        try:
            run_sharded(changed.get(communicator.rank, task), communicator)
        except InputError as error:
            return str(error)
        return "done"

    return run_threads(RANKS, run, 20)


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equally where all may use all of them, else as a launcher binds the ranks. All sessions have these threads."""
    everywhere = [0, 1, 2, 3]
    assert [share_of_cores(everywhere, [everywhere] * ranks) for ranks in (1, 2, 3, 4, 9)] == [4, 2, 1, 1, 1]
    assert share_of_cores([2, 3], [[0, 1], [2, 3]]) == 2
    assert share_of_cores(everywhere, [everywhere, [0, 1]]) == 3

    monkeypatch.setattr(cores, "_cores", lambda: [0, 1, 2, 3, 4, 5])
    assert run_threads(RANKS, cores.threads_of_rank) == [2] * RANKS
    assert cores.threads_of_rank(Alone()) == 0
    made: list[tuple[int, str]] = []
    make = OwnSession.__init__

    def noted(session: OwnSession, model: bytes, options: ort.SessionOptions, **words: Any) -> None:
        stop = options.get_session_config_entry("session.force_spinning_stop")
        made.append((options.intra_op_num_threads, stop))
        make(session, model, options, **words)

    monkeypatch.setattr(OwnSession, "__init__", noted)
    eager._session.cache_clear()
    model, feeds = sharded("llama", RANKS, "ring").path, text("llama", 13)
    run_threads(RANKS, lambda own: ShardedSession(model, own).run(feeds))
    assert set(made) == {(2, "1")}
    assert eager._session.cache_info().misses > 0


@pytest.mark.parametrize("size", [1, 2, 5])
def test_exchange(size: int) -> None:
    def task(communicator: Communicator) -> tuple[list[int], list[bytes], int]:
        rank = communicator.rank
        parts = [np.full(rank + 1, 10 * rank + other, np.int16) for other in range(size)]
        received = communicator.exchange(parts, [(other + 1,) for other in range(size)])
        assert [len(part) for part in received] == [other + 1 for other in range(size)]
        return [int(part[0]) for part in received], communicator.share(bytes([rank]) * rank), communicator.sent

    for rank, (numbers, messages, sent) in enumerate(run_threads(size, task, 20)):
        assert numbers == [10 * other + rank for other in range(size)]
        assert messages == [bytes([other]) * other for other in range(size)]
        assert sent == (size - 1) * (2 * (rank + 1) + 8 + rank)


def test_a_rank_that_fails_ends_the_others() -> None:
    def task(communicator: Communicator) -> None:
        if communicator.rank == 1:
            raise InputError("the disk is gone")
        with pytest.raises(RankError, match="another rank failed: the disk is gone"):
            communicator.share(b"")

    start = time.monotonic()
    with pytest.raises(InputError, match="^the disk is gone$"):
        run_threads(RANKS, task, 30)
    assert time.monotonic() - start < 20


def test_a_rank_that_hangs_is_not_waited_for() -> None:
    def task(communicator: Communicator) -> None:
        if communicator.rank != 1:
            communicator.share(b"")

    with pytest.raises(RankError, match=r"waited 0.2 s for another rank, which ended or is still computing; --timeout"):
        run_threads(RANKS, task, 0.2)


def test_files(tmp_path: Path) -> None:
    """Rank 0 writes whole outputs; with parts, each rank writes its own."""
    feeds = text("llama", 14)
    loaded = load(sharded("llama", RANKS).path)
    x = inputs(tmp_path, feeds)
    assert errors_of_ranks(ShardedRun(loaded, x, tmp_path / "y.npz"), {}) == ["done"] * RANKS
    assert files(tmp_path) == ["x.npz", "y.npz"]
    expected = by_one("llama", feeds)
    with np.load(tmp_path / "y.npz") as archive:
        check(expected, dict(archive))
    assert errors_of_ranks(ShardedRun(loaded, x, tmp_path / "p.npz", keep_parts=True), {}) == ["done"] * RANKS
    whole = np.empty_like(expected["logits"])
    for rank in range(RANKS):
        with np.load(tmp_path / f"p.{rank}-of-{RANKS}.npz") as archive:
            whole[:, archive["positions"]] = archive["logits"]
    check(expected, {"logits": whole})


@pytest.mark.parametrize("kind", ["stored", "compressed", "by columns"])
def test_a_rank_reads_its_part_of_the_inputs(kind: str, tmp_path: Path) -> None:
    feeds = text("llama", 14, batch=3)
    if kind == "by columns":
        feeds = {name: np.asfortranarray(array) for name, array in feeds.items()}
    (np.savez_compressed if kind == "compressed" else np.savez)(tmp_path / "x.npz", **feeds)
    result = sharded("llama", RANKS)
    proto, axes = onnx.load(result.path), result.report.inputs
    parts = Parts(result.report.order, RANKS, 14)
    for rank in range(RANKS):
        own, divided = load_part(
            tmp_path / "x.npz", proto, axes, rank, lambda shapes: Parts(parts.order, 3, shapes["input_ids"][1])
        )
        assert divided == parts
        for name, array in feeds.items():
            np.testing.assert_array_equal(own[name], array[:, parts.positions(rank)])


def test_an_error_of_one_rank_is_that_of_all(tmp_path: Path) -> None:
    loaded = load(sharded("llama", RANKS).path)
    x, y = inputs(tmp_path, text("llama", 14)), tmp_path / "y.npz"
    (tmp_path / "broken.npz").write_bytes(x.read_bytes()[:100])
    task = ShardedRun(loaded, x, y)
    told = errors_of_ranks(task, {2: ShardedRun(loaded, tmp_path / "broken.npz", y)})
    assert len(set(told)) == 1
    assert told[0].startswith(f"rank 2: {tmp_path / 'broken.npz'} is not an .npz file of plain arrays")
    told = errors_of_ranks(task, {0: ShardedRun(loaded, x, tmp_path / "no folder" / "y.npz")})
    assert len(set(told)) == 1 and "there is no folder" in told[0]
    assert (
        errors_of_ranks(ShardedRun(loaded, x, x), {})
        == [f"{x} holds the inputs; choose another name for the outputs"] * 3
    )
    assert files(tmp_path) == ["broken.npz", "x.npz"]


@pytest.mark.parametrize(
    "length, ids, said",
    [
        (5, 5, "the sequence has 5 tokens, and the 3 ranks of this model need at least 6"),
        (14, 13, "the inputs need sequences of one length ('input_ids' has 13, 'attention_mask' has 14)"),
    ],
)
def test_sequences_that_do_not_fit(length: int, ids: int, said: str, tmp_path: Path) -> None:
    feeds = text("llama", length)
    feeds["input_ids"] = feeds["input_ids"][:, :ids]
    loaded = load(sharded("llama", RANKS, "ring").path)
    told = errors_of_ranks(ShardedRun(loaded, inputs(tmp_path, feeds), tmp_path / "y.npz"), {})
    assert len(set(told)) == 1 and said in told[0]


def test_another_number_of_ranks() -> None:
    path = sharded("llama", RANKS).path
    with pytest.raises(
        InputError,
        match="is made for 3 ranks, and runs on 2; start it with mpirun -n 3, or make it again with "
        "`fa-compiler shard --sequence-parallel 2`",
    ):
        run_threads(2, lambda communicator: ShardedSession(path, communicator), 20)
    with pytest.raises(InputError, match="is made for 3 ranks, and runs on 1; start"):
        ShardedSession(path)
    with pytest.raises(InputError, match="takes the input 'attention_mask', which is missing"):
        ShardedSession(sharded("llama", 1).path).run({"input_ids": np.ones((1, 4), np.int64)})


@pytest.mark.parametrize("ranks", [1, 2])
def test_more_tokens_than_positions(ranks: int) -> None:
    """The model has a table of 2,048 positions, and fails with more tokens. So do the ranks."""
    feeds = {"input_ids": np.ones((1, 2050), np.int64), "attention_mask": np.ones((1, 2050), np.int64)}
    with pytest.raises(Exception, match="invalid expand shape"):
        by_one("bert", feeds)
    with pytest.raises((InputError, RankError), match="out of data bounds"):
        by_ranks(sharded("bert", ranks).path, ranks, feeds)


def test_a_length_that_the_model_fixes(tmp_path: Path) -> None:
    """The model takes no other one, and neither do its ranks."""
    proto = onnx.load_model_from_string(content("llama"))
    for value in proto.graph.input:
        value.type.tensor_type.shape.dim[1].dim_value = 6
    path = fa_compiler.shard(proto, tmp_path / "fixed", 1).path
    check(by_one("llama", text("llama", 6)), ShardedSession(path).run(text("llama", 6)))
    for length in (5, 7):
        with pytest.raises(
            InputError, match=f"the length of the sequence, 6 tokens, and the inputs have {length}; exp"
        ):
            ShardedSession(path).run(text("llama", length))


def test_inputs_are_those_of_the_model() -> None:
    session, feeds = ShardedSession(sharded("llama", 1).path), text("llama", 4)
    with pytest.raises(InputError, match=r"takes no input 'mask' \(it takes attention_mask, input_ids\)"):
        session.run({**feeds, "mask": 1})
    with pytest.raises(InputError, match=r"the input 'input_ids' has the shape \[4\], and its sequence is dimension 1"):
        session.run({**feeds, "input_ids": feeds["input_ids"][0]})
    lists = {name: array.tolist() for name, array in feeds.items()}
    for name, array in session.run(feeds).items():
        np.testing.assert_array_equal(session.gather(session.run(lists), lists)[name], array)


def test_a_model_of_one_rank_needs_no_mpi(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    feeds = text("llama", 14)
    path, x, y = sharded("llama", 1).path, inputs(tmp_path, feeds), tmp_path / "y.npz"
    assert main(["run", str(path), "--inputs", str(x), "--outputs", str(y)]) == 0
    assert "logits: float32 [2, 14, 256]" in capsys.readouterr().out
    with np.load(y) as archive:
        check(by_one("llama", feeds), dict(archive))


def test_damaged_models(tmp_path: Path) -> None:
    proto = onnx.load(sharded("llama", RANKS).path)
    entry = next(each for each in proto.metadata_props if each.key == collectives.METADATA_KEY)
    record = json.loads(entry.value)
    wrong = (
        {"ranks": 0},
        {"order": "none"},
        {"order": "cyclic"},
        {"order": "cyclic", "caches": {"past": "present"}},
        {"length": "6"},
    )
    for damaged in ("", "{}", *(json.dumps({**record, **each}) for each in wrong)):
        entry.value = damaged
        (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
        with pytest.raises(
            InputError, match="holds a damaged record of its ranks; make it again with fa-compiler shard"
        ):
            ShardedSession(tmp_path / "m.onnx")
    entry.value = json.dumps({**record, "ranks": 1})
    node = next(each for each in proto.graph.node if each.op_type == collectives.SEQUENCE_ATTENTION)
    node.op_type = "Telepathy"
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(InputError, match=r"\(Telepathy\) is not known to this version of fa_compiler"):
        ShardedSession(tmp_path / "m.onnx")


def test_a_model_that_is_not_sharded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, x = str(EXAMPLES / "llama.onnx"), str(inputs(tmp_path, text("llama", 5)))
    with pytest.raises(InputError, match=r"llama.onnx is no sharded model; make one with fa-compiler shard"):
        ShardedSession(model)
    assert main(["run", model, "--inputs", x, "--outputs", str(tmp_path / "y.npz"), "--parts"]) == 2
    assert "is not sharded: --parts does not go with it" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, said",
    [
        (["--sequence-parallel", "0"], "0 ranks: give a number from 1 to 65536"),
        (
            ["--sequence-parallel", "2", "--method", "magic"],
            "unknown method 'magic'; known are all-to-all, auto, gather, merge, ring",
        ),
        (["--sequence-parallel", "2", "--length", "0"], "0 tokens in a batch of 1: give numbers from 1 upwards"),
        (
            ["--sequence-parallel", "2", "--sequence-axis", "input_ids"],
            "--sequence-axis 'input_ids' is not of the form",
        ),
        (
            ["--sequence-parallel", "2", "--sequence-axis", "tokens:1"],
            "there is no input 'tokens'; known are attention_mask, input_ids",
        ),
        (["--sequence-parallel", "2", "--sequence-axis", "input_ids:4"], "the input 'input_ids' has no dimension 4"),
        (
            ["--sequence-parallel", "2", "--sequence-axis", "input_ids:0"],
            "its result is demanded in parts along dimension 0, not",
        ),
    ],
)
def test_bad_requests(words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["shard", str(EXAMPLES / "llama.onnx"), "-o", str(out), *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert not out.exists()


def test_tokens_that_the_model_makes(tmp_path: Path) -> None:
    """Patches of an image: the error does not only name an option that would not help."""
    model = harness.load("vit__dynamon_sdpa_op20")
    said = r"17 tokens, which is the size of no dimension of an input; tokens that the model makes itself.* cannot be"
    with pytest.raises(InputError, match=said):
        fa_compiler.shard(model, tmp_path / "out", 2)


def test_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, model = tmp_path / "out", str(EXAMPLES / "llama.onnx")
    words = ["shard", model, "-o", str(out), "--sequence-parallel", "3", "--sequence-axis", "input_ids:1"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    for part in (
        "all ranks get all tokens of attention_mask",
        "3 ranks, zigzag order",
        "output logits: in parts along dim",
    ):
        assert part in shown
    assert main([*words, "--json"]) == 0  # the folder is one that shard wrote
    told = json.loads(capsys.readouterr().out)
    assert [each["method"] for each in told["attentions"]] == ["gather", "gather"]
    assert told["attentions"][0]["refused"] == {"all-to-all": "3 ranks do not divide its 4 heads"}
    written = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert written == {**told, "files": ["model.onnx"], "sha256": {}}


def test_external_weights_are_shared(tmp_path: Path) -> None:
    """They are copied once beside the model, and every segment of every rank reads them from there."""
    model = onnx.load_model_from_string(content("llama"))
    (tmp_path / "in").mkdir()
    onnx.save(model, tmp_path / "in" / "m.onnx", save_as_external_data=True, size_threshold=64, location="w")
    result = fa_compiler.shard(tmp_path / "in" / "m.onnx", tmp_path / "out", 2)
    assert files(tmp_path / "out") == ["model.onnx", "model.onnx.data", "report.json"]
    feeds = text("llama", 9)

    def task(communicator: Communicator) -> dict[str, Array]:
        session = ShardedSession(result.path, communicator, threads=1)
        return session.gather(session.run(feeds), feeds)

    check(by_one("llama", feeds), run_threads(2, task, 30)[0])


def test_chunks() -> None:
    """Every token belongs to one rank; below a causal mask all ranks of the zigzag order have about the same work."""
    for order in collectives.ORDERS:
        for ranks in (1, 2, 3, 8):
            parts = Parts(order, ranks, 37)
            every = np.concatenate([parts.positions(rank) for rank in range(ranks)])
            assert sorted(every.tolist()) == list(range(37))
    parts = Parts(collectives.ZIGZAG, 4, 8000)
    work = [int((parts.positions(rank) + 1).sum()) for rank in range(4)]
    assert max(work) - min(work) < 0.001 * max(work)


@pytest.mark.parametrize(
    "heads, key_heads, length, method",
    [(32, 1, 4096, "gather"), (32, 32, 131072, "all-to-all"), (30, 30, 262144, "ring")],
)
def test_the_choice(heads: int, key_heads: int, length: int, method: str) -> None:
    """Few key heads are gathered; many go by heads where the ranks divide them, else in a ring."""
    refused = {} if heads % 8 == 0 else {"all-to-all": "8 ranks do not divide its heads"}
    sizes = AttentionSizes("a", heads, key_heads, 256, 2, True, refused)
    assert choose(sizes, "auto", 8, length, 1, Machine()).method == method


def test_the_machine_decides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Messages that take long are sent by the method with the fewest; the report says for which machine."""
    words = ["shard", str(EXAMPLES / "llama.onnx"), "-o", str(tmp_path / "out"), "--sequence-parallel", "4", "--json"]
    found = []
    for figures in (["--latency", "1"], ["--latency", "0", "--bandwidth", "1e6", "--arithmetic", "1e8"]):
        assert main([*words, *figures]) == 0
        told = json.loads(capsys.readouterr().out)
        found.append(told["attentions"][0]["method"])
        assert told["machine"]["latency"] == float(figures[1])
    assert found == ["gather", "ring"]
    assert main([*words, "--memory", "0"]) == 2
    assert "memory is 0: give a number above 0" in capsys.readouterr().err
