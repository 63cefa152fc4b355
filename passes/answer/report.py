"""The report of a run: one block for each softmax and each attention operator that the model
already holds."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Literal

from fa_compiler.op_registry.described import Described
from fa_compiler.passes.answer.shown import Shown

Kind = Literal["forward", "backward", "softmax_only", "no_softmax", "convolution"]
WITHOUT_SOFTMAX: tuple[Kind, ...] = ("no_softmax", "convolution")
"""Linear attention, and the causal convolutions beside it."""
NO_ATTENTIONS: tuple[Kind, ...] = ("backward", "convolution")
"""Blocks that are no attention of their own."""
Status = Literal["fused", "already_fused", "declined", "not_attention", "linear_attention"]

SCHEMA = 1

Progress = Callable[[str, int, int], None]
"""Called with the name of a task, how much of it is done, and how much it is in all."""


def other_target(target: str, does: str) -> str:
    """The hint that another target does something. It names the command that has targets, because
    the report may be that of atc, plan, shard or a session, which have none."""
    return f"`fa-compiler optimize --target {target}` {does}"


def is_followed(hint: str | None, target: str) -> bool:
    """Does a hint lead to the target that is written?"""
    return (hint or "").startswith(other_target(target, ""))


class Code(StrEnum):
    """Why a block was not fused. The value is what the JSON report holds.

    `meaning` is a sentence about all blocks with the code. `advice` says what the user can change,
    if there is anything: it is the hint of a decline that has no hint of its own.
    """

    meaning: str
    advice: str | None

    def __new__(cls, value: str, meaning: str, advice: str | None = None) -> Code:
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        member.advice = advice
        return member

    # What the operator cannot express.
    SOFTCAP = (
        "softcap",
        "the scores go through a soft cap, c*tanh(x/c), which no operator of Ascend has, and the CPU kernels only in "
        "front of masks and biases",
        other_target("ort", "takes a soft cap in front of the mask"),
    )
    SCORES_ARE_OUTPUT = (
        "scores_are_output",
        "the score matrix is an output of the model or is read elsewhere; a fused attention beside it is slower",
        "leave out what reads the scores, such as an output of the model",
    )
    PROBABILITIES_ARE_OUTPUT = (
        "probabilities_are_output",
        "the attention probabilities are an output of the model or are read elsewhere; a fused attention beside them "
        "is slower",
        "leave out what reads the probabilities: export again with output_attentions=False (torch.nn: "
        "need_weights=False)",
    )
    HEAD_SIZE_OVER_768 = "head_size_over_768", "the head size exceeds the operator's limit of 768"
    # What could not be proven or recognised.
    NO_SCORES_MATMUL = "no_scores_matmul", "no matrix product query x key feeds the softmax"
    NO_VALUE_MATMUL = "no_value_matmul", "no matrix product with the values follows the softmax"
    AXIS = (
        "softmax_axis",
        "the softmax does not run over the key axis",
        "where the model means the key axis: export again with opset 13 or newer (an older Softmax flattens every axis "
        "behind its own), and with known ranks",
    )
    OVERFLOW = (
        "softmax_overflows",
        "a softmax spelt without subtracting the maximum overflows where the operator does not",
        "write it as a Softmax, or subtract the maximum of each row before the exponential",
    )
    SPELLING = (
        "softmax_spelling",
        "a softmax is written out in a way that is not proven to be one",
        "write it as a Softmax",
    )
    RANK = (
        "rank",
        "the scores or operands have an unknown or unsupported rank",
        "declare the shapes of the model's inputs, or run ONNX's shape inference on it",
    )
    SHAPE = (
        "shape",
        "the shapes of the operands could not be proven to fit together",
        "export again with fixed head counts and head sizes, and one name for each size that is the same in every run",
    )
    DTYPE = (
        "dtype",
        "a data type is unknown or one the operator does not take",
        "convert the model to float32, float16 or bfloat16",
    )
    CAST = (
        "cast",
        "a cast between the operands changes the result",
        "export again without autocast, so that scores and probabilities keep one type or a wider one",
    )
    SCALE = (
        "scale",
        "the scale is not one finite number known before the model runs",
        "make the scale a constant of the model, or scale the query by it",
    )
    SCORE_TERM = (
        "score_term",
        "an operation on the scores has no counterpart in the operator",
        "write what it does as a tensor that is added to the scores, or as Where with one number",
    )
    PROBABILITY_TERM = (
        "probability_term",
        "an operation on the probabilities has no counterpart in the operator",
        "leave out what is done to the probabilities: export for inference (model.eval()), without head_mask",
    )
    MASK_VALUE = "mask_value", "a mask constant is too small to outweigh every score"
    EMPTY_ROWS = "empty_rows", "what a fully masked row gives could not be kept"
    FUNCTION = (
        "function",
        "the softmax lies in a model-local function that could not be inlined",
        "export again with one opset for the model and its functions",
    )
    SCOPE = (
        "scope",
        "the attention is spread over a graph and its subgraphs (If, Loop)",
        "export the branches as models of their own, such as a decoder with and one without a cache",
    )
    TRAINING = (
        "training",
        "the probabilities are read by a backward part that could not be fused with them",
        "where no gradient is needed: export again for inference (model.eval())",
    )
    BIAS_GRADIENT = (
        "bias_gradient",
        "the bias needs a gradient, which FlashAttentionScoreGrad does not give",
        "freeze the bias, where its gradient is not needed",
    )
    OPSET = (
        "opset",
        "the model is of an opset whose operators are not known here: they may mean something else",
        "export again with an older opset",
    )
    READY_MADE = (
        "ready_made",
        "the model already holds a fused attention operator here; it is left as it is",
        'export again with attention in plain operators: attn_implementation="eager", or an opset below 23',
    )
    ILLEGAL = (
        "illegal_for_target",
        "the fused node would break a constraint of the target",
        other_target("ort", "has fewer limits; another --soc-version or --cann may take it, too"),
    )
    PARSER = (
        "parser",
        "ATC's own parser has no plugin for the operator, or one that does not read its attributes",
        "--route air takes it, and --route onnx with a plugin",
    )
    RUNTIME = (
        "runtime",
        "the target's operators, or the runtime's kernels of them, do not take what the attention needs",
        other_target("ort", "takes it, with the library of fa-compiler"),
    )
    READ_INSIDE = (
        "read_inside",
        "a number inside of a norm is read elsewhere or is an output; the operator beside it would compute it twice",
        "leave out what reads it: where no gradient is needed, export for inference (model.eval()), without the "
        "statistics of norms",
    )
    WEIGHTS = (
        "weights",
        "products that share an operand stay apart, because their weights cannot be joined",
        "export again with weights that are constants, are not quantised, and are read by these products only",
    )
    BUDGET = (
        "proof_budget",
        "the proofs about the attention would take more steps than one attention is given",
        "fold what is computed from constants (onnxsim, onnxslim), or make the mask or bias an input of the model",
    )
    # Nothing is left to do.
    ALREADY_FUSED = (
        "already_fused",
        "the model already holds the fused operator here; nothing is left to do",
    )
    # Not attention at all.
    NOT_ATTENTION = "not_attention", "a softmax that is not followed by a product with values"
    # Attention of another kind.
    LINEAR = (
        "linear_attention",
        "attention without a softmax, which FlashAttentionScore does not compute",
        "where no token attends a later one, LinearAttention of ONNX (opset 27) computes it in one operator",
    )
    CONVOLUTION = (
        "causal_convolution",
        "a causal convolution that ShortConvolution does not compute, or that is not proven to be one",
        "cut the convolution to one column for each token, as conv(x)[..., :tokens], with strides and dilations of 1",
    )


class MissedCode(Described):
    """What a fused attention misses. The value is what the JSON report holds; `meaning` is a
    sentence about it."""

    DENSE_MASK = (
        "dense_mask",
        "a mask of all rows and keys is made and read; a band costs nothing and skips the keys it excludes",
    )
    EXPANDED_MASK = (
        "expanded_mask",
        "the mask is repeated along dimensions that the operator wants in full",
    )
    NOT_PACKED = "not_packed", "packed sequences are computed as one long sequence with a mask"
    EXPANDED = (
        "expanded",
        "query, key and value are copied to one batch size and one number of rows",
    )
    COPIES = (
        "copies",
        "an operand or the result is copied, because the model holds it in another layout",
    )
    REPEATED_HEADS = "repeated_heads", "key and value are repeated for each query head"
    WIDE = "wide", "operands of 16 bits are computed in float32"
    GATHERED_PAGES = (
        "gathered_pages",
        "pages of keys and values are gathered first, not read where they lie",
    )
    NOT_INCRE = (
        "not_incre",
        "the attention of one token does not become IncreFlashAttention, which is made for it",
    )
    QUANTIZED_OUTPUT = (
        "quantized_output",
        "the quantisation of the result stays an operator of its own",
    )
    NOT_SELECTED = (
        "not_selected",
        "the selected keys are gathered or masked, not read by their list",
    )


IN_WORDS = {MissedCode.NOT_INCRE: "IncreFlashAttention", MissedCode.WIDE: "16-bit arithmetic"}
"""What was missed, where the value of the code does not say it to people."""


@dataclass(frozen=True)
class Missed:
    """Something better that a fused attention could have been, why it is not, and what the user can
    do about it.

    `culprit` is the name of the node or value that is the cause. What is `minor` costs little
    beside the attention: a short report names only its code.
    """

    code: MissedCode
    reason: str
    culprit: str | None = None
    hint: str | None = None
    added: tuple[tuple[int, int], ...] = ()
    """The bytes that it adds for one sequence: terms (a, n), each a times the n-th power of the
    number of tokens, which stands for every size that is not known before the model runs."""
    minor: bool = False

    def added_bytes(self, tokens: int) -> int:
        """The bytes that it adds for one sequence of this number of tokens."""
        return sum(factor * tokens**power for factor, power in self.added)

    @property
    def word(self) -> str:
        """The code as a word for people."""
        return IN_WORDS.get(self.code) or self.code.value.replace("_", " ")

    @property
    def kind(self) -> tuple[object, ...]:
        """What is equal for layers in which only the names of values differ."""
        return self.code, re.sub(r"'[^']*'", "", self.reason), self.hint

    def __str__(self) -> str:
        return f"{self.word}: {self.reason}{_bracketed(self.culprit)}"

    def to_json(self) -> dict[str, Any]:
        """The record as the JSON report holds it."""
        return {
            "code": self.code.value,
            "reason": self.reason,
            "culprit": self.culprit,
            "hint": self.hint,
            "minor": self.minor,
        }


INEXPRESSIBLE = frozenset(
    (Code.SOFTCAP, Code.SCORES_ARE_OUTPUT, Code.PROBABILITIES_ARE_OUTPUT, Code.HEAD_SIZE_OVER_768)
)
"""The codes of attentions that the operator cannot express as long as the model has to keep its
outputs."""


def printable(text: str) -> str:
    """The text with its control characters escaped: a name in a file must not control the
    terminal."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _bracketed(culprit: str | None) -> str:
    """The name of a node behind a reason; empty where there is none."""
    return f" [{culprit}]" if culprit else ""


def _blocks(ids: Sequence[int]) -> str:
    """Blocks by their numbers."""
    if len(ids) == 1:
        return f"block {ids[0]}"
    return f"blocks {ranges(ids)}"


def first_of(names: Sequence[str], kept: int = 3) -> str:
    """Names in a sentence: the first ones, and how many more there are."""
    more = f" and {len(names) - kept} more" if len(names) > kept else ""
    return f"{', '.join(names[:kept])}{more}"


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as ranges, such as "0-3, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join("-".join(dict.fromkeys((str(run[0]), str(run[-1])))) for run in runs)


@dataclass(frozen=True)
class Block:
    """One softmax or attention op of the model, or the gradient of one, and what became of it.

    A forward block and the backward block of its gradient name each other in `pair`; the backward
    block follows the forward block directly. `heads` is (N1, N2), the numbers of query and key
    heads, and `scores` is (S1, S2), the rows and keys of the scores of one head; each is 0 where
    unknown before the model runs. `mask` is a short word: "none", "atten_mask", "real_shift",
    "causal", ... `node` is the name of the fused node.
    """

    id: int
    kind: Kind
    anchor: str
    status: Status
    pair: int | None = None
    op: str | None = None
    node: str | None = None
    layout: str | None = None
    mask: str | None = None
    heads: tuple[int, int] | None = None
    scores: tuple[int, int] | None = None
    extensions: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    code: Code | None = None
    reason: str | None = None
    culprit: str | None = None
    hint: str | None = None
    rule: str | None = None
    """Of linear attention: its update rule, and what decays."""
    missed: tuple[Missed, ...] = ()
    """What better a fused attention could have been; empty for gradients, which share it with their
    attention."""

    @property
    def what(self) -> str:
        """What became of it, in one line: operator, layout, heads and mask, or the code, the reason
        and the culprit."""
        if self.status != "fused":
            return self._why_not_fused
        parts = [self.op or "", self.layout or "", self._heads_in_words]
        if "EXT-SOFTCAP" in self.extensions:
            parts.append("soft cap")
        if self.mask == "none":
            parts.append("no mask")
        elif self.mask:
            parts.append(f"mask: {self.mask}")
        if self.rule:
            parts.append(self.rule)
        if self.assumed:
            parts.append(f"assuming {', '.join(self.assumed)}")
        parts.extend(f"missed: {missed.word}" for missed in self.missed if not missed.minor)
        return ", ".join(filter(None, parts))

    @property
    def _why_not_fused(self) -> str:
        """The code, the reason or else the meaning of the code, and the culprit. What the columns
        beside it say is left out."""
        culprit = "" if self.culprit == self.anchor else _bracketed(self.culprit)
        if self.code is None:
            return f"{self.reason or ''}{culprit}"
        code = "" if self.code.value == self.status else f"{self.code.value}: "
        return f"{code}{self.reason or self.code.meaning}{culprit}"

    @property
    def _heads_in_words(self) -> str:
        """The number of query heads, and of key heads where it is another one; empty where they are
        not told."""
        if not self.heads:
            return ""
        query, key = (str(count or "?") for count in self.heads)
        told = "1 head" if query == "1" else f"{query} heads"
        return told if query == key else f"{told} on {key}"

    def to_json(self) -> dict[str, Any]:
        """The block as the JSON report holds it."""
        return {
            "id": self.id,
            "kind": self.kind,
            "pair": self.pair,
            "anchor": self.anchor,
            "status": self.status,
            "op": self.op,
            "node": self.node,
            "layout": self.layout,
            "mask": self.mask,
            "heads": self.heads and list(self.heads),
            "extensions": list(self.extensions),
            "assumed": list(self.assumed),
            "code": self.code and self.code.value,
            "reason": self.reason,
            "culprit": self.culprit,
            "hint": self.hint,
            "missed": [missed.to_json() for missed in self.missed],
        }


@dataclass(frozen=True)
class Around:
    """One norm or gated activation around attention, and what became of it.

    `op` is the operator and `node` the name of its node. It stands for `replaced` nodes of the
    model. `added` is the number of nodes that were made, with the operator itself. `rounded` tells
    that the model rounds to 16 bits inside, and the operator only at its end.
    """

    anchor: str
    status: Literal["fused", "declined"]
    op: str | None = None
    node: str | None = None
    replaced: int = 0
    added: int = 0
    rounded: bool = False
    code: Code | None = None
    reason: str | None = None
    culprit: str | None = None
    hint: str | None = None

    @property
    def kind(self) -> tuple[object, ...]:
        """What is equal for layers in which only the names of values differ."""
        return self.code, re.sub(r"'[^']*'", "", self.reason or ""), self.hint

    def __str__(self) -> str:
        if self.status == "fused":
            return f"{self.anchor}: {self.op}, in the place of {_counted(self.replaced, 'node')}"
        code = "" if self.code is None else f"{self.code.value}: "
        culprit = "" if self.culprit == self.anchor else _bracketed(self.culprit)
        return f"{self.anchor}: declined: {code}{self.reason}{culprit}"

    def to_json(self) -> dict[str, Any]:
        """The line as the JSON report holds it."""
        return asdict(self) | {"code": self.code and self.code.value}


def _counted(number: int, noun: str) -> str:
    """A number of things: 1 node, 2 nodes."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _fused_around(lines: Sequence[Around]) -> str:
    """How many of each operator there are, and what they stand for."""
    counts = {
        op: sum(line.op == op for line in lines) for op in sorted({str(line.op) for line in lines})
    }
    operators = ", ".join(f"{count} {op}" for op, count in counts.items())
    made, replaced = sum(line.added for line in lines), sum(line.replaced for line in lines)
    text = f"around attention: {operators}; {_counted(replaced, 'node')} became {made}"
    rounded = sum(line.rounded for line in lines)
    return (
        f"{text}; {rounded} of them compute in float32 what the model rounds to 16 bits"
        if rounded
        else text
    )


def _declined_around(alike: Sequence[Around]) -> str:
    """The first of some that were declined for one reason, how many more there are, and what the
    user can do."""
    more = f", and {len(alike) - 1} more like it" if len(alike) > 1 else ""
    return f"around attention: {alike[0]}{more}" + (
        f"; try: {alike[0].hint}" if alike[0].hint else ""
    )


@dataclass(frozen=True)
class CacheLine:
    """One cache of keys or values, where the user asked for buffers in place of caches.

    For a cache that became a buffer, `present` is the output that holds the input `past` with the
    new rows, `axis` is the axis of its tokens, and `length` is the input that counts the tokens it
    holds. `copied` are the nodes that still read a copy of its rows. Other caches are as they were;
    `reason` and `culprit` say why.
    """

    past: str
    present: str | None = None
    axis: int | None = None
    length: str | None = None
    copied: tuple[str, ...] = ()
    reason: str | None = None
    culprit: str | None = None

    def __str__(self) -> str:
        if self.present is None:
            return f"cache {self.past}: not changed: {self.reason}{_bracketed(self.culprit)}"
        line = f"cache {self.past}: a buffer, written in place as {self.present}; {self.length} counts its tokens"
        if self.copied:
            line += f"; copied for {', '.join(self.copied)}"
        return line


def _alike(caches: Sequence[CacheLine]) -> str:
    """The line of caches in which only names differ."""
    first = caches[0]
    if len(caches) == 1:
        return str(first)
    names = first_of([cache.past for cache in caches])
    if first.present is None:
        return f"caches {names}: each stays as it is: {first.reason}{_bracketed(first.culprit)}"
    presents = first_of([str(cache.present) for cache in caches])
    return f"caches {names}: buffers, written in place as {presents}; {first.length} counts their tokens"


def _in_python(lines: Sequence[str]) -> list[str]:
    """A line that says how Python writes the assumptions that hints name, if they name any."""
    found = [words for line in lines for words in re.findall(r"--assume ([a-z][a-z,-]*)", line)]
    if not found:
        return []
    keywords = ", ".join(f'"{word}"' for word in found[0].split(","))
    return [f"--assume {found[0]} is assume=[{keywords}] in Python"]


@dataclass(repr=False)
class Report(Shown):
    """All blocks of one model, in graph order, its caches, and notes that belong to no block.

    `changed_otherwise` says that the result differs from the input in more than the fusions; the
    notes say in what.
    """

    blocks: Sequence[Block]
    model: str = ""
    target: str = "ort"
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    caches: Sequence[CacheLine] = ()
    possible_buffers: Sequence[str] = ()
    """The inputs that are caches and would be buffers with `in_place_caches`, where the user did
    not ask for it."""
    changed_otherwise: bool = False
    around: Sequence[Around] = ()
    """The norms and gated activations around the attention, in graph order."""
    written_out: Sequence[str] = ()
    """A sentence for each operator without a kernel that became plain operators; it is one of the
    notes, too."""

    @property
    def is_changed(self) -> bool:
        """Was anything fused or written out, or did a cache become a buffer?"""
        return (
            self.has_fused
            or bool(self.written_out)
            or any(cache.present is not None for cache in self.caches)
        )

    @property
    def has_fused(self) -> bool:
        """Was an attention fused, or anything around it?"""
        return bool(self.count("fused")) or any(line.status == "fused" for line in self.around)

    @property
    def around_operators(self) -> list[str]:
        """The operators that were emitted around the attention, in alphabetical order."""
        return sorted({line.op for line in self.around if line.op is not None})

    def count(self, status: Status) -> int:
        """How many softmaxes and attention ops have this status; their gradients are not counted
        again."""
        return sum(block.status == status for block in self.blocks if block.kind != "backward")

    @property
    def softmaxes(self) -> int:
        """How many softmaxes and attention ops there are."""
        return sum(block.kind not in ("backward", *WITHOUT_SOFTMAX) for block in self.blocks)

    @property
    def attentions(self) -> int:
        """How many attentions there are, with a softmax or without one. Other softmaxes are
        none."""
        return sum(
            block.kind not in NO_ATTENTIONS and block.status != "not_attention"
            for block in self.blocks
        )

    @property
    def fused_attentions(self) -> int:
        """How many of them were fused."""
        return self._attentions_of("fused")

    @property
    def ready_attentions(self) -> int:
        """How many of them the model already held as fused operators."""
        return self._attentions_of("already_fused")

    def _attentions_of(self, status: Status) -> int:
        return sum(
            block.status == status and block.kind not in NO_ATTENTIONS for block in self.blocks
        )

    @property
    def gradients(self) -> int:
        """How many softmaxes and attention ops were fused together with their gradient."""
        return sum(block.kind == "backward" and block.status == "fused" for block in self.blocks)

    @property
    def advice(self) -> list[str]:
        """What the user can do, one line for all blocks with the same hint, such as "blocks 0-3, 7,
        try: ..."."""
        blocks: dict[str, list[int]] = {}
        for block in self.blocks:
            if block.status in ("declined", "linear_attention") and block.hint:
                blocks.setdefault(block.hint, []).append(block.id)
        return [f"{_blocks(ids)}, try: {hint}" for hint, ids in blocks.items()]

    @property
    def missed(self) -> list[str]:
        """What fused blocks miss, one line for all blocks in which only the names of values differ.
        The minor losses of one code are one line, too."""
        kinds: dict[tuple[object, ...], dict[int, Missed]] = {}
        minor: dict[str, list[int]] = {}
        for block in self.blocks:
            for missed in block.missed:
                if missed.minor:
                    minor.setdefault(missed.word, []).append(block.id)
                else:
                    kinds.setdefault(missed.kind, {})[block.id] = missed
        lines = [
            f"{_blocks(ids)}, small losses by {word}: --explain says more"
            for word, ids in minor.items()
        ]
        for alike in kinds.values():
            first, others = (
                next(iter(alike.values())),
                len({missed.culprit for missed in alike.values()}) - 1,
            )
            line = f"{_blocks(list(alike))}, missed {first}"
            if others:
                line += f" and {others} more"
            if first.hint:
                line += f"; try: {first.hint}"
            lines.append(line)
        return lines

    @property
    def around_lines(self) -> list[str]:
        """What became of the norms and gated activations around the attention: one line for all
        that were fused, and one for those that were declined for one reason."""
        fused = [line for line in self.around if line.status == "fused"]
        kinds: dict[tuple[object, ...], list[Around]] = {}
        for line in self.around:
            if line.status == "declined":
                kinds.setdefault(line.kind, []).append(line)
        return [*([_fused_around(fused)] if fused else []), *map(_declined_around, kinds.values())]

    @property
    def cache_lines(self) -> list[str]:
        """What became of the caches, one line for all that became buffers, and one for those that
        stayed for one reason. A buffer that is still copied has a line of its own."""
        kinds: dict[tuple[object, ...], list[CacheLine]] = {}
        for cache in self.caches:
            kind = (cache.length, cache.reason, cache.culprit, cache.copied and cache.past)
            kinds.setdefault(kind, []).append(cache)
        return [*map(_alike, kinds.values())]

    @property
    def summary(self) -> str:
        """One line with the number of blocks of each status, and the time."""
        if not self.blocks:
            return self.outcome
        return f"{self.outcome}, {self.seconds:.1f} s"

    @property
    def outcome(self) -> str:
        """The summary without the time: the same in every run."""
        if not self.blocks:
            return f"{self.model}: no attention found"
        without = [block for block in self.blocks if block.kind in WITHOUT_SOFTMAX]

        def count(status: Status) -> int:
            return self.count(status) - sum(block.status == status for block in without)

        parts = [f"{count('fused')} fused"]
        if self.gradients:
            parts[0] += (
                f" ({self.gradients} with {'its gradient' if self.gradients == 1 else 'their gradients'})"
            )
        if already := count("already_fused"):
            parts.append(f"{already} already fused")
        if declined := count("declined"):
            parts.append(f"{declined} declined")
        if other := count("not_attention"):
            parts.append(f"{other} not attention")
        told = [f"{', '.join(parts)} (of {self.softmaxes})"] if self.softmaxes else []
        for kind, words in (
            ("no_softmax", "linear attention"),
            ("convolution", "causal convolution"),
        ):
            of_kind = [block.status for block in without if block.kind == kind]
            if of_kind:
                told.append(f"{words}: {of_kind.count('fused')} fused (of {len(of_kind)})")
        return f"{self.model}: {'; '.join(told)}"

    @property
    def _short(self) -> str:
        return printable(self.outcome)

    @property
    def _rows(self) -> list[list[str]]:
        """The table of blocks, its header first."""
        rows = [["block", "status", "anchor", "what"]]
        rows += [
            [str(block.id), block.status.replace("_", " "), block.anchor, block.what]
            for block in self.blocks
        ]
        return [[printable(cell) for cell in row] for row in rows]

    @property
    def _lines(self) -> list[str]:
        """What stands below the table."""
        lines = [*self.advice, *self.missed, *self.around_lines, *self.cache_lines, *self.notes]
        return [printable(line) for line in (*lines, *_in_python(lines), self.summary)]

    def to_json(self) -> dict[str, Any]:
        """The report in schema 1; `notes` holds remarks that belong to no block, such as
        repairs."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "target": self.target,
            "blocks": [block.to_json() for block in self.blocks],
            "summary": {
                "softmaxes": self.softmaxes,
                "fused": self.count("fused"),
                "already_fused": self.count("already_fused"),
                "declined": self.count("declined"),
                "not_attention": self.count("not_attention"),
                "linear_attention": self.count("linear_attention"),
            },
            "around": [line.to_json() for line in self.around],
            "caches": [asdict(cache) for cache in self.caches],
            "notes": self.notes,
            "seconds": round(self.seconds, 3),
        }
