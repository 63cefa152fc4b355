"""Right calls of the operators, each drawn from a seed, with the comparison that the tests of the kernels make.

What is compared with what, and how close both have to be, is in tests/lowering: the kernel against the float64
reference, NaN and infinities included.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
from hypothesis.control import BuildContext
from hypothesis.errors import StopTest, UnsatisfiedAssumption
from hypothesis.internal.conjecture.data import ConjectureData
from hypothesis.strategies import SearchStrategy

from fa_compiler import ops, reference
from fa_compiler.lowering.ort import eager
from tests import kernel_variants, linear_problems, prompt_problems, sparse_problems
from tests.lowering import (
    decoding,
    gradients,
    problems,
    test_linear,
    test_prompt,
    test_random,
    test_random_grad,
    test_sparse,
)
from tests.lowering.remembering import given, key_of

VARIABLE = "FA_COMPILER_ISA"


class NoCase(Exception):
    """The seed makes no call."""


@contextmanager
def variant(name: str) -> Iterator[None]:
    """Run the kernels of one instruction set."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = name
    try:
        yield
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before


def _swapped(array: Any) -> Any:
    """The same numbers, their bytes in the order that the machine does not have."""
    return array if array.dtype.kind == "V" else array.astype(array.dtype.newbyteorder("S"))


def _strided(array: Any) -> Any:
    """The same numbers, backwards and not next to each other."""
    view = np.zeros(tuple(2 * size for size in array.shape), array.dtype)[(slice(None, None, -2),) * array.ndim]
    view[...] = array
    return view


FORMS: tuple[Callable[[Any], Any] | None, ...] = (
    *(None, None, None, None, _swapped, _strided, lambda array: _strided(_swapped(array))),
)
"""What an array may be in memory, the usual most times."""


def formed(inputs: Mapping[str, Any], form: Callable[[Any], Any] | None) -> Mapping[str, Any]:
    """The inputs in a form; what is one array stays one."""
    if form is None:
        return inputs
    made: dict[int, Any] = {}

    def one(array: Any) -> Any:
        if not isinstance(array, np.ndarray):
            return array
        if id(array) not in made:
            made[id(array)] = form(array)
        return made[id(array)]

    return {
        name: [one(each) for each in value] if isinstance(value, list | tuple) else one(value)
        for name, value in inputs.items()
    }


class _Waiting(BaseException):
    """A call has no result yet."""


class Together:
    """Runs the kernels of many comparisons in one session, which takes longer to make than most calls to compute. The
    kernels are given arrays of one form."""

    def __init__(self, form: Callable[[Any], Any] | None = None) -> None:
        self.form = form
        self.known: dict[str, Any] = {}
        self.waiting: dict[str, tuple[Any, ...]] = {}

    def faults(self, comparisons: Mapping[str, Callable[[], object]]) -> dict[str, Exception]:
        """What the comparisons raise, by their names."""
        found: dict[str, Exception] = {}
        left = dict(comparisons)
        with mock.patch.object(ops, "run", self._run):
            while left:
                for name, compared in list(left.items()):
                    try:
                        compared()
                    except _Waiting:
                        continue
                    except Exception as error:  # any at all: the call is right
                        found[name] = error
                    del left[name]
                self._compute()
        return found

    def _run(
        self,
        op: str,
        inputs: Mapping[str, Any],
        attrs: Mapping[str, Any],
        outputs: Sequence[str] | None = None,
        cann: str | None = None,
    ) -> Any:
        key = key_of(op, inputs, sorted(attrs.items()), outputs, cann)
        if key not in self.known:
            self.waiting[key] = (op, formed(inputs, self.form), attrs, outputs, cann)
            raise _Waiting
        return given(self.known[key])

    def _compute(self) -> None:
        requests: dict[str, tuple[str, eager.Request]] = {}
        feeds: dict[str, Any] = {}
        for number, (key, (op, inputs, attrs, outputs, cann)) in enumerate(self.waiting.items()):
            try:
                request, placed = eager.requested(*eager.allowed(op, inputs, attrs, cann), outputs, cann)
            except Exception as error:
                self.known[key] = error
                continue
            requests[f"{number}/"] = key, request
            feeds |= eager.fed(request, placed, f"{number}/")
        names = [
            (key, prefix + result, name)
            for prefix, (key, request) in requests.items()
            for name, result in zip(request.wanted, request.results, strict=True)
        ]
        try:
            session = eager.session_of({prefix: request for prefix, (_, request) in requests.items()})
            results = session.run_with_ort_values([result for _, result, _ in names], feeds)
        except Exception:  # of ONNX Runtime: one of them is refused
            for key, _ in requests.values():
                op, inputs, attrs, outputs, cann = self.waiting[key]
                try:
                    self.known[key] = eager.run(op, inputs, attrs, outputs, cann)
                except Exception as error:
                    self.known[key] = error
        else:
            for (key, _, name), result in zip(names, results, strict=True):
                self.known.setdefault(key, {})[name] = eager.from_ort(result)
        self.waiting.clear()


def variants() -> list[str]:
    """The instruction sets that this machine has."""
    return [name for name in kernel_variants.compiled() if kernel_variants.runs(name)]


def _drawn(strategy: SearchStrategy[Any], seed: int) -> Any:
    """What a strategy of the tests draws with a seed."""
    data = ConjectureData(random=random.Random(seed))
    try:
        with BuildContext(data, wrapped_test=_drawn):
            return data.draw(strategy)
    except (StopTest, UnsatisfiedAssumption):
        raise NoCase from None


Check = Callable[[], object]


LARGE = 8
"""One in so many calls of the attention and its gradient may be of any size that the tests draw; the float64 reference
takes a hundred times as long for these as for most."""
REDRAWN = 4
SMALL = 60_000
"""So many scores has a small problem."""


def _sized(strategy: SearchStrategy[Any], seed: int, scores: Callable[[Any], int]) -> Any:
    """A small problem, most times; after a few draws what comes."""
    for again in range(REDRAWN):
        drawn = _drawn(strategy, seed + (again << 62))
        if seed % LARGE == 0 or scores(drawn) <= SMALL:
            break
    return drawn


def _scores(inputs: Mapping[str, Any]) -> int:
    """About how many scores a call has."""
    query, key = inputs["query"].shape, inputs["key"].shape
    return math.prod(query) * math.prod(key) // max(1, key[-1] * query[-1])


SPOILED = 4
"""One in so many calls of the sparse family has NaN among its numbers."""


def _spoiled(inputs: dict[str, Any], seed: int) -> dict[str, Any]:
    """Some numbers of one or two inputs are NaN, in every fourth call. Inputs that are one array stay one."""
    rng = np.random.default_rng([seed, 1])
    names = [name for name, value in inputs.items() if value.dtype.kind in "fV" and value.size]
    if not names or rng.integers(0, SPOILED):
        return inputs
    found = dict(inputs)
    for name in rng.choice(names, 2):
        array = found[name].copy()
        array.flat[rng.integers(0, array.size, int(rng.integers(1, 4)))] = np.nan
        found |= {other: array for other in names if found[other] is found[name]}
    return found


def _forward(seed: int) -> Check:
    problem = _sized(test_random.problems(), seed, lambda drawn: _scores(drawn.inputs))
    return lambda: problems.check(problem.inputs, problem.attrs)


def _backward(seed: int) -> Check:
    problem, wanted = _sized(test_random_grad.gradient_problems(), seed, lambda drawn: _scores(drawn[0].inputs))
    return lambda: gradients.check(problem.inputs, problem.attrs, wanted)


def _decode(seed: int) -> Check:
    rng = np.random.default_rng(seed)
    key_heads = int(rng.integers(1, 4))
    batch = int(rng.integers(1, 4))
    storage = str(rng.choice(["plain", "plain", "list", "pages", "pages_by_head"]))
    form = decoding.Form(
        layout="BNSD" if storage == "pages_by_head" else str(rng.choice(["BNSD", "BSND", "BSH"])),
        dtype=str(rng.choice(["float32", "float16", "bfloat16"])),
        batch=batch,
        heads=key_heads * int(rng.integers(1, 6)),
        key_heads=key_heads,
        length=int(rng.choice([1, 2, 15, 16, 17, 31, 33, 64, 129, 300])),
        size=int(rng.choice([16, 32, 48, 64, 80, 128])),
        storage=storage,
        block_size=int(rng.choice([32, 64, 128])),
        int8_cache=bool(rng.integers(0, 4) == 0) and storage != "list",
        lists=tuple(int(n) for n in rng.integers(1, 70, batch)),
        attrs={"scale_value": float(rng.choice([0.2, 0.5, -0.1]))},
    )
    inputs = form.inputs(rng)
    return lambda: decoding.check(inputs, form.all_attrs)


def _prompt(op: str) -> Callable[[int], Check]:
    def make(seed: int) -> Check:
        dtype = ("float32", "float16", "bfloat16")[seed % 3]
        form = prompt_problems.drawn(seed, op, dtype, 40 if seed % 5 == 0 else 12)
        return lambda: test_prompt.check(form)

    return make


def _sparse(op: str, make: Callable[..., Any], **more: Any) -> Callable[[int], Check]:
    def draw(seed: int) -> Check:
        inputs, attrs = make(seed, test_sparse.DTYPES[seed % 3], **more)
        inputs = _spoiled(inputs, seed)
        cann = sparse_problems.REORDERED if more.get("reordered") else None
        return lambda: test_sparse.compare(op, inputs, attrs, cann)

    return draw


def _indexer(seed: int) -> Check:
    inputs, attrs = sparse_problems.indexer(seed, test_sparse.DTYPES[seed % 3])
    rng = np.random.default_rng([seed, 1])
    spoiled = attrs["layout_key"] != "PA_BSND" and inputs["key"].size and not rng.integers(0, SPOILED)
    if spoiled:
        key = inputs["key"] = inputs["key"].copy()
        key.reshape(-1, key.shape[-1])[rng.random(key.size // key.shape[-1]) < 0.3] = np.nan
        attrs = attrs | {"return_values": True} | ({"cpu_nan_scores": "first"} if rng.integers(0, 2) else {})

    def compared() -> None:
        """Which of equally good keys is listed is rounding; how many there are is not, nor how many of them are NaN."""
        found = ops.run("LightningIndexer", inputs, attrs)
        right = reference.run("LightningIndexer", inputs, attrs, dtype="float64")
        counts = [(each["sparse_indices"] >= 0).sum(-1) for each in (found, right)]
        np.testing.assert_array_equal(*counts, "listed keys")
        if spoiled:
            listed = [np.isnan(each["sparse_values"].astype(np.float32)).sum(-1) for each in (found, right)]
            np.testing.assert_array_equal(*listed, "listed keys that are NaN")

    return compared


def _ring(seed: int) -> Check:
    rng = np.random.default_rng(seed)
    dtype = problems.DTYPES[str(rng.choice(list(problems.DTYPES)))]
    rows, batch, heads, size = (int(rng.choice(each)) for each in ([1, 7, 33], [1, 2], [1, 3], [1, 8, 17, 64]))
    special = [np.nan, np.inf, -np.inf, 1e30, -3e38]
    inputs: dict[str, Any] = {}
    for name in ("prev", "cur"):
        out = rng.standard_normal((rows, batch, heads * size)).astype(dtype)
        top = rng.standard_normal((batch, heads, rows, 1)).astype(np.float32)
        if rng.integers(0, 3) == 0:
            top[rng.random(top.shape) < 0.3] = rng.choice(special)
        inputs[f"{name}_attn_out"] = out
        inputs[f"{name}_softmax_max"] = np.repeat(top, 8, -1)
        inputs[f"{name}_softmax_sum"] = np.repeat(rng.uniform(0.5, 9, top.shape).astype(np.float32), 8, -1)
    return lambda: test_sparse.compare("RingAttentionUpdate", inputs, {"input_layout": "SBH"})


def _linear(op: str, make: Callable[[int], Any]) -> Callable[[int], Check]:
    def drawn(seed: int) -> Check:
        inputs, attrs = make(seed)
        return lambda: test_linear.check(op, inputs, attrs)

    return drawn


DRAWN: dict[str, Callable[[int], Check]] = {
    "FlashAttentionScore": _forward,
    "FlashAttentionScoreGrad": _backward,
    "IncreFlashAttention": _decode,
    "PromptFlashAttention": _prompt(prompt_problems.PFA),
    "FusedInferAttentionScore": _prompt(prompt_problems.FIA),
    "SparseFlashAttention": _sparse("SparseFlashAttention", sparse_problems.attention),
    "SparseFlashAttentionGrad": _sparse("SparseFlashAttentionGrad", sparse_problems.attention_grad),
    "SparseFlashAttentionGrad of 2026": _sparse(
        "SparseFlashAttentionGrad", sparse_problems.attention_grad, reordered=True
    ),
    "LightningIndexer": _indexer,
    "LightningIndexerGrad": _sparse("LightningIndexerGrad", sparse_problems.indexer_grad),
    "SparseLightningIndexerGradKLLoss": _sparse("SparseLightningIndexerGradKLLoss", sparse_problems.indexer_loss),
    "RingAttentionUpdate": _ring,
    "FlashLinearAttention": _linear("FlashLinearAttention", linear_problems.drawn_attention),
    "ShortConvolution": _linear("ShortConvolution", linear_problems.drawn_convolution),
    "ChunkGatedDeltaRule": _linear("ChunkGatedDeltaRule", linear_problems.drawn_chunks),
    "RecurrentGatedDeltaRule": _linear("RecurrentGatedDeltaRule", linear_problems.drawn_steps),
    "CausalConv1d": _linear("CausalConv1d", linear_problems.drawn_lines),
    "FusedCausalConv1d": _linear("FusedCausalConv1d", linear_problems.drawn_added),
}
"""How a call of each operator is drawn: the comparison of a seed. Raises NoCase."""
