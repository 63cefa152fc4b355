"""What runtimes take of the attention operators of ONNX and ONNX Runtime: a feature by operator,
runtime and version.

Each cell has its source: a kernel, a schema, a document, or a measurement. What is not known is
UNKNOWN, which counts as no where an operator is chosen. The page docs/runtimes.md is made from this
table.

| operator | domain | what it is |
| --- | --- | --- |
| Attention | ai.onnx | the standard operator, from opset 23 on |
| MultiHeadAttention | com.microsoft | no grouped heads, windows, sinks or soft caps; runs nearly everywhere |
| GroupQueryAttention | com.microsoft | always causal; made for decoders |
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum

from fa_compiler.op_registry.described import Described
from fa_compiler.op_registry.errors import UnknownRuntime, suggestion

ATTENTION = "Attention"
MULTI_HEAD = "MultiHeadAttention"
GROUP_QUERY = "GroupQueryAttention"
DOMAINS = {ATTENTION: "", MULTI_HEAD: "com.microsoft", GROUP_QUERY: "com.microsoft"}
OPERATORS = {"onnx": (ATTENTION,), "contrib": (MULTI_HEAD, GROUP_QUERY)}
"""The operators of each target."""
ALL = "all"
"""The word for --runtime with which `inspect` asks about each of them."""
ALSO_CALLED = {"onnxruntime": "ort", "gpu": "cuda", "directml": "dml"}
"""What people call runtimes or parts of their names, and the part of the names that they mean."""


class Feature(Described):
    """What an attention may need of an operator. `meaning` names it in a sentence, after "does not
    take"."""

    FLOAT32 = "float32", "float32"
    FLOAT16 = "float16", "float16"
    BFLOAT16 = "bfloat16", "bfloat16"
    CAUSAL = "causal", "a causal mask as an attribute"
    FULL = "full", "attention that is not causal"
    BOOLEAN_MASK = "boolean mask", "a boolean mask"
    FLOAT_MASK = "float mask", "a mask or bias that is added to the scores"
    SHARED_MASK = "shared mask", "one mask for several heads or batch entries"
    CAUSAL_MASK = "causal and mask", "a mask beside a causal attribute"
    KEY_PADDING = "key padding", "a mask of keys alone"
    FAST_PADDING = "fast key padding", "a mask of keys alone, faster than one of rows and keys"
    GROUPED = "grouped heads", "fewer key heads than query heads"
    VALUE_SIZE = "value size", "values of another head size than the keys"
    ANY_HEAD_SIZE = "any head size", "a head size that is no multiple of 8"
    WIDE_HEADS = "wide heads", "a head size over 768"
    PAST = "past", "keys and values in front of the new ones as inputs of their own"
    CROSS = "cross", "another number of keys than of queries"
    OPEN_SIZES = "open sizes", "sizes that are open before the run"
    SOFTCAP = "soft cap", "a soft cap on the scores"
    SOFTCAP_MASK = "soft cap and mask", "a mask behind a soft cap"
    WINDOW = "window", "a window of keys as an attribute"
    SINK = "sink", "attention sinks"
    SINK_MASK = "sink and mask", "a mask beside attention sinks"
    ZERO_ROWS = "zero rows", "rows without a key whose result is 0"
    NAN_ROWS = "NaN rows", "rows without a key whose result is NaN"
    NAN_ROWS_HALF = "NaN rows in 16 bits", "rows without a key whose result is NaN, in 16 bits"
    NAN_ROWS_PADDING = (
        "NaN rows by padding",
        "rows whose keys a mask of keys excludes, with NaN as the result",
    )
    NAN_OR_ZERO_ROWS = "NaN or zero rows", "rows without a key whose result is NaN or 0"
    MEAN_ROWS = "mean rows", "a whole row of the lowest number in a mask, which gives a mean"
    LONE_RESULT = "lone result", "a result without present key and value beside it"
    DROPOUT = "dropout", "dropout"


class Kernel(StrEnum):
    """The kernels of one operator. A runtime takes one of them by the call (KERNELS)."""

    WHOLE = "whole rows"
    FLASH = "flash"


class Answer(StrEnum):
    """Whether a runtime takes a feature."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Cell:
    """An answer with its source. YES holds from the version `since` on, () if that is not known to
    matter. Every kernel of the operator gives this answer, except for those in `others`."""

    answer: Answer
    source: str
    since: tuple[int, ...] = ()
    others: tuple[tuple[Kernel, Answer], ...] = ()

    def at(self, version: tuple[int, ...], kernel: Kernel) -> Answer:
        """The answer of a kernel for a version; () is the newest one."""
        known = dict(self.others).get(kernel, self.answer)
        return Answer.NO if known is Answer.YES and version and version < self.since else known


@dataclass(frozen=True)
class Runtime:
    """A runtime as the user names it, and its version, () for the newest that the table knows."""

    name: str
    version: tuple[int, ...] = ()

    @staticmethod
    def of(text: str) -> Runtime:
        """The runtime NAME or NAME=VERSION. Raises UnknownRuntime."""
        name, equals, version = text.partition("=")
        if name not in RUNTIMES:
            meant = "-".join(ALSO_CALLED.get(part, part) for part in name.lower().split("-"))
            own = f"ort-{meant}"
            if get_close_matches(meant, [ALL]):
                told = f"the word {ALL!r}, which asks about each of them, is one of `fa-compiler inspect` alone"
                raise UnknownRuntime(f"unknown runtime {name!r}; {told}")
            raise UnknownRuntime(
                f"unknown runtime {name!r}{suggestion(own if own in RUNTIMES else meant, RUNTIMES)}"
            )
        if equals and not re.fullmatch(r"\d+(\.\d+)*", version):
            raise UnknownRuntime(
                f"the version {version!r} of {name} is not made of numbers, such as 1.27 or 2026.3"
            )
        return Runtime(name, tuple(map(int, version.split("."))) if equals else ())

    def __str__(self) -> str:
        return self.name + (f" {'.'.join(map(str, self.version))}" if self.version else "")


def target_for(runtime: str) -> str | None:
    """The target whose operators a runtime has kernels of, "onnx" before "contrib"; None if it has
    neither."""
    known = RUNTIMES[runtime]
    return next(
        (
            target
            for target, operators in OPERATORS.items()
            if not known.keys().isdisjoint(operators)
        ),
        None,
    )


def has_operator(runtime: Runtime | None, operator: str) -> bool:
    """Is the runtime known to have a kernel for the operator? Without a runtime the schema alone
    counts."""
    return runtime is None or operator in RUNTIMES[runtime.name]


def answer(
    runtime: Runtime | None, operator: str, feature: Feature, kernel: Kernel = Kernel.WHOLE
) -> Answer:
    """Whether a runtime takes a feature of an operator, in the kernel that the call has there.
    Without a runtime: whether the schema has it, and no runtime is known whose kernel for such a
    call does not."""
    if runtime is None:
        known = [
            cell
            for cells in RUNTIMES.values()
            if (cell := cells.get(operator, {}).get(feature)) is not None
        ]
        refused = any((kernel, Answer.NO) in cell.others for cell in known)
        return Answer.YES if feature in SCHEMAS[operator] and not refused else Answer.NO
    cells = RUNTIMES[runtime.name].get(operator)
    if cells is None:
        return Answer.NO
    cell = cells.get(feature)
    if cell is None:
        return Answer.UNKNOWN if feature in SCHEMAS[operator] else Answer.NO
    return cell.at(runtime.version, kernel)


def first_version(
    runtime: Runtime, operator: str, feature: Feature, kernel: Kernel = Kernel.WHOLE
) -> tuple[int, ...]:
    """The version from which on the runtime takes a feature; () if it is not known to matter, or
    none takes it."""
    cell = RUNTIMES[runtime.name].get(operator, {}).get(feature)
    return cell.since if cell is not None and cell.at((), kernel) is Answer.YES else ()


def newest_version(runtime: str) -> tuple[int, ...]:
    """The newest version from which on a runtime takes something more; () if none is known to
    matter."""
    return max(
        (cell.since for cells in RUNTIMES[runtime].values() for cell in cells.values()), default=()
    )


_TYPES = frozenset((Feature.FLOAT32, Feature.FLOAT16, Feature.BFLOAT16))
_ALWAYS = _TYPES | {
    Feature.FLOAT_MASK,
    Feature.SHARED_MASK,
    Feature.CAUSAL,
    Feature.CAUSAL_MASK,
    Feature.OPEN_SIZES,
}
_ALWAYS |= {Feature.WIDE_HEADS}
_WIDE = {Feature.FULL, Feature.VALUE_SIZE, Feature.ANY_HEAD_SIZE, Feature.CROSS}
_ROWS = {Feature.NAN_ROWS, Feature.NAN_ROWS_HALF, Feature.NAN_OR_ZERO_ROWS, Feature.MEAN_ROWS}
_CAPPED = {Feature.GROUPED, Feature.SOFTCAP, Feature.SOFTCAP_MASK}
SCHEMAS: Mapping[str, frozenset[Feature]] = {
    ATTENTION: _ALWAYS
    | _WIDE
    | _CAPPED
    | {Feature.BOOLEAN_MASK, Feature.ZERO_ROWS, Feature.PAST, Feature.WINDOW},
    MULTI_HEAD: _ALWAYS
    | _WIDE
    | _ROWS
    | {Feature.KEY_PADDING, Feature.FAST_PADDING, Feature.NAN_ROWS_PADDING},
    GROUP_QUERY: _ALWAYS
    | _CAPPED
    | _ROWS
    | {Feature.WINDOW, Feature.SINK, Feature.SINK_MASK, Feature.PAST},
}
"""What each operator can say by its schema, that of ONNX Runtime before 1.30 for
GroupQueryAttention."""
SCHEMA_SINCE: Mapping[tuple[str, Feature], int] = {(ATTENTION, Feature.WINDOW): 25}
"""The opset from which on the schema has a feature, where the first opset of the operator does not
have it."""


def _cells(
    source: str,
    yes: str = "",
    no: str = "",
    since: tuple[int, ...] = (),
    not_in: Kernel | None = None,
) -> dict[Feature, Cell]:
    """The cells of some features, named by their words, that have the same source; `since` is that
    of `yes`, and so is `not_in`, a kernel that does not take them."""
    known = {feature.value: feature for feature in Feature}
    others = () if not_in is None else ((not_in, Answer.NO),)
    taken = {known[word]: Cell(Answer.YES, source, since, others) for word in _words(yes)}
    return taken | {known[word]: Cell(Answer.NO, source) for word in _words(no)}


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


_CPU = "measured, ONNX Runtime 1.23 to 1.32"
_OPENVINO = "measured on the CPU plugin, OpenVINO 2025.4 to 2026.4"
_CUDA = "core/providers/cuda/llm/attention.cc of ONNX Runtime"
_CUDA_MHA = "contrib_ops/cuda/bert/multihead_attention.cc of ONNX Runtime"
_CUDA_GQA = "contrib_ops/cuda/bert/group_query_attention.cc of ONNX Runtime"
_MEASURED_CUDA = "measured, ONNX Runtime 1.31 on an H200"
_WEBGPU_MHA = "contrib_ops/webgpu/bert/multihead_attention.cc of ONNX Runtime"
_WEBGPU_GQA = "contrib_ops/webgpu/bert/group_query_attention.cc of ONNX Runtime"
_GQA_HELPER = "contrib_ops/cpu/bert/group_query_attention_helper.h of ONNX Runtime"
_DML_MHA = "DmlOperatorMultiHeadAttention.cpp of ONNX Runtime"
_DML_GQA = (
    "DmlOperatorGroupQueryAttention.cpp of ONNX Runtime, which does not read what is not taken"
)
_TENSORRT = "operators/Attention.html of TensorRT, onnxOpImporters.cpp of onnx-tensorrt"
_QNN = "attention_op_builder.cc of onnxruntime-qnn"
_MLX = "rust/src/ops/attention.rs of onnxruntime-mlx"

RUNTIMES: Mapping[str, Mapping[str, Mapping[Feature, Cell]]] = {
    "ort-cpu": {
        ATTENTION: {
            **_cells(
                _CPU,
                "float32, float16, full, boolean mask, float mask, shared mask, causal and mask, grouped heads, "
                "value size, any head size, wide heads, cross, open sizes, soft cap, past",
                "bfloat16",
                since=(1, 23),
            ),
            **_cells("microsoft/onnxruntime 28379; " + _CPU, "soft cap and mask", since=(1, 27)),
            **_cells(
                "microsoft/onnxruntime 29050 (a single row); " + _CPU, "causal", since=(1, 28)
            ),
            **_cells("microsoft/onnxruntime 28958; " + _CPU, "zero rows", since=(1, 28)),
        },
        MULTI_HEAD: _cells(
            _CPU,
            "float32, causal, full, float mask, shared mask, causal and mask, key padding, value size, any head size, "
            "wide heads, cross, open sizes, NaN rows, NaN rows by padding, NaN or zero rows, mean rows",
            "float16, bfloat16",
            since=(1, 23),
        ),
        GROUP_QUERY: {
            **_cells(
                _CPU,
                "float32, float16, causal, float mask, shared mask, causal and mask, grouped heads, open sizes, "
                "soft cap, soft cap and mask, sink, sink and mask, NaN rows in 16 bits, NaN or zero rows, lone result, "
                "past, wide heads",
                "bfloat16, any head size, cross, value size",
                since=(1, 23),
            ),
            **_cells(
                _CPU + "; flash: 0", "NaN rows, mean rows", since=(1, 23), not_in=Kernel.FLASH
            ),
            **_cells(_CPU, "window", since=(1, 24)),
            **_cells("microsoft/onnxruntime 31704; " + _CPU, "full", since=(1, 30)),
        },
    },
    "ort-cuda": {
        ATTENTION: {
            **_cells(
                _CUDA,
                "float32, float16, bfloat16, full, float mask, shared mask, causal and mask, any head size, cross, "
                "open sizes",
                since=(1, 24),
            ),
            **_cells(_CUDA, "boolean mask, grouped heads, soft cap, value size", since=(1, 25)),
            **_cells(
                "microsoft/onnxruntime 27992 and " + _CUDA,
                "causal, soft cap and mask, past",
                since=(1, 27),
            ),
            **_cells("microsoft/onnxruntime 28958", "zero rows", since=(1, 28)),
        },
        MULTI_HEAD: {
            **_cells(
                _CUDA_MHA,
                "float32, float16, causal, full, float mask, shared mask, causal and mask, key padding, value size, "
                "any head size, cross, open sizes",
            ),
            **_cells("microsoft/onnxruntime 26083", "bfloat16", since=(1, 24)),
            **_cells(
                _MEASURED_CUDA,
                "NaN rows, NaN rows by padding, NaN or zero rows",
                "NaN rows in 16 bits, mean rows, fast key padding",
            ),
        },
        GROUP_QUERY: {
            **_cells(
                _CUDA_GQA,
                "float16, bfloat16, causal, grouped heads, soft cap, window, open sizes, past",
                "float32, value size",
            ),
            **_cells(_GQA_HELPER, no="any head size, cross"),
            **_cells("microsoft/onnxruntime 25432", "sink", since=(1, 23)),
            **_cells(
                "microsoft/onnxruntime 29525",
                "float mask, shared mask, causal and mask, soft cap and mask",
                "sink and mask",
                since=(1, 29),
            ),
            **_cells("microsoft/onnxruntime 31704", "full", since=(1, 30)),
            **_cells(_MEASURED_CUDA, "NaN or zero rows", "NaN rows in 16 bits, lone result"),
        },
    },
    "ort-webgpu": {
        MULTI_HEAD: {
            **_cells(
                _WEBGPU_MHA,
                "float32, float16, full, float mask, value size, any head size, cross, open sizes",
                "bfloat16, key padding",
            ),
            **_cells("microsoft/onnxruntime 26071", "causal, causal and mask", since=(1, 24)),
            **_cells("microsoft/onnxruntime 26769", "shared mask", since=(1, 24)),
        },
        GROUP_QUERY: {
            **_cells(
                _WEBGPU_GQA,
                "float32, float16, causal, grouped heads, open sizes, past",
                "bfloat16, full, soft cap, soft cap and mask, value size",
            ),
            **_cells(_GQA_HELPER, no="any head size, cross"),
            **_cells(
                "microsoft/onnxruntime 25285",
                "float mask, causal and mask, sink, sink and mask",
                since=(1, 23),
            ),
            **_cells("microsoft/onnxruntime 26769", "shared mask", since=(1, 24)),
            **_cells("microsoft/onnxruntime 25372", "window", since=(1, 23)),
        },
    },
    "ort-dml": {
        MULTI_HEAD: _cells(
            _DML_MHA,
            "float32, float16, full, float mask, key padding, value size, any head size, cross, open sizes",
            "bfloat16, causal, causal and mask, shared mask",
        ),
        GROUP_QUERY: _cells(
            _DML_GQA,
            "float32, float16, causal, grouped heads",
            "bfloat16, full, float mask, shared mask, causal and mask, soft cap, soft cap and mask, window, sink, "
            "sink and mask, value size, past",
        ),
    },
    "ort-coreml": {},
    "openvino": {
        ATTENTION: {
            **_cells(
                _OPENVINO,
                "float32, float16, causal, full, boolean mask, float mask, shared mask, causal and mask, "
                "value size, any head size, cross, open sizes, soft cap, soft cap and mask, zero rows, past",
                since=(2026, 3),
            ),
            **_cells("measured: fails where sizes are open, OpenVINO 2026.4", no="grouped heads"),
        },
        MULTI_HEAD: _cells(
            _OPENVINO,
            "float32, float16, causal, full, float mask, shared mask, causal and mask, key padding, value size, "
            "any head size, cross, open sizes, NaN rows, NaN rows in 16 bits, NaN rows by padding, NaN or zero rows, "
            "mean rows",
            since=(2026, 3),
        ),
    },
    "tensorrt": {
        ATTENTION: _cells(
            _TENSORRT,
            "float32, float16, bfloat16, causal, full, boolean mask, float mask, shared mask, grouped heads, cross, "
            "open sizes",
            "causal and mask, value size, soft cap, soft cap and mask, past",
            since=(10, 14),
        ),
    },
    "qnn": {
        ATTENTION: _cells(
            _QNN,
            "float32, float16, causal, full, float mask, shared mask, causal and mask, grouped heads, value size, "
            "any head size, cross, soft cap, soft cap and mask",
            "bfloat16, boolean mask, open sizes, zero rows",
        ),
    },
    "mlx": {
        ATTENTION: _cells(
            _MLX,
            "float32, float16, bfloat16, causal, full, boolean mask, float mask, shared mask, causal and mask, "
            "grouped heads, value size, any head size, cross, open sizes, past",
            "soft cap, soft cap and mask",
        ),
        MULTI_HEAD: _cells(
            _MLX,
            "float32, float16, bfloat16, causal, full, value size, any head size, cross, open sizes",
            "float mask, shared mask, causal and mask, key padding",
        ),
    },
}
"""What each runtime takes of the operators for which it has a kernel or a converter. The sources
were read or measured in November 2026. GroupQueryAttention of OpenVINO, QNN and MLX is left out,
because it has to be given a past."""


KERNELS: Mapping[tuple[str, str], Mapping[Kernel, str]] = {
    ("ort-cpu", GROUP_QUERY): {
        Kernel.FLASH: "float32 and causal, with present keys and values as results, as behind a past; no soft cap and "
        "no sinks. A row whose every key has -inf or the lowest number is 0",
    },
}
"""The calls for which a runtime takes another kernel than that of whole rows, where a cell depends
on it. All cells of ort-cpu are measured for one row and several, with and without a past, grouped
heads, present keys as results, one thread and two, and with flash kernels on and off
(tests/op_registry/test_runtime_cells.py). Of the other runtimes the cells are those of the calls
that the sources speak of."""


def matrix() -> str:
    """The table as Markdown: for each operator what each runtime takes, and the sources."""
    lines = [line for operator in DOMAINS for line in _operator_table(operator)]
    lines += [
        "### Kernels",
        "",
        "| runtime | operator | kernel | when it is taken |",
        "| --- | --- | --- | --- |",
    ]
    for (name, operator), kernels in KERNELS.items():
        lines += [
            f"| {name} | {operator} | {kernel} | {when} |" for kernel, when in kernels.items()
        ]
    lines += ["", "### Sources", "", "| runtime | operator | sources |", "| --- | --- | --- |"]
    for name, operators in RUNTIMES.items():
        for operator, cells in operators.items():
            sources = dict.fromkeys(
                part for cell in cells.values() for part in cell.source.split("; ")
            )
            lines.append(f"| {name} | {operator} | {'; '.join(sources)} |")
    return "\n".join(lines)


def _operator_table(operator: str) -> Iterator[str]:
    """The lines of one operator: a row for each feature that some runtime knows, a column for each
    runtime."""
    able = {name: cells[operator] for name, cells in RUNTIMES.items() if operator in cells}
    yield from (
        f"### {operator}",
        "",
        f"| | {' | '.join(able)} |",
        f"| --- |{' --- |' * len(able)}",
    )
    for feature in Feature:
        if any(feature in cells for cells in able.values()):
            words = [_shown(cells.get(feature)) for cells in able.values()]
            yield f"| {feature.meaning} | {' | '.join(words)} |"
    without = [name for name in RUNTIMES if name not in able]
    yield from ("", f"No kernel, or one that has to be given a past: {', '.join(without)}.", "")


def _shown(cell: Cell | None) -> str:
    if cell is None:
        return "?"
    since = f" from {'.'.join(map(str, cell.since))}" if cell.since else ""
    others = "".join(
        f", not in {kernel}" for kernel, known in cell.others if known is not cell.answer
    )
    return {Answer.YES: f"yes{since}{others}", Answer.NO: "-", Answer.UNKNOWN: "?"}[cell.answer]
