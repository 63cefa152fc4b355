"""Decoders: their caches are found, a session holds them, and `bench` and `verify` run them as they are used."""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import fa_compiler
from fa_compiler.command_line.main import main
from fa_compiler.comparison.decoder import SWITCH, Cache, Rows, caches_of, rows_of
from fa_compiler.comparison.feeds import random_inputs
from fa_compiler.errors import InputError
from fa_compiler.measuring import benchmark, steps
from fa_compiler.measuring.limits import foreseen
from tests.graphs import harness

from . import genai
from .builders import attention, plain, saved
from .test_in_place import decoder as named_otherwise
from .test_merged_decoder import merged

LLAMA, GPT2, T5, ONE_TOKEN, TRACED = (
    "llama_past__tsn_eager_op14",
    "gpt2_past__tsn_eager_op17",
    "t5_decpast__tsn_eager_op14",
    "llama_past__dynamon_sdpa_op20",
    "llama_past__tsn_sdpa_op17",
)
DOCS = Path(__file__).parents[2] / "docs" / "decoding.md"


@pytest.fixture
def memory_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each model takes 3 MiB; test_the_memory_of_a_decoder starts the process."""
    monkeypatch.setattr(steps.Steps, "_memory", lambda self, side, length, part: (3 + length * length) << 20)


@pytest.mark.parametrize(
    "model, cache, rows",
    [
        (lambda: harness.load(LLAMA), Cache("past_key_0", "present_key_0", 2, "growing"), Rows("input_ids", 1)),
        (
            lambda: harness.load(T5),
            Cache("past_self_key_0", "present_key_0", 2, "growing"),
            Rows("decoder_input_ids", 1),
        ),
        (
            lambda: genai.Decoder().model,
            Cache("past_key_values.0.key", "present.0.key", 2, "shared"),
            Rows("input_ids", 1),
        ),
        (
            lambda: genai.Decoder(group_query=False).model,
            Cache("past_key_values.0.key", "present.0.key", 2, "growing"),
            Rows("input_ids", 1),
        ),
        (named_otherwise, Cache("past_k", "new_k", 2, "growing"), Rows("q", 2)),
        (
            lambda: fa_compiler.optimize(named_otherwise(), in_place_caches=True).model,
            Cache("past_k", "new_k", 2, "buffer", "cache_length"),
            Rows("q", 2),
        ),
        (
            lambda: fa_compiler.optimize(genai.Decoder().model, assume=["shared-caches"]).model,
            Cache("past_key_values.0.key", "present.0.key", 2, "buffer"),
            Rows("input_ids", 1),
        ),
    ],
)
def test_caches_are_found(model: Any, cache: Cache, rows: Rows) -> None:
    proto = model()
    found = caches_of(proto)
    assert found[0] == cache
    assert rows_of(proto, found) == rows


def test_sizes_that_are_written_as_names() -> None:
    """An exporter writes ['batch', '2', 'past', '16']: the tokens lie along the open axis."""
    model = harness.load(LLAMA)
    for info in model.graph.input[3:]:
        dims = info.type.tensor_type.shape.dim
        dims[1].dim_param, dims[2].dim_param, dims[3].dim_param = "2", "s54", "16"
    assert {cache.axis for cache in caches_of(model)} == {2}
    assert fa_compiler.DecodingSession(model).step({"input_ids": [[1, 2]]})["logits"].shape == (1, 2, 99)


def test_a_past_whose_size_is_read_is_no_buffer() -> None:
    """The room of a buffer would be taken for its tokens."""
    model = genai.Decoder().model
    model.graph.node.append(helper.make_node("Shape", ["past_key_values.0.key"], ["size"]))
    kinds = {cache.past: cache.kind for cache in caches_of(model)}
    assert kinds == {
        **dict.fromkeys(("past_key_values.0.key", "past_key_values.0.value"), "growing"),
        **dict.fromkeys(("past_key_values.1.key", "past_key_values.1.value"), "shared"),
    }


def recurrent(grows: int = 0) -> onnx.ModelProto:
    """A sum of all tokens so far is a state of fixed size. With `grows` it is declared to be larger behind a step."""
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> g (float[batch,seq,4] x, float[batch,1,4] past_sum) => '
        f"(float[batch,1,4] y, float[batch,{1 + grows},4] present_sum) <int64[1] tokens = {{1}}> "
        "{ new = ReduceSum<keepdims=1>(x, tokens) present_sum = Add(past_sum, new) y = Mul(present_sum, present_sum) }"
    )


def test_a_step_within_a_step_is_refused() -> None:
    """As it comes from a second thread, which would write into the same caches, or forget them meanwhile."""
    session = fa_compiler.DecodingSession(recurrent())
    run, rows = session._session, {"x": np.ones((1, 1, 4), np.float32)}

    def take() -> None:
        session.take_caches({"past_sum": rows["x"]})

    class Meeting:
        """The session of ONNX Runtime, in which another step begins while one runs."""

        def __getattr__(self, name: str) -> Any:
            return getattr(run, name)

        def run_with_iobinding(self, binding: Any) -> None:
            with pytest.raises(InputError, match="another thread runs a step of this session, which"):
                session.step(rows)
            for meets in (session.reset, lambda: session.rewind(0), lambda: session.caches, take):
                with pytest.raises(InputError, match="another thread runs a step of this session, which"):
                    meets()
            session.another()._running.acquire()
            run.run_with_iobinding(binding)

    session._session = Meeting()  # type: ignore[assignment]
    session.step(rows)
    assert session.step(rows)["y"][0, 0, 0] == 4 and session.length == 2


@pytest.mark.parametrize("made", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_is_refused(made: Callable[[Any], Any]) -> None:
    """Its steps would overwrite the rows of the first session."""
    session = fa_compiler.DecodingSession(recurrent())
    with pytest.raises(TypeError, match=r"as its caches are buffers: `another\(\)` makes a session over"):
        made(session)


def test_a_number_of_threads_that_takes_all_memory() -> None:
    with pytest.raises(InputError, match="threads is a number up to 1024, not 100000"):
        fa_compiler.DecodingSession(recurrent(), threads=100_000)


def test_a_state_is_replaced() -> None:
    session = fa_compiler.DecodingSession(recurrent())
    assert [cache.kind for cache in session.caches_by_input.values()] == ["state"]
    for count in (1, 3, 4):
        rows = 1 if count != 3 else 2
        found = session.step({"x": np.ones((2, rows, 4), np.float32)})["y"]
        np.testing.assert_array_equal(found, np.full((2, 1, 4), count**2))
    assert session.caches["past_sum"].shape == (2, 1, 4)
    with pytest.raises(InputError, match="'past_sum' is a state of all tokens, of which none can be forgotten"):
        session.rewind(2)
    other = fa_compiler.DecodingSession(recurrent())
    other.take_caches(session.caches)
    assert other.step({"x": np.ones((2, 1, 4), np.float32)})["y"][0, 0, 0] == 25
    with pytest.raises(InputError, match=r"fixes the number of tokens in its cache 'past_sum' \[batch, 1, 4\]"):
        fa_compiler.DecodingSession(recurrent(1))


def test_a_state_of_open_size_is_that_of_the_prompt() -> None:
    """A convolution keeps its last columns: as many behind a step as before it, as exporters name the size."""
    model = recurrent()
    for info in (model.graph.input[1], model.graph.output[1]):
        info.type.tensor_type.shape.dim[1].dim_param = "s84"
    session = fa_compiler.DecodingSession(model)
    assert [cache.kind for cache in session.caches_by_input.values()] == ["state"]
    with pytest.raises(InputError, match="leaves the size of its state 'past_sum' open: begin with take_caches"):
        session.step({"x": np.ones((2, 1, 4), np.float32)})
    session.take_caches({"past_sum": np.ones((2, 1, 4), np.float32)})
    assert session.step({"x": np.ones((2, 1, 4), np.float32)})["y"][0, 0, 0] == 4


def test_a_padded_batch_goes_on_from_its_first_step() -> None:
    """The mask and the positions of a step follow from those before it, also behind a rewind."""
    prompt = {
        "input_ids": np.array([[1, 1, 5, 6], [7, 8, 9, 4]]),
        "attention_mask": np.array([[0, 0, 1, 1], [1, 1, 1, 1]]),
        "position_ids": np.array([[0, 0, 0, 1], [0, 1, 2, 3]]),
    }
    told, left = (fa_compiler.DecodingSession(harness.load(LLAMA)) for _ in range(2))
    for session in (told, left):
        session.step(prompt)
    for new in (1, 2):
        ids = np.full((2, new), 3)
        seen = told.length + new - 4
        mask = np.concatenate([prompt["attention_mask"], np.ones((2, seen), np.int64)], 1)
        places = np.array([[1], [3]]) + np.arange(seen - new + 1, seen + 1)
        wanted = told.step({"input_ids": ids, "attention_mask": mask, "position_ids": places})
        np.testing.assert_array_equal(left.step({"input_ids": ids})["logits"], wanted["logits"])
    left.rewind(5)
    np.testing.assert_array_equal(left.step({"input_ids": ids})["logits"], wanted["logits"])
    left.reset()
    fresh = fa_compiler.DecodingSession(harness.load(LLAMA)).step({"input_ids": ids})
    np.testing.assert_array_equal(left.step({"input_ids": ids})["logits"], fresh["logits"])


@pytest.mark.parametrize("assumed", [None, "shared-caches", "separate-caches"])
def test_a_model_that_counts_the_mask_takes_padding_behind_the_tokens(assumed: str | None) -> None:
    """The files of onnxruntime-genai's builder read the first keys, as many as the mask has ones."""
    model = genai.Decoder().model
    if assumed is not None:
        model = fa_compiler.optimize(model, assume=[assumed]).model
    session = fa_compiler.DecodingSession(model)
    alone = [
        session.step({"input_ids": [[11, 3]]})["logits"][0, -1],
        session.step({"input_ids": [[8]]})["logits"][0, 0],
    ]
    session.reset()
    ids = np.array([[5, 9, 12, 40], [11, 3, 0, 0]])
    behind = session.step({"input_ids": ids, "attention_mask": [[1, 1, 1, 1], [1, 1, 0, 0]]})["logits"][1, 1]
    np.testing.assert_allclose(behind, alone[0], atol=1e-4)
    np.testing.assert_allclose(session.step({"input_ids": [[2], [8]]})["logits"][1, 0], alone[1], atol=1e-4)
    for new, row in ((1, [1, 1, 0, 0, 1, 0]), (2, [1, 1, 0, 0, 1, 1, 0])):
        given = {"input_ids": np.ones((2, new), int), "attention_mask": [[1] * len(row), row]}
        with pytest.raises(InputError, match="behind these each row has ones for all new tokens"):
            session.step(given)
    caches = session.caches
    session.reset()
    said = "reads of 'attention_mask' only how many ones each row has: pad the sequences of a batch behind"
    for row in ([0, 0, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0]):
        with pytest.raises(InputError, match=said):
            session.step({"input_ids": ids, "attention_mask": [[1, 1, 1, 1], row]})
    session.take_caches(caches)
    with pytest.raises(InputError, match=said):
        session.step({"input_ids": [[2], [8]], "attention_mask": [[1] * 6, [0, 0, 1, 1, 1, 1]]})


def test_an_input_of_another_batch_is_named() -> None:
    """ONNX Runtime's message names an index, or sizes of some product, and no input."""
    session = fa_compiler.DecodingSession(merged())
    encoder = np.zeros((2, 4, 16), np.float32)
    with pytest.raises(InputError, match="^the step has a batch of 3, and 'encoder' is of 2; .* fails in "):
        session.step({"input_ids": [[1], [2], [3]], "encoder": encoder})


def test_the_caches_of_a_prompt_have_its_own_names() -> None:
    """transformers calls a present `cache.layers.0.keys`, and the past of the next file `input.cache.layers.0.keys`."""
    model = recurrent()
    model.graph.input[1].name = model.graph.node[1].input[0] = "input.cache.sum"
    model.graph.output[1].name = model.graph.node[1].output[0] = "output.cache.sum"
    model.graph.node[2].input[:] = ["output.cache.sum"] * 2
    session = fa_compiler.DecodingSession(model)
    session.take_caches({"logits": np.zeros(1, np.float32), "cache.sum": np.ones((2, 1, 4), np.float32)})
    assert session.step({"x": np.ones((2, 1, 4), np.float32)})["y"][0, 0, 0] == 4


def test_the_caches_of_a_prompt_have_the_names_of_presents() -> None:
    """So in optimum's pair of files. An array by the name of the past counts, if both are given."""
    session = fa_compiler.DecodingSession(recurrent())
    state, step = np.ones((2, 1, 4), np.float32), {"x": np.ones((2, 1, 4), np.float32)}
    session.take_caches({"y": state, "present_sum": state})
    assert session.step(step)["y"][0, 0, 0] == 4
    session.take_caches({"past_sum": 2 * state, "present_sum": state})
    assert session.step(step)["y"][0, 0, 0] == 9


def windowed(window: int = 4) -> onnx.ModelProto:
    """A layer that attends to the last tokens, and hands on the width of its window, beside one that attends to all."""
    return onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[batch,new,4] x, float[batch,past_w,4] past_w, float[batch,past_k,4] past_k, int64 past_window) =>
          (float[batch,new,4] y, float[batch,total_w,4] present_w, float[batch,total,4] present_k, int64 present_window)
        <int64 zero = {{0}}, int64 one = {{1}}, int64 width = {{{window}}}, int64[1] axis = {{1}},
         float none = {{-3.0e38}}, int64[1] first = {{0}}>
        {{ present_w = Concat<axis=1>(past_w, x) present_k = Concat<axis=1>(past_k, x)
           present_window = Identity(past_window)
           shape = Shape<start=1, end=2>(present_w) total = Squeeze(shape, first)
           places = Range(zero, total, one) border = Sub(total, width) low = Less(places, border)
           t = Transpose<perm=[0,2,1]>(present_w) s = MatMul(x, t) m = Where(low, none, s) p = Softmax<axis=-1>(m)
           u = MatMul(p, present_w) t2 = Transpose<perm=[0,2,1]>(present_k) s2 = MatMul(x, t2) p2 = Softmax<axis=-1>(s2)
           u2 = MatMul(p2, present_k) y = Add(u, u2) }}"""
    )


def test_a_window_whose_cache_holds_the_last_tokens() -> None:
    """torch keeps 3 tokens of a window of 4. With the number of all tokens that gives what all of them give."""
    tokens = np.random.default_rng(0).standard_normal((2, 8, 4)).astype(np.float32)
    whole, part = fa_compiler.DecodingSession(windowed()), fa_compiler.DecodingSession(windowed())
    assert whole.inputs == ("x",)  # the width is handed on, so that any number will do
    for place in range(6):
        assert list(whole.step({"x": tokens[:, place : place + 1]})) == ["y"]
    caches = {name: array[:, -3:] if name == "past_w" else array for name, array in whole.caches.items()}
    with pytest.raises(
        InputError, match=r"'past_w' holds 3, 'past_k' holds 6; .* take_caches\(.., length=all tokens\)"
    ):
        part.take_caches(caches)
    with pytest.raises(InputError, match="hold 6 tokens, which is more than length=5"):
        part.take_caches(caches, length=5)
    part.take_caches(caches, length=6)
    for place in (6, 7):
        given = {"x": tokens[:, place : place + 1]}
        np.testing.assert_array_equal(part.step(given)["y"], whole.step(given)["y"])
    assert {name: array.shape[1] for name, array in part.caches.items()} == {"past_w": 5, "past_k": 8}
    part.rewind(7)
    with pytest.raises(InputError, match="'past_w' was given with the last tokens of its window"):
        part.rewind(5)
    part.reset()
    assert part.step({"x": tokens[:, :1]})["y"].shape == (2, 1, 4)


def test_a_cache_without_a_window_needs_all_tokens() -> None:
    session = fa_compiler.DecodingSession(windowed())
    caches = {"past_w": np.ones((1, 3, 4), np.float32), "past_k": np.ones((1, 3, 4), np.float32)}
    session.take_caches(caches, length=6)
    with pytest.raises(
        InputError, match="reads tokens that a cache does not hold, .* of all 6 tokens .fewer are in past_w"
    ):
        session.step({"x": np.ones((1, 1, 4), np.float32)})
    assert session.length == 6


@pytest.mark.parametrize("length", [1.5, "a", True, None])
def test_what_is_no_number_of_tokens(length: Any) -> None:
    session = fa_compiler.DecodingSession(recurrent())
    session.step({"x": np.ones((2, 1, 4), np.float32)})
    with pytest.raises(InputError, match="a number of tokens is an integer"):
        session.rewind(length)


def test_caches_that_do_not_fit() -> None:
    """They are refused before the session forgets its own."""
    session = fa_compiler.DecodingSession(recurrent())
    session.step({"x": np.ones((2, 1, 4), np.float32)})
    with pytest.raises(InputError, match="arrays by the names of inputs, such as the `caches` of another session"):
        session.take_caches(session)  # type: ignore[arg-type]
    for shape in ((2, 1, 5), (2, 4)):
        with pytest.raises(InputError, match=r"'past_sum' has the shape .*, and .* takes \[batch, 1, 4\]"):
            session.take_caches({"past_sum": np.ones(shape, np.float32)})
    assert session.caches["past_sum"].shape == (2, 1, 4)


def test_what_an_encoder_gives_is_kept() -> None:
    kinds = {cache.past: cache.kind for cache in caches_of(merged())}
    assert kinds == {
        **dict.fromkeys(("past_decoder_key", "past_decoder_value"), "growing"),
        **dict.fromkeys(("past_encoder_key", "past_encoder_value"), "kept"),
    }


FORMS: dict[str, dict[str, Any]] = {
    "original": {},
    "fused": {},
    "in place": {"in_place_caches": True},
    "shared": {"assume": ["shared-caches"]},
    "separate": {"assume": ["separate-caches"]},
}


def test_arrays_of_any_order() -> None:
    """They are copied where they are not in C's order, and the copy lives as long as the run."""
    session, other = (fa_compiler.DecodingSession(harness.load(LLAMA)) for _ in range(2))
    for seed in range(20):
        ids = np.random.default_rng(seed).integers(0, 99, (3, 64))
        found = session.step({"input_ids": np.asfortranarray(ids)})["logits"]
        np.testing.assert_array_equal(found, other.step({"input_ids": ids})["logits"])
        session.reset()
        other.reset()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [LLAMA, "genai", "merged"])
def test_steps_are_those_of_one_run(name: str, form: str) -> None:
    """A prompt of several tokens and then one at a time, against the whole sequence at once: the same logits."""
    model = {"genai": lambda: genai.Decoder().model, "merged": merged}.get(name, lambda: harness.load(name))()
    changed = model if form == "original" else fa_compiler.optimize(model, **FORMS[form]).model
    ids = np.random.default_rng(0).integers(0, 40, (1 if name == "genai" else 2, 9))
    more = {"encoder": np.ones((2, 5, 16), np.float32)} if name == "merged" else {}
    whole = fa_compiler.DecodingSession(model).step({"input_ids": ids, **more})["logits"]
    session = fa_compiler.DecodingSession(changed)
    assert session.inputs == ("input_ids", *more)
    parts = [session.step({"input_ids": ids[:, :5], **more})["logits"]]
    parts += [session.step({"input_ids": ids[:, at : at + 1], **more})["logits"] for at in range(5, 9)]
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, rtol=0, atol=2e-5)
    assert session.length == 9


def test_buffers_stay_where_they_are_and_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step writes into the buffer that is bound; a full one is copied into one of twice the size."""
    monkeypatch.setattr("fa_compiler.decoding.LEAST_ROOM", 4)
    original = harness.load(LLAMA)
    session = fa_compiler.DecodingSession(fa_compiler.optimize(original, in_place_caches=True).model)
    other = fa_compiler.DecodingSession(original)
    rooms, places = [], []
    for token in range(9):
        step = {"input_ids": [[token]]}
        np.testing.assert_allclose(session.step(step)["logits"], other.step(step)["logits"], rtol=0, atol=2e-5)
        rooms.append(session._memory["past_key_0"].shape[2])
        places.append(session._values["past_key_0"].data_ptr())
    assert rooms == [4] * 4 + [8] * 4 + [16]
    assert len(set(places[:4])) == len(set(places[4:8])) == 1
    for name, array in session.caches.items():
        assert array.shape[2] == 9
        np.testing.assert_allclose(array, other.caches[name], rtol=0, atol=2e-5)


@pytest.mark.parametrize("form", ["original", "in place"])
def test_a_full_room_is_refused(form: str) -> None:
    """Also where the caches grow, which could hold more."""
    model = (
        harness.load(LLAMA) if form == "original" else fa_compiler.optimize(harness.load(LLAMA), **FORMS[form]).model
    )
    session = fa_compiler.DecodingSession(model, room=4)
    session.step({"input_ids": [[1, 2, 3]]})
    with pytest.raises(InputError, match="room for 4 tokens, and 5 are needed: make the session with a larger room"):
        session.step({"input_ids": [[1, 2]]})
    assert session.length == 3
    session.step({"input_ids": [[1]]})
    assert session.length == 4
    other = fa_compiler.DecodingSession(model)
    other.step({"input_ids": [[1, 2, 3, 4, 5]]})
    with pytest.raises(InputError, match="room for 4 tokens, and 5 are needed"):
        session.take_caches(other.caches)
    assert session.length == 4 and {cache.shape[2] for cache in session.caches.values()} == {4}


@pytest.mark.parametrize("form", ["original", "in place"])
def test_rewind_and_take_caches(form: str) -> None:
    """After a rewind the same token gives the same again, and the caches of one session serve another one."""
    model = (
        fa_compiler.optimize(harness.load(LLAMA), **FORMS[form]).model if form != "original" else harness.load(LLAMA)
    )
    session, other = (fa_compiler.DecodingSession(model) for _ in range(2))
    session.step({"input_ids": [[1, 2, 3]]})
    first = session.step({"input_ids": [[4]]})["logits"]
    session.step({"input_ids": [[5]]})
    session.rewind(3)
    other.take_caches(session.caches)
    for each in (session, other):
        assert each.length == 3
        np.testing.assert_allclose(each.step({"input_ids": [[4]]})["logits"], first, rtol=0, atol=1e-6)
    with pytest.raises(InputError, match="hold 4 tokens; 5 of them cannot be kept"):
        session.rewind(5)
    with pytest.raises(InputError, match="the caches lack 'past_value_0'"):
        session.take_caches({"past_key_0": session.caches["past_key_0"]})
    with pytest.raises(InputError, match="the caches have a batch of 1, and the step has one of 2; reset"):
        other.step({"input_ids": [[1], [2]]})
    twice = {key: np.repeat(array, 2, axis=0) for key, array in session.caches.items()}
    with pytest.raises(
        InputError, match="of different numbers of sequences: 'past_key_0' is of 1, 'past_value_0' is of 2"
    ):
        session.take_caches({**twice, "past_key_0": session.caches["past_key_0"]})
    with pytest.raises(InputError, match="the caches: 'past_key_0' is None, of which no array of numbers can be made"):
        session.take_caches({**session.caches, "past_key_0": None})  # type: ignore[dict-item]
    session.rewind(0)
    session.step({"input_ids": [[1], [2]]})  # another batch


@pytest.mark.parametrize(
    "inputs, said",
    [
        ({}, "takes the input 'input_ids', which is missing"),
        ({"ids": [[1]]}, "takes no input 'ids'; known are attention_mask, input_ids, position_ids$"),
        ({"input_ids": [[1]], "past_key_0": [0]}, "'past_key_0' is a cache, which the session holds"),
        ({"input_ids": [[1.5]]}, "input 'input_ids' is float64, but the model takes int64"),
        (None, r"a step takes a dictionary of arrays by the names of inputs \(input_ids\); this is None"),
        ([[1]], "by the names of inputs .*; this is of type list"),
        (
            {"input_ids": [[1, 2], [3]]},
            "'input_ids' is of type list, .*; it has to hold numbers, in rows of one length",
        ),
        ({"input_ids": [["a"]]}, "'input_ids' is of type list, of which no array of numbers can be made"),
        ({"input_ids": None}, "'input_ids' is None, of which no array of numbers can be made"),
        ({"input_ids": 1}, r"the input 'input_ids' has the shape \[\], and .* takes \[batch, seq\]"),
        ({"input_ids": [1]}, r"the input 'input_ids' has the shape \[1\], and .* takes \[batch, seq\]"),
        ({"input_ids": [[[1]]]}, r"the input 'input_ids' has the shape \[1, 1, 1\], and .* takes \[batch, seq\]"),
        (
            {"attention_mask": [[1] * 2]},
            r"'attention_mask' has the shape \[1, 2\]; with 2 cached and 1 new tokens it has",
        ),
        ({"attention_mask": [[1] * 4]}, r"it has \[1, 3\], and the session makes it if it is left out"),
        ({"attention_mask": [[1] * 3] * 2}, r"'attention_mask' has the shape \[2, 3\]"),
        ({"attention_mask": [1] * 3}, r"'attention_mask' has the shape \[3\], and .* takes \[batch, total\]"),
        ({"position_ids": [[2, 3]]}, r"'position_ids' has the shape \[1, 2\]; with .* it has \[1, 1\]"),
        ({"input_ids": np.zeros((1, 0), np.int64)}, "the step has no tokens"),
        ({"input_ids": [[]]}, "the step has no tokens"),
        ({"input_ids": []}, r"the input 'input_ids' has the shape \[0\], and .* takes \[batch, seq\]"),
        ({"input_ids": [[1], [2]]}, "the caches have a batch of 1, and the step has one of 2; reset"),
        ({"input_ids": [[10**6]]}, "'input_ids' holds 1000000, and .* knows the numbers up to 98"),
        ({"input_ids": [[-100]]}, "'input_ids' holds -100, and .* knows the numbers from -99 upwards"),
        ({"atention_mask": [[1] * 3]}, "takes no input 'atention_mask', did you mean 'attention_mask'"),
        ({0: [[1]]}, "takes no input '0'; known are attention_mask"),
    ],
)
def test_faults_of_a_step(inputs: Any, said: str) -> None:
    session = fa_compiler.DecodingSession(harness.load(LLAMA))
    session.step({"input_ids": [[1, 2]]})
    given = {"input_ids": [[5]], **inputs} if isinstance(inputs, dict) and inputs and "ids" not in inputs else inputs
    with pytest.raises(InputError, match=said):
        session.step(given)
    assert session.length == 2


@pytest.mark.parametrize("in_place_caches", [True, False])
def test_a_prompt_for_a_file_that_was_fused_for_one_token(in_place_caches: bool, tmp_path: Path) -> None:
    """Its attention would give another result for several tokens without a word."""
    original, path = genai.Decoder().model, tmp_path / "fused.onnx"
    assume = ["decode", "separate-caches"]
    result = fa_compiler.optimize(original, path, assume=assume, in_place_caches=in_place_caches)
    shown = str(result.how_to_run)
    assert '{"input_ids": [[1]]})    # one token a step' in shown and "[[1, 2, 3]]" not in shown
    session, wanted = fa_compiler.DecodingSession(path), fa_compiler.DecodingSession(original)
    with pytest.raises(InputError, match="one token .'decode'., and the step has 2: give those of a prompt one"):
        session.step({"input_ids": [[1, 2]]})
    for token in (1, 2):
        found, logits = (each.step({"input_ids": [[token]]})["logits"] for each in (session, wanted))
        np.testing.assert_allclose(found, logits, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "options"),
    [(genai.Decoder().model, {}), (harness.load(LLAMA), {"target": "contrib", "runtime": "ort-cpu"})],
)
def test_run_of_a_file_that_was_fused_for_one_token(
    model: onnx.ModelProto, options: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`run` makes inputs of one token, and refuses those of a prompt, whose outputs would be others without a word."""
    path, prompt = tmp_path / "fused.onnx", tmp_path / "prompt.npz"
    fa_compiler.optimize(model, path, assume=["decode", "separate-caches"], **options)
    assert main(["run", str(path), "--outputs", str(tmp_path / "y.npz")]) == 0
    assert "input_ids int64 [2, 1]" in capsys.readouterr().out
    np.savez(prompt, **random_inputs(onnx.load(path), "fused.onnx", rows=3, past=4))
    assert main(["run", str(path), "--inputs", str(prompt), "--outputs", str(tmp_path / "z.npz")]) == 2
    told = capsys.readouterr().err
    assert "one token ('decode'), and 'input_ids' has 3; run the prompt in the original model" in " ".join(told.split())
    assert not (tmp_path / "z.npz").exists()


def test_a_prompt_for_a_model_of_one_token() -> None:
    """The message says what to do with the tokens; an array that is wrong otherwise has no such advice."""
    session = fa_compiler.DecodingSession(harness.load(ONE_TOKEN))
    with pytest.raises(InputError, match=r"takes \[s2, 1\]; it takes one token a step: give those of a prompt one"):
        session.step({"input_ids": [[1, 2]]})
    for given in ([1], [[[1]]]):
        with pytest.raises(InputError, match=r"takes \[s2, 1\]$"):
            session.step({"input_ids": given})


def test_several_tokens_of_a_batch_behind_cached_ones() -> None:
    """ONNX Runtime's GroupQueryAttention refuses them, whatever the file was traced with; fused attention does not."""
    model, ids = genai.Decoder().model, np.ones((2, 3), np.int64)
    session = fa_compiler.DecodingSession(model)
    session.step({"input_ids": ids})
    with pytest.raises(InputError, match=r"^the step has 3 tokens of each sequence .*: give them one at a time; the "):
        session.step({"input_ids": ids})
    fused = fa_compiler.DecodingSession(fa_compiler.optimize(model, assume=["separate-caches"]).model)
    fused.step({"input_ids": ids})
    parts = np.concatenate([session.step({"input_ids": ids[:, :1]})["logits"] for _ in range(3)], 1)
    np.testing.assert_allclose(fused.step({"input_ids": ids})["logits"], parts, rtol=0, atol=2e-5)


@pytest.mark.usefixtures("memory_is_known")
def test_a_file_that_was_traced_with_one_token(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It declares an open number of tokens, and takes one. The message says so, and it is measured behind caches."""
    model = harness.load(TRACED)
    session = fa_compiler.DecodingSession(model)
    with pytest.raises(
        InputError, match=r"^the step has 2 tokens, and .* with one, or fused with .* 'decode', takes one"
    ):
        session.step({"input_ids": [[1, 2]]})
    session.step({"input_ids": [[1]]})
    path, page = str(saved(model, tmp_path / "model.onnx")), tmp_path / "gain.html"
    assert main(["bench", path, "--decode", "--lengths", "8", "--seconds", "0.01", "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "each step copies all caches; --in-place-caches ends that" in shown and "in Python" not in shown
    assert "Each step copies all caches;" in page.read_text(encoding="utf-8")
    assert "behind 8 keys 32 of 32 tokens are the same" in shown and "prompt ms" not in shown
    assert "each step copies all caches; --in-place-caches" in shown


@pytest.mark.parametrize("form", ["original", "in place"])
def test_positions_that_the_model_does_not_have(form: str) -> None:
    """GPT-2 has a table of 64; rotary tables are known to ONNX Runtime alone."""
    model = fa_compiler.optimize(harness.load(GPT2), **FORMS[form]).model if form != "original" else harness.load(GPT2)
    session = fa_compiler.DecodingSession(model)
    session.step({"input_ids": [[1] * 60]})
    with pytest.raises(
        InputError, match=r"has 64 positions, and 60 cached and 5 new tokens go up to position 64; reset"
    ):
        session.step({"input_ids": [[1] * 5]})
    session.step({"input_ids": [[1] * 4]})
    assert session.length == 64
    other = fa_compiler.DecodingSession(genai.Decoder().model)
    with pytest.raises(InputError, match="^either a token is none of the model's, or it has no pos.*: .*cos_cache"):
        other.step({"input_ids": [[1] * 65]})


@pytest.mark.parametrize(
    "model, name, right, wrong",
    [
        (lambda: fa_compiler.optimize(harness.load(LLAMA), in_place_caches=True).model, "cache_length", [3], [2]),
        (merged, SWITCH, [True], [False]),
    ],
)
def test_counts_that_contradict_the_caches(model: Any, name: str, right: Any, wrong: Any) -> None:
    """They would write the new rows over others."""
    session, twin = (fa_compiler.DecodingSession(model()) for _ in range(2))
    more = {"encoder": np.ones((1, 5, 16), np.float32)} if name == SWITCH else {}
    for each in (session, twin):
        each.step({"input_ids": [[1, 2, 3]], **more})
    with pytest.raises(
        InputError, match=rf"'{name}' is .*; with 3 cached and 1 new tokens it is .*, and the session makes"
    ):
        session.step({"input_ids": [[4]], name: wrong, **more})
    found = session.step({"input_ids": [[4]], name: right, **more})["logits"]
    np.testing.assert_array_equal(found, twin.step({"input_ids": [[4]], **more})["logits"])


def test_masks_and_positions_of_other_kinds_are_the_caller_s() -> None:
    """A mask for each query, and positions of several axes, do not follow from the number of tokens."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[batch,seq,4] x, float[batch,1,seq,total] attention_mask, '
        "int64[3,batch,seq] position_ids, float[batch,past,4] past_k) => (float[batch,total,4] present_k, float[n] y, "
        "int64[m] z) { present_k = Concat<axis=1>(past_k, x) y = Identity(attention_mask) z = Identity(position_ids) }"
    )
    session = fa_compiler.DecodingSession(model)
    assert session.inputs == ("x", "attention_mask", "position_ids")
    mask, places = np.ones((1, 1, 2, 7), np.float32), np.zeros((3, 1, 2), np.int64)
    session.step({"x": np.ones((1, 2, 4), np.float32), "attention_mask": mask, "position_ids": places})
    assert session.length == 2


def test_sizes_of_one_name_that_differ_are_named() -> None:
    """A mask that is longer than the encoder's states: ONNX Runtime names a place in its sources, and no input."""
    model = harness.load(T5)
    session = fa_compiler.DecodingSession(model)
    cross = {name: np.ones((1, 4, 7, 16), np.float32) for name in session.inputs if "cross" in name}
    given = {"decoder_input_ids": [[1]], "encoder_hidden_states": np.ones((1, 7, 64), np.float32), **cross}
    said = "^the size 'enc' is 9 in 'attention_mask' and 7 in 'encoder_hidden_states'; the model fails in ONNX Runtime"
    with pytest.raises(InputError, match=said):
        session.step({**given, "attention_mask": np.ones((1, 9), np.int64)})
    session.step({**given, "attention_mask": np.ones((1, 7), np.int64)})
    assert session.length == 1


def test_faults_of_a_session(tmp_path: Path) -> None:
    said = r"model.onnx has no caches: .* export the decoder with its past .* for Whisper automatic-speech-recognition"
    with pytest.raises(InputError, match=said):
        fa_compiler.DecodingSession(saved(attention(), tmp_path / "model.onnx"))


@pytest.mark.parametrize("value", ["a", 1.5, True, -1, [1]])
@pytest.mark.parametrize("name", ["room", "threads"])
def test_what_is_no_number(name: str, value: Any) -> None:
    with pytest.raises(
        InputError, match=re.escape(f"{name} is a number from {int(name == 'room')} upwards, not {value!r}")
    ):
        fa_compiler.DecodingSession(harness.load(LLAMA), **{name: value})
    with pytest.raises(InputError, match="room is a number from 1 upwards, not 0"):
        fa_compiler.DecodingSession(harness.load(LLAMA), room=0)


@pytest.mark.parametrize("form", ["original", "in place"])
def test_sessions_over_the_same_weights(form: str) -> None:
    """Each has caches of its own: in threads they answer as they do alone."""
    model = (
        harness.load(LLAMA) if form == "original" else fa_compiler.optimize(harness.load(LLAMA), **FORMS[form]).model
    )
    first = fa_compiler.DecodingSession(model, room=50, threads=1)
    first.step({"input_ids": [[1, 2, 3]]})
    others = [first.another() for _ in range(4)]
    assert {other.length for other in others} == {0} and {other.room for other in others} == {50}
    assert all(other._session is first._session for other in others)

    def answer(session: fa_compiler.DecodingSession, seed: int) -> list[int]:
        tokens = list(np.random.default_rng(seed).integers(0, 99, 5))
        logits = session.step({"input_ids": [tokens]})["logits"]
        for _ in range(40):
            tokens.append(int(logits[0, -1].argmax()))
            logits = session.step({"input_ids": [[tokens[-1]]]})["logits"]
        return tokens

    alone = [answer(fa_compiler.DecodingSession(model, threads=1), seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(answer, others, range(4))) == alone
    assert first.length == 3 and {other.length for other in others} == {45}


def test_no_sequence_and_too_much_room() -> None:
    session = fa_compiler.DecodingSession(harness.load(LLAMA))
    with pytest.raises(InputError, match="the step has no tokens"):
        session.step({"input_ids": np.zeros((0, 1), np.int64)})
    model = fa_compiler.optimize(harness.load(LLAMA), in_place_caches=True).model
    with pytest.raises(InputError, match="the memory is too small for a cache"):
        fa_compiler.DecodingSession(model, room=10**15).step({"input_ids": [[1]]})


def test_what_a_session_shows_of_itself(tmp_path: Path) -> None:
    session = fa_compiler.DecodingSession(saved(harness.load(LLAMA), tmp_path / "model.onnx"))
    assert repr(session) == f"<DecodingSession {tmp_path / 'model.onnx'}: 0 tokens, room as needed>"
    session.room = 9
    session.step({"input_ids": [[1], [2]]})
    assert repr(session).endswith("model.onnx: 1 token, batch 2, room 9>")


def test_the_examples_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's programs choose the tokens that the original would, in one session and in several. The program with
    two files needs those of transformers."""
    monkeypatch.chdir(tmp_path)
    saved(harness.load(LLAMA), Path("decoder.onnx"))
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    first, with_two_files, several = blocks
    assert "take_caches(outputs)" in with_two_files
    found: dict[str, Any] = {}
    for block in (first, several):
        exec(block, found)
    session = fa_compiler.DecodingSession("decoder.onnx")
    asked = [*found["prompt"], *found["prompts"]]
    for prompt, tokens in zip(asked, [found["tokens"], *found["answers"]], strict=True):
        chosen: list[int] = []
        session.reset()
        logits = session.step({"input_ids": [prompt]})["logits"]
        for _ in range(20):
            chosen.append(int(logits[0, -1].argmax()))
            logits = session.step({"input_ids": [[chosen[-1]]]})["logits"]
        assert tokens == chosen


@pytest.mark.usefixtures("memory_is_known")
@pytest.mark.parametrize("name", [LLAMA, ONE_TOKEN, T5])
def test_a_decoder_is_measured(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each model's prompt and steps, in place; a model of one token in each run has no prompt."""
    path = str(saved(harness.load(name), tmp_path / "model.onnx"))
    words = ["bench", path, "--decode", "--in-place-caches", "--lengths", "8,24", "--seconds", "0.01"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "original, tokens/s" in shown
    assert "behind 24 keys 32 of 32 tokens are the same; outputs differ by " in shown
    assert ("prompt ms" in shown) == (name == LLAMA)
    assert main([*words, "--json", "--html", str(tmp_path / "gain.html")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["decode"] is True
    for each in told["measures"]:
        assert next(iter(each["inputs"].values())) == [1, 1]
        decoded = each["decoded"]
        assert decoded["same_tokens"] == decoded["tokens"] == 32
        assert decoded["largest_difference"] <= decoded["tolerance"]
        speed = decoded["tokens_per_second"]["fused"]
        assert speed == pytest.approx(1e3 / each["fused"]["median"], rel=0.01)
        assert (decoded["prompt"] is not None) == (name == LLAMA)
    page = (tmp_path / "gain.html").read_text(encoding="utf-8")
    assert "Time of a step of one token" in page and "24 cached keys" in page


@pytest.mark.usefixtures("memory_is_known")
def test_default_numbers_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2 has 64 positions, of which the measurement needs 32."""
    monkeypatch.setattr(benchmark, "CACHED", (8, 40, 512))
    measured = fa_compiler.bench(harness.load(GPT2), decode=True, seconds=0.01)
    assert [each.length for each in measured.measured] == [8, 32]
    assert measured.faults == (
        "40 and 512 cached keys: the model takes at most 64 tokens, and 32 steps follow the cached keys",
    )


@pytest.mark.usefixtures("memory_is_known")
def test_a_prompt_in_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lengths 4 and 8 take 19 and 67 MiB, so that 16 will take 259: more than half of what there is. The memory is not
    asked for."""
    monkeypatch.setattr(steps, "free_memory", lambda: 400 << 20)
    monkeypatch.setattr(steps, "PART", 6)
    path = str(saved(harness.load(LLAMA), tmp_path / "model.onnx"))
    assert main(["bench", path, "--decode", "--lengths", "4,8,16", "--seconds", "0.01"]) == 0
    shown = capsys.readouterr().out
    assert "behind 16 keys 32 of 32 tokens are the same" in shown
    assert "behind 16 keys the prompt was given in 3 parts, for want of memory" in shown
    assert "behind 8 keys the prompt was" not in shown
    *_, eight, sixteen = (line.split() for line in shown.splitlines() if re.match(r" (8|16) ", line))
    assert eight[-2:] == ["67", "67"] and sixteen[-2:] == ["259", "259"]
    assert len(eight) == len(sixteen) + 2  # the times of the prompt
    assert "caches: past_key_0 and 3 more" in shown


@pytest.mark.usefixtures("memory_is_known")
def test_a_length_for_which_the_memory_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches of 2 layers, each twice 2 heads of 16 numbers: 512 bytes of a token, in two models, behind and before.
    A prompt of which nothing is known is tried in shorter ones."""
    monkeypatch.setattr(steps, "free_memory", lambda: 1 << 30)
    measured = fa_compiler.bench(harness.load(LLAMA), [10**7, 8], decode=True, seconds=0.01)
    what = "the model does not run: the caches of both models take 19.1 GiB, and 1.0 GiB are free"
    assert measured.faults == (f"10000000 cached keys: {what}",)
    monkeypatch.setattr(steps, "UNPROBED", 7)
    monkeypatch.setattr(steps, "PROBED", (4, 5))
    monkeypatch.setattr(steps, "PART", 6)
    for free, parts in ((200 << 20, 1), (100 << 20, 2)):
        monkeypatch.setattr(steps, "free_memory", lambda free=free: free)
        (only,) = fa_compiler.bench(harness.load(LLAMA), [8], decode=True, seconds=0.01).measures
        assert only.decoded is not None and only.decoded.parts == parts


def test_foreseen_memory() -> None:
    assert foreseen([], 16) == foreseen([(4, 100)], 16) == 0
    assert foreseen([(8, 164), (4, 116)], 16) == 356  # 100 bytes, and the square of the length
    assert foreseen([(4, 120), (8, 119)], 16) == 119


@pytest.mark.usefixtures("memory_is_known")
def test_bench_keeps_the_assumption(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `decode` the fused model never gets more than one token."""
    given: list[tuple[bool, int]] = []
    step = fa_compiler.DecodingSession.step

    def seen(self: fa_compiler.DecodingSession, inputs: Mapping[str, Any]) -> Any:
        given.append((self.name.endswith("fused.onnx"), np.shape(inputs["input_ids"])[1]))
        return step(self, inputs)

    monkeypatch.setattr(fa_compiler.DecodingSession, "step", seen)
    (only,) = fa_compiler.bench(harness.load(LLAMA), [8], assume=["decode"], seconds=0.01).measures
    assert only.decoded is not None and only.decoded.prompt is None and only.decoded.same == 32
    assert {rows for fused, rows in given if fused} == {1}
    assert (False, 8) in given


@pytest.mark.usefixtures("memory_is_known")
def test_a_difference_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fused model that computes something else chooses other tokens: exit code 1."""
    optimize = benchmark.optimize

    def wrong(model: Any, place: Path, **options: Any) -> Any:
        result = optimize(model, place, **options)
        changed = onnx.load(place)
        weight = next(each for each in changed.graph.initializer if len(each.dims) == 2 and min(each.dims) > 8)
        array = numpy_helper.to_array(weight)
        weight.CopyFrom(numpy_helper.from_array(-array, weight.name))
        onnx.save(changed, place)
        return result

    monkeypatch.setattr(benchmark, "optimize", wrong)
    path = str(saved(harness.load(LLAMA), tmp_path / "model.onnx"))
    assert main(["bench", path, "--decode", "--lengths", "8", "--seconds", "0.01"]) == 1
    assert "behind 8 keys the outputs differ" in capsys.readouterr().err


def _near(offset: float) -> onnx.ModelProto:
    """A decoder whose values lie near `offset`, which is subtracted behind its attention: the digits of the result are
    few, and the last bits of its weights matter. ONNX Runtime's own optimisations change nothing in it."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (int64[batch,seq] input_ids, float[batch,1,past,16] past_key_0, '
        "float[batch,1,past,16] past_value_0) => (float[batch,1,seq,16] logits, float[batch,1,total,16] present_key_0, "
        "float[batch,1,total,16] present_value_0) "
        f"<float far = {{{offset}}}, int64[1] one = {{1}}> {{ h = Gather(table, input_ids) "
        "k = MatMul(h, key) q = Unsqueeze(k, one) v = Unsqueeze(h, one) "
        "present_key_0 = Concat<axis=2>(past_key_0, q) present_value_0 = Concat<axis=2>(past_value_0, v) "
        's = Einsum<equation="bnsd,bnud->bnsu">(q, present_key_0) p = Softmax(s) '
        "a = MatMul(p, present_value_0) logits = Sub(a, far) }"
    )
    draw = np.random.default_rng(0)
    weights = {"table": draw.standard_normal((40, 16)) + offset, "key": 0.05 * draw.standard_normal((16, 16))}
    model.graph.initializer.extend(
        numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()
    )
    return model


@pytest.mark.usefixtures("memory_is_known")
@pytest.mark.parametrize("factor, agrees", [(1, True), (1.02, False)])
def test_a_decoder_that_enlarges_the_last_bits_of_its_weights(
    factor: float, agrees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A right fusion differs by more than the tolerance and agrees, as with `verify`. A wrong scale does not."""
    optimize = benchmark.optimize

    def scaled(model: Any, place: Path, **options: Any) -> Any:
        result = optimize(model, place, **options)
        changed = onnx.load(place)
        (scale,) = (a for node in changed.graph.node for a in node.attribute if a.name == "scale_value")
        scale.f *= factor
        onnx.save(changed, place)
        return result

    monkeypatch.setattr(benchmark, "optimize", scaled)
    (only,) = fa_compiler.bench(_near(30), [24], decode=True, seconds=0.01).measures
    assert only.decoded is not None and only.decoded.largest > 1e-5
    assert (only.decoded.tolerance > 1e-5) is agrees
    assert only.decoded.agrees is agrees


def test_the_memory_of_a_decoder(tmp_path: Path) -> None:
    """Measured in a process of its own, which takes the prompt."""
    (only,) = fa_compiler.bench(harness.load(LLAMA), [8], decode=True, seconds=0.01, in_place_caches=True).measures
    assert only.original is not None and only.original.memory > 1 << 20
    assert only.fused is not None and only.fused.memory > 1 << 20


@pytest.mark.parametrize("name", [LLAMA, T5])
def test_verify_keeps_the_assumption(name: str) -> None:
    """One new token behind 16 cached ones, with a mask for 17."""
    model = harness.load(name)
    for options in ({}, {"in_place_caches": True}):
        fused = fa_compiler.optimize(model, assume=["decode"], **options).model
        compared = fa_compiler.verify(model, fused, assume=["decode"])
        assert compared.same
        tokens = "decoder_input_ids" if name == T5 else "input_ids"
        assert compared.sizes[tokens] == (2, 1)
        assert compared.sizes["attention_mask"] == ((2, 16) if name == T5 else (2, 17))
        past = next(shape for key, shape in compared.sizes.items() if key.startswith("past"))
        assert past[2] == 16


def test_verify_without_caches_keeps_it_too() -> None:
    """Where a model has no caches, the sequence is the one token."""
    model = harness.load("gpt2__tsn_eager_op14")
    assert fa_compiler.verify(model, model, assume=["decode"]).sizes["input_ids"] == (2, 1)
    assert fa_compiler.verify(plain(), plain(), assume=["decode"]).same


def tensor_scatter() -> onnx.ModelProto:
    """A decoder of opset 24, whose caches are written by TensorScatter, with the names that ONNX gives the lengths."""
    model = onnx.parser.parse_model(
        '<ir_version: 11, opset_import: ["": 24]> g (float[B,4,S,8] q, float[B,2,S,8] new_k, float[B,2,S,8] new_v, '
        "float[B,2,M,8] k_in, float[B,2,M,8] v_in, int64[B] write_indices, int64[B] nonpad_kv_seqlen) "
        "=> (float[B,4,S,8] y, float[B,2,M,8] k, float[B,2,M,8] v) {"
        "k = TensorScatter<axis=2>(k_in, new_k, write_indices) v = TensorScatter(v_in, new_v, write_indices) "
        "y = Attention<is_causal=1>(q, k, v, , , , nonpad_kv_seqlen) }"
    )
    onnx.checker.check_model(model, full_check=True)
    return model


@pytest.mark.parametrize("is_fused", [False, True])
def test_caches_that_tensor_scatter_writes(is_fused: bool) -> None:
    model = tensor_scatter()
    assert caches_of(model) == (Cache("k_in", "k", 2, "buffer"), Cache("v_in", "v", 2, "buffer"))
    used = fa_compiler.optimize(model).model if is_fused else model
    session = fa_compiler.DecodingSession(used, room=16)
    assert session.inputs == ("q", "new_k", "new_v")
    with pytest.raises(InputError, match="takes the inputs 'q', 'new_k', 'new_v', which are missing"):
        session.step({})
    rng = np.random.default_rng(0)
    shapes = {"q": 4, "new_k": 2, "new_v": 2}
    whole = {name: rng.standard_normal((2, heads, 7, 8), np.float32) for name, heads in shapes.items()}
    parts = [
        session.step({name: array[:, :, start:end] for name, array in whole.items()})["y"]
        for start, end in ((0, 4), (4, 5), (5, 7))
    ]
    at_once = fa_compiler.DecodingSession(model).step(whole)["y"]
    assert np.abs(np.concatenate(parts, 2) - at_once).max() < 1e-5
    assert session.length == 7 and np.array_equal(session.caches["k_in"], whole["new_k"])


def test_a_circular_buffer_is_no_cache_of_all_tokens() -> None:
    model = tensor_scatter()
    for node in list(model.graph.node)[:2]:
        node.attribute.append(helper.make_attribute("mode", "circular"))
    assert not caches_of(model)
