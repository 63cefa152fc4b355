"""A process that takes a prompt and then makes tokens with one variant of exporter_tokens.py.

    python -m bench.exporter_worker FOLDER THREADS PROMPT TOKENS

FOLDER has prefill/model.onnx and decode/model.onnx as transformers' exporter writes them, or fused ones; or only the
latter, which then takes the prompt, too; or the model of onnxruntime-genai with its genai_config.json. It prints one
line of JSON: the seconds of the prompt until its first token is chosen, those of the other tokens, the tokens, and the
peak memory in MiB.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray
FIRST, LAST = 3, 8000
"""The range of the words of the prompt."""


def prompt_of(count: int) -> Array:
    """The same random words for each variant."""
    return np.random.default_rng(0).integers(FIRST, LAST, (1, count))


def measure(begin: Callable[[Array], Iterator[int]], prompt: int, tokens: int) -> dict[str, Any]:
    """Run once to warm up, and once with the clock. `begin` takes a prompt, and gives one token after the other."""
    for _ in range(2):
        words, chosen = begin(prompt_of(prompt)), list[int]()
        marks = [time.perf_counter()]
        for _ in range(tokens + 1):
            chosen.append(next(words))
            marks.append(time.perf_counter())
    import resource  # Windows has none

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return {"prefill": marks[1] - marks[0], "decode": marks[-1] - marks[1], "chosen": chosen, "peak_mib": peak}


def two_files(folder: Path, threads: int, room: int) -> Callable[[Array], Iterator[int]]:
    """The two files of the exporter: a session of ONNX Runtime for the prompt, and DecodingSession for the steps."""
    import fa_compiler
    from bench.model_worker import ort_session

    prefill = ort_session(str(folder / "prefill" / "model.onnx"), threads)
    names = [output.name for output in prefill.get_outputs()]
    inputs = {value.name for value in prefill.get_inputs()}
    session = fa_compiler.DecodingSession(folder / "decode" / "model.onnx", room=room, threads=threads)

    def begin(words: Array) -> Iterator[int]:
        given = {"input_ids": words, "attention_mask": np.ones_like(words)}
        given["position_ids"] = np.arange(words.shape[1])[None]
        results = prefill.run(None, {name: array for name, array in given.items() if name in inputs})
        outputs = dict(zip(names, results, strict=True))
        logits = outputs["logits"]
        session.reset()
        session.take_caches(outputs)
        while True:
            token = int(logits[0, -1].argmax())
            yield token
            logits = session.step({"input_ids": np.array([[token]])})["logits"]

    return begin


def one_file(folder: Path, threads: int, room: int) -> Callable[[Array], Iterator[int]]:
    """One file for the prompt and for the steps, in DecodingSession."""
    import fa_compiler

    session = fa_compiler.DecodingSession(folder / "decode" / "model.onnx", room=room, threads=threads)

    def begin(words: Array) -> Iterator[int]:
        session.reset()
        logits = session.step({"input_ids": words})["logits"]
        while True:
            token = int(logits[0, -1].argmax())
            yield token
            logits = session.step({"input_ids": np.array([[token]])})["logits"]

    return begin


def genai(folder: Path, threads: int, room: int) -> Callable[[Array], Iterator[int]]:
    """The builder's model in onnxruntime-genai, with one buffer as past and present."""
    import onnxruntime_genai

    config = onnxruntime_genai.Config(str(folder))
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
    model = onnxruntime_genai.Model(config)

    def begin(words: Array) -> Iterator[int]:
        parameters = onnxruntime_genai.GeneratorParams(model)
        parameters.set_search_options(max_length=room, min_length=room, do_sample=False)
        generator = onnxruntime_genai.Generator(model, parameters)
        generator.append_tokens(words.astype(np.int32))
        while True:
            generator.generate_next_token()
            yield int(generator.get_next_tokens()[0])

    return begin


def main() -> None:
    """Measures the variant of the command line."""
    folder, threads, prompt, tokens = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    variant = two_files if (folder / "prefill").exists() else one_file
    if (folder / "genai_config.json").exists():
        variant = genai
    print(json.dumps(measure(variant(folder, threads, prompt + tokens + 2), prompt, tokens)))


if __name__ == "__main__":
    main()
