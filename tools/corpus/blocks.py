"""How many of the blocks around attention become one operator for Ascend? Counted by the names that exporters give.

    python -m tools.corpus.blocks --corpus DIR [--corpus DIR] [--all]

A block has a mark: one node whose name says what it belongs to. Where modules are kept (`/model/layers.0/mlp/act_fn/
Sigmoid`), this is the module; where functions of PyTorch are (`node_rsqrt_3`, `node_silu`, `node_neg_1`), it is the
function; and operators that are such a block have their type. No matcher of passes/ is asked. A block became one
operator if its mark is gone from the result, or if the mark is such an operator itself that ATC has, as
LayerNormalization is. The tables count marks; a list names those that are left, with what the report says of them.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx

import fa_compiler
from fa_compiler.passes.answer.report import Around

NORM, ATTENTION, MLP = (
    re.compile(words, re.IGNORECASE)
    for words in (r"norm|(^|_)ln(_\w+)?(_\d+)?$", r"att(n|ention)", r"mlp|ffn|feed_forward|experts")
)
KINDS = ("RMSNorm", "LayerNorm", "rotary", "gated MLP")
FUNCTIONS = {"rsqrt": "RMSNorm", "layer_norm": "LayerNorm"}
TYPES = {
    "RMSNormalization": "RMSNorm",
    "SimplifiedLayerNormalization": "RMSNorm",
    "SkipSimplifiedLayerNormalization": "RMSNorm",
    "LayerNormalization": "LayerNorm",
    "SkipLayerNormalization": "LayerNorm",
    "RotaryEmbedding": "rotary",
}
ONE_ALREADY = "LayerNormalization"
"""An operator of ONNX that ATC's parser turns into one of GE."""
ACTIVATIONS = ("silu", "gelu", "swish")
DECODERS = (
    *("bloom", "bloom_past", "deepseekv3", "falcon", "falcon_past", "gemma2", "gemma2_past", "gpt2", "gpt2_nomask"),
    *("gptbigcode", "gptj", "gptj_past", "gptneo", "gptneo_past", "gptoss", "imagegpt_text_ctrl", "llama"),
    *("llama_leftpad", "llama_mha", "llama_past", "llama_static", "mistral", "mixtral", "opt", "opt_past", "phi3"),
    *("phi3_past", "qwen3", "qwen3_past", "smollm3", "xglm", "bart_decpast", "t5_decpast", "bert_decoder"),
    "deepseek_v32",
)
"""The decoders of a corpus whose manifest does not name families."""
FAMILIES = ("decoder", "linear", "sparse", "encoder-decoder")
NEAR = 6
"""So many nodes from a mark a line of the report speaks of it."""


@dataclass(frozen=True)
class Mark:
    """One block: its kind and the node that shows it."""

    kind: str
    node: onnx.NodeProto
    count: int = 1


@dataclass(frozen=True)
class Graph:
    """The main graph of a model."""

    nodes: Sequence[onnx.NodeProto]

    @cached_property
    def makers(self) -> dict[str, onnx.NodeProto]:
        """The node that makes each value."""
        return {name: node for node in self.nodes for name in node.output if name}

    @cached_property
    def readers(self) -> dict[str, list[onnx.NodeProto]]:
        """The nodes that read each value."""
        found = defaultdict(list)
        for node in self.nodes:
            for name in {*node.input}:
                found[name].append(node)
        return found

    def before(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """The nodes that make what a node reads."""
        return [self.makers[name] for name in node.input if name in self.makers]

    def behind(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """The nodes that read what a node makes."""
        return [reader for name in node.output for reader in self.readers.get(name, ())]

    def near(self, node: onnx.NodeProto, steps: int) -> set[str]:
        """The names of the nodes that are so many steps from a node at most, in both directions."""
        found: set[str] = set()
        for further in (self.before, self.behind):
            level = [node]
            for _ in range(steps):
                found |= {each.name for each in level}
                level = [each for one in level for each in further(one) if each.name not in found]
        return found

    def marks(self) -> Iterator[Mark]:
        """The marks of all blocks."""
        for node in self.nodes:
            scope = node.name.rpartition("/")[0]
            kind = TYPES.get(node.op_type) or (self._of_module(node, scope) if scope else self._of_function(node))
            if kind is not None:
                yield Mark(kind, node)
            elif node.op_type == "GroupQueryAttention" and any(a.name == "do_rotary" and a.i for a in node.attribute):
                yield Mark("rotary", node, 2)
            elif self._turns(node) and (not scope or ATTENTION.search(scope.rpartition("/")[2])):
                yield Mark("rotary", node)

    def _of_module(self, node: onnx.NodeProto, scope: str) -> str | None:
        """The block that a node belongs to by the module in its name."""
        parts = scope.split("/")
        if node.op_type == "Sqrt" and NORM.search(parts[-1]):
            centred = any(each.op_type == "Sub" and each.name.startswith(f"{scope}/") for each in self.nodes)
            return "LayerNorm" if centred else "RMSNorm"
        if node.op_type not in ("Sigmoid", "Erf", "Tanh") or not any(map(MLP.search, parts[-2:])):
            return None
        return "gated MLP" if self._is_gate(node, scope) else None

    def _is_gate(self, node: onnx.NodeProto, scope: str) -> bool:
        """Is the result of an activation's module multiplied in the module around it?"""
        inner = [node]
        for _ in range(NEAR):
            inner = [each for one in inner for each in self.behind(one)]
            outside = [each for each in inner if each.name.rpartition("/")[0] != scope]
            if outside:
                return all(each.op_type == "Mul" for each in outside)
        return MLP.search(scope.rpartition("/")[2]) is not None

    def _of_function(self, node: onnx.NodeProto) -> str | None:
        """The block that a node belongs to by the function in its name."""
        function = _function(node)
        if function == "rsqrt":
            return "RMSNorm" if {"mean", "ReduceMean"} & self._functions_before(node, 3) else None
        if function in ACTIVATIONS:
            behind = self.behind(node)
            return "gated MLP" if behind and all(each.op_type == "Mul" for each in behind) else None
        if function == "sigmoid" and "clamp" in self._functions_before(node, 3):
            return "gated MLP"
        return FUNCTIONS.get(function)

    def _functions_before(self, node: onnx.NodeProto, steps: int) -> set[str]:
        found: set[str] = set()
        level = [node]
        for _ in range(steps):
            level = [each for one in level for each in self.before(one)]
            found |= {_function(each) for each in level}
        return found

    def _turns(self, node: onnx.NodeProto) -> bool:
        """Does a node's name say that it turns numbers by a quarter, or is this the real part of a rotation?"""
        function = _function(node).lower()
        behind = self.behind(node)
        behind += [each for one in behind if one.op_type == "Unsqueeze" for each in self.behind(one)]
        joining = [each for each in behind if each.op_type == "Concat"]
        if function == "sub":
            return any(_function(each).lower() in ("add", "unsqueeze") for one in joining for each in self.before(one))
        return function == "neg" and bool(joining)


def _function(node: onnx.NodeProto) -> str:
    """The function in a name such as node_rsqrt_3 or /model/Neg_1."""
    return re.sub(r"_\d+$", "", node.name.rpartition("/")[2].removeprefix("node_"))


@dataclass(frozen=True)
class Left:
    """A block that did not become one operator."""

    model: str
    kind: str
    node: str
    reason: str


def counted(model: onnx.ModelProto, name: str) -> tuple[Counter[str], list[Left]]:
    """The marked blocks of each kind, and those that are left."""
    graph = Graph(model.graph.node)
    result = fa_compiler.optimize(model, target="ascend")
    assert isinstance(result.model, onnx.ModelProto)
    remaining = {(node.name, node.op_type) for node in result.model.graph.node}
    total: Counter[str] = Counter()
    left = []
    for mark in graph.marks():
        total[mark.kind] += mark.count
        if (mark.node.name, mark.node.op_type) in remaining and mark.node.op_type != ONE_ALREADY:
            reason = _reason(graph, mark.node, result.report.around)
            left += [Left(name, mark.kind, mark.node.name, reason)] * mark.count
    return total, left


def _reason(graph: Graph, node: onnx.NodeProto, lines: Sequence[Around]) -> str:
    """What the report says of a block."""
    near = graph.near(node, NEAR)
    said = [line for line in lines if line.status == "declined" and {line.anchor, line.culprit} & near]
    return f"{said[0].code}: {said[0].reason}" if said else "no grammar has it"


def _models(corpus: Path, everything: bool) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The decoders of a corpus, each with its family."""
    for entry in json.loads((corpus / "manifest.json").read_text())["models"]:
        family = entry.get("arch") or entry["id"].partition("__")[0]
        is_decoder = entry.get("family") in FAMILIES or family in DECODERS
        if is_decoder or everything:
            yield family, entry


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser("python -m tools.corpus.blocks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--corpus", type=Path, action="append", required=True, help="a folder with a manifest")
    parser.add_argument("--all", action="store_true", help="also models that are no decoders")
    parser.add_argument("--only", default="", help="models whose name has this in it")
    args = parser.parse_args()
    totals: dict[str, Counter[str]] = defaultdict(Counter)
    missing: dict[str, list[Left]] = defaultdict(list)
    for corpus in args.corpus:
        for family, entry in _models(corpus, args.all):
            if args.only not in entry["id"]:
                continue
            model = onnx.load(corpus / entry["file"], load_external_data=False)
            total, left = counted(model, entry["id"])
            totals[family] += total
            missing[family] += left
    _print(totals, missing)


def _print(totals: Mapping[str, Counter[str]], missing: Mapping[str, Sequence[Left]]) -> None:
    print("| family |", " | ".join(KINDS), "|")
    print("| --- |" + " ---: |" * len(KINDS))
    sums: Counter[str] = Counter()
    left: Counter[str] = Counter()
    for family, total in sorted(totals.items()):
        if not total:
            continue
        here = Counter(one.kind for one in missing[family])
        sums, left = sums + total, left + here
        print(f"| {family} |", " | ".join(_share(total, here, kind) for kind in KINDS), "|")
    print("| all |", " | ".join(_share(sums, left, kind) for kind in KINDS), "|")
    whole = sum(sums.values())
    print(f"{whole - left.total()} of {whole} blocks, {100 * (1 - left.total() / max(1, whole)):.2f} %")
    for family, those in sorted(missing.items()):
        for (kind, reason), count in Counter((one.kind, one.reason) for one in those).most_common():
            first = next(one for one in those if (one.kind, one.reason) == (kind, reason))
            print(f"{family}: {count} {kind}, as {first.node} of {first.model}: {reason}")


def _share(total: Counter[str], left: Counter[str], kind: str) -> str:
    return f"{total[kind] - left[kind]} of {total[kind]}" if total[kind] else ""


if __name__ == "__main__":
    main()
