"""Where a model spends its time, by ONNX Runtime's profile, and the tables of `python -m bench models`.

A node that ONNX Runtime runs belongs to one of these parts:

    attention   in the original: what the fusion removes, which are products, softmax, masks, and moves between them;
                in a fused model: the attention operators
    caused      only in a fused model: nodes that the fusion added beside the operators, and moves that ONNX Runtime
                added. A Reshape among them takes the place of the exporter's own, which is a part of attention in the
                original
    other       what both models have
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.speed.tables import number, table

TOLERANCE = 1e-3
"""The allowed difference from `ort`, relative to the largest value. The models have many float32 layers, and the order
of summation differs."""

COMPUTES_NOTHING = ("Transpose", "Reshape", "Expand", "Concat", "Slice", "Split", "Cast", "Identity", "Pad", "Tile")
"""Operators that compute nothing."""

Node = Sequence[Any]
"""The name, the operator and the seconds of a node that ran."""


def original_parts(nodes: Iterable[Node], original: set[str], fused: set[str]) -> dict[str, Any]:
    """The seconds of each part in the original. The sets are the names of the nodes in both files."""
    seconds: Counter[str] = Counter(attention=0.0, other=0.0)
    for name, _, took in nodes:
        seconds["attention" if _in_file(name, original) and not _in_file(name, fused) else "other"] += took
    return {"seconds": dict(seconds)}


def fused_parts(nodes: Iterable[Node], original: set[str], fused: set[str]) -> dict[str, Any]:
    """The seconds of each part in a fused model; what is caused by operator, and the number of its nodes; and all
    seconds by operator. The sets are the names of the nodes in both files."""
    seconds: Counter[str] = Counter(attention=0.0, other=0.0, caused=0.0)
    kinds, caused, count = Counter[str](), Counter[str](), 0
    for name, operator, took in nodes:
        added = not _in_file(name, original) and (_in_file(name, fused) or operator in COMPUTES_NOTHING)
        part = "attention" if "Attention" in operator else "caused" if added else "other"
        seconds[part] += took
        kinds[operator] += took
        if part == "caused":
            caused[operator] += took
            count += 1
    return {"seconds": dict(seconds), "caused": dict(caused), "count": count, "kinds": dict(kinds)}


def _in_file(name: str, names: set[str]) -> bool:
    """Whether a node that ran is one of the file. ONNX Runtime appends /WORD or /WORD/ where it changes a node."""
    return name in names or name.removesuffix("/").rpartition("/")[0] in names


def document(results: Mapping[str, Any]) -> str:
    """All tables."""
    rows = results["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row["variants"]))
    layers = f", at most {results['layers']} layers" if results["layers"] else ""
    made = ", ".join(f"{name} {count}" for name, count in results["optimizer"].items())
    text = [
        f"# Whole models, {results['threads']} threads{layers}, {results['date']}\n",
        f"{', '.join(results['versions'])}. One sentence, image or sound.",
        "Times in brackets are of results that differ from ort's.\n",
        _times(rows, names),
        "Where the time goes, by ONNX Runtime's profile, ms. `caused` is what ours has beside the operators and the "
        "original has not:\n",
        _where(rows),
        "Making a session, s, and its first run, ms:\n",
        _starts(rows, names),
        "Peak memory of the process, weights included, MiB:\n",
        _memory(rows, names),
        f"Attention operators that onnxruntime.transformers made: {made}.\n",
    ]
    absent = [f"- {row['model']} {row['length']}: {name}: {why}" for row in rows for name, why in row["absent"].items()]
    return "\n".join([*text, *absent]) + "\n" * bool(absent)


def _times(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    cells = []
    for row in rows:
        variants = row["variants"]
        mine, theirs = variants.get("ours"), variants.get("ort")
        ratio = f"{theirs['ms'] / mine['ms']:.2f}" if mine and theirs else "-"
        cells.append([*_head(row), *(_time(variants.get(name)) for name in names), ratio])
    return table(["model", "tokens", *(f"{name} ms" for name in names), "ours is faster"], cells)


def _where(rows: Sequence[Mapping[str, Any]]) -> str:
    cells = []
    for row in rows:
        before, after = (row["where"].get(name) for name in ("ort", "ours"))
        if before and after:
            theirs, mine = ({part: 1e3 * s for part, s in each["seconds"].items()} for each in (before, after))
            caused = sorted(after["caused"].items(), key=lambda item: -item[1])
            cells.append([
                *_head(row), *(number(theirs[part]) for part in ("attention", "other")),
                *(number(mine[part]) for part in ("attention", "other", "caused")),
                f"{100 * mine['caused'] / sum(mine.values()):.2f} %", str(after["count"]),
                ", ".join(f"{kind} {number(1e3 * seconds)}" for kind, seconds in caused[:3]),
            ])  # fmt: skip
    return table(["model", "tokens", "ort: attention", "other", "ours: attention", "other", "caused", "share", "nodes",
                  "which"], cells)  # fmt: skip


def _starts(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    cells = []
    for row in rows:
        found = [row["variants"].get(name) for name in names]
        cells.append([*_head(row), *(f"{each['made']:.2f} + {number(each['first_ms'])}" if each else "-"
                                     for each in found)])  # fmt: skip
    return table(["model", "tokens", *names], cells)


def _memory(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    cells = [[*_head(row), *(number(row["variants"][name]["peak_mib"]) if name in row["variants"] else "-"
                             for name in names)] for row in rows]  # fmt: skip
    return table(["model", "tokens", *names], cells)


def _head(row: Mapping[str, Any]) -> list[str]:
    return [row["model"], str(row["length"])]


def _time(variant: Mapping[str, Any] | None) -> str:
    if variant is None:
        return "-"
    right = variant["difference"] is not None and variant["difference"] <= TOLERANCE
    return number(variant["ms"]) if right else f"({number(variant['ms'])})"
