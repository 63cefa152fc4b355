"""Writes the page: a summary, what was not fused and what to do about it, how the result is run,
and each kind of block as a drawing.

The page holds its styles, its script and its drawings, and asks no network for anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path

import onnx

from fa_compiler import shell
from fa_compiler.comparison.decoder import caches_of, takes_steps
from fa_compiler.lowering.drawing import sheet, shortened, svg
from fa_compiler.page.drawn import Drawing, Drawn, Kind
from fa_compiler.page.gain import (
    Scores,
    added_by_mask,
    in_all,
    in_units,
    largest_scores,
    nodes_of,
    still_held,
)
from fa_compiler.page.provenance import Provenance, Written
from fa_compiler.page.wording import link_to, unbroken, worded
from fa_compiler.passes import Block, Report
from fa_compiler.passes.answer.report import Missed, first_of, ranges
from fa_compiler.pipeline.how_to_run import COPIED
from fa_compiler.protos.subgraphs import all_nodes

LENGTHS = (512, 2048, 8192, 32768)
"""The sequence lengths for which the page says how large the scores are."""
ROLES = ("query", "key", "value", "mask", "bias")
PART = "A part is shown. Drag to see the rest, on a touch screen after a tap; the wheel zooms after a click."
WITHOUT_SCRIPT = (
    ".view { height: auto; overflow: auto; cursor: auto } .tools, #theme, form { display: none }"
)
"""The styles where a viewer of files runs no scripts."""
STATUS = {
    "fused": "fused",
    "already_fused": "already fused",
    "declined": "not fused",
    "not_attention": "not attention",
    "linear_attention": "no softmax",
}


@dataclass(frozen=True)
class Run:
    """What a page tells of the command that made it: its model, what it wrote, if anything, the
    page of a measurement that belongs to this page, and the words of the options of the fusion."""

    made: Provenance
    model: Path
    gain: Path
    written: Written | None = None
    options: tuple[str, ...] = ()


def page(drawn: Drawn, run: Run | None = None) -> str:
    """The page of a run; without `run` it tells nothing of the command, the machine and the
    files."""
    report = drawn.report
    body = [*_summary(drawn, run), *_left(report), *_missed(report), *_remarks(report)]
    if run is not None:
        body += _how_to_run(run, drawn)
    body += _controls(drawn.kinds)
    for number, kind in enumerate(drawn.kinds):
        body += _section(number, kind)
    if run is not None:
        body += run.made.section()
    return document(title_of(report), body, f"{_file('theme.js')}{_file('page.js')}")


def title_of(report: Report) -> str:
    """The title of the page of a model."""
    return f"Attention in {report.model}"


def document(
    title: str, body: Sequence[str], script: str | None = None, own_style: str = ""
) -> str:
    """A page with the styles and the header that all pages share."""
    script = _file("theme.js") if script is None else script
    style = f"{_file('page.css')}{own_style}"
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{style}</style>",
            f"<noscript><style>{WITHOUT_SCRIPT}</style></noscript></head><body>",
            f'<header><h1>{escape(title)}</h1><button id="theme" type="button">dark</button></header><main>',
            *body,
            f"</main><script>{script}</script></body></html>",
            "",
        ]
    )


def drawings(drawn: Drawn) -> str:
    """The drawings of the page alone, as one SVG: each kind of block before and after."""
    return sheet(
        [
            (f"{kind.first.anchor}, {drawing.title}", drawing.boxes, drawing.arrows)
            for kind in drawn.kinds
            for drawing in kind.drawings
        ]
    )


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


# -- the summary
# --------------------------------------------------------------------------------------


def _summary(drawn: Drawn, run: Run | None) -> Iterator[str]:
    report, result = drawn.report, drawn.result
    yield "<section aria-labelledby='summary'><h2 id='summary'>Summary</h2>"
    yield f"<p class='verdict'>{_verdict(report)}</p>"
    if run is not None:
        yield from _verified(run.written)
    if not report.attentions and not report.count("not_attention"):
        yield "</section>"
        return
    yield "<dl class='cards'>"
    yield from (
        f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in _cards(drawn, run).items()
    )
    yield "</dl>"
    if (scores := largest_scores(report)) is not None:
        yield from _memory(report, scores)
    if result is not None:
        yield from _operators(drawn.original, result)
    yield "</section>"


def _cards(drawn: Drawn, run: Run | None) -> dict[str, str]:
    """The figures of the summary. What is left out is 0."""
    report, before = drawn.report, nodes_of(drawn.original)
    after = before if drawn.result is None else nodes_of(drawn.result)
    already, other = report.count("already_fused"), report.count("not_attention")
    convolutions = Counter(block.status for block in report.blocks if block.kind == "convolution")
    cards = {"fused": str(report.fused_attentions)}
    cards |= {"already fused": str(already)} if already else {}
    cards |= {"not fused": str(report.count("declined") - convolutions["declined"])}
    if convolutions:
        cards["convolutions fused"] = f"{convolutions['fused']} of {convolutions.total()}"
    cards |= {"not attention": str(other)} if other else {}
    cards |= {"nodes before": f"{before:,}", "nodes after": f"{after:,}"}
    if run is not None and run.written is not None and run.written.sizes is not None:
        sizes = zip(("file before", "file after"), map(in_units, run.written.sizes), strict=True)
        cards |= dict(sizes)
    return cards


def _verified(written: Written | None) -> Iterator[str]:
    """What the verification found."""
    if written is None:
        yield "<p class='note'>This shows what <code>optimize</code> would do. No model was written.</p>"
    elif (found := written.compared) is None:
        told = "Not verified: the command had no `--verify`, which compares every output."
        yield f"<p class='note'>{worded(told)}</p>"
    else:
        largest = max((output.largest or 0.0 for output in found.outputs), default=0.0)
        yield (
            f"<p class='note'><strong>Verified in ONNX Runtime:</strong> {escape(found.outcome)}; the largest "
            f"difference is {largest:.2g}; {escape(found.given)}.</p>"
        )
        _, *doubts, _ = found._lines
        yield from (
            f"<p class='note'>{escape(f'{doubt[0].upper()}{doubt[1:]}')}.</p>" for doubt in doubts
        )
        header, *rows = found._rows
        yield from _folded("Differences by output", header, rows)


def _verdict(report: Report) -> str:
    """What became of the attentions. A softmax that is not attention is none of them."""
    already = report.count("already_fused")
    total = report.attentions - already - report.count("linear_attention")
    if not total and not already:
        what = "attention with a softmax" if report.count("linear_attention") else "attention"
        return f"There is no {what} in this model."
    sentences = [_outcome(report.fused_attentions, total)] if total else []
    if already:
        what = "more" if total else _plural(already, "attention")
        sentences.append(f"{already} {what} {_plural(already, 'was', 'were')} already fused.")
    return " ".join(sentences)


def _outcome(fused: int, total: int) -> str:
    if total == 1:
        return f"The one attention is {'' if fused else 'not '}fused."
    if not fused:
        return f"None of the {total} attentions is fused."
    if fused == total:
        return "Both attentions are fused." if total == 2 else f"All {total} attentions are fused."
    return f"{fused} of {total} attentions {_plural(fused, 'is', 'are')} fused."


def _memory(report: Report, scores: Scores) -> Iterator[str]:
    fixed = [
        f"{size:,} {_plural(size, what)}"
        for size, what in ((scores.rows, "row"), (scores.keys, "key"))
        if size
    ]
    of = ", ".join((f"{scores.heads} {_plural(scores.heads, 'head')}", *fixed, "one sequence"))
    size = "This" if scores.is_open else in_units(scores.count_bytes(0))
    yield "<h3>Memory that is not needed any more</h3>"
    yield (
        f"<p>{size} is the size of the scores and the probabilities of one attention with {of}, in float32. The model "
        "holds all of them at once. The fused operator holds a small part of them at a time.</p>"
    )
    if held := still_held(report):
        yield f"<p>{held[0].upper()}{held[1:]}, so the model may need no less memory than it did.</p>"
    if not scores.is_open:
        if added := added_by_mask(report, 0):
            taken = (
                f"A mask takes {in_units(added)} more, because the operator takes it in full only"
            )
            yield f"<p>{taken}: {in_all(scores.count_bytes(0), added)} in all.</p>"
        return
    rows = [
        (length, scores.count_bytes(length), added_by_mask(report, length)) for length in LENGTHS
    ]
    columns = ["keys" if scores.rows else "tokens", "scores and probabilities"]
    if any(added for _, _, added in rows):
        yield "<p>The operator takes the mask in full only. This needs memory that the model does not need.</p>"
        columns += ["added by the mask", "in all"]
    yield f"<table><thead><tr>{''.join(f'<th scope=col>{column}</th>' for column in columns)}</tr></thead><tbody>"
    for length, saved, added in rows:
        cells = (f"{length:,}", in_units(saved), in_units(added), in_all(saved, added))
        yield f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells[: len(columns)])}</tr>"
    yield "</tbody></table>"


def _operators(original: onnx.ModelProto, result: onnx.ModelProto) -> Iterator[str]:
    """The number of nodes of each operator before and after, folded away."""
    before, after = (
        Counter(node.op_type for node in all_nodes(model.graph.node))
        for model in (original, result)
    )
    rows = [(name, f"{before[name]:,}", f"{after[name]:,}") for name in sorted({*before, *after})]
    yield from _folded("Nodes by operator", ("operator", "before", "after"), rows)


def _folded(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """A table that is folded away."""
    yield f"<details class='more'><summary>{title}</summary><table><thead><tr>"
    yield from (f"<th scope='col'>{column}</th>" for column in header)
    yield "</tr></thead><tbody>"
    for row in rows:
        yield f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
    yield "</tbody></table></details>"


def _left(report: Report) -> Iterator[str]:
    """What was not fused: for each reason its blocks, and what the user can do."""
    reasons: dict[tuple[str, str, str], list[Block]] = {}
    for block in report.blocks:
        if block.status == "declined" and block.code is not None:
            key = block.code.value, block.reason or block.code.meaning, block.hint or ""
            reasons.setdefault(key, []).append(block)
    if not reasons:
        return
    yield "<section aria-labelledby='left'><h2 id='left'>What was not fused</h2><ul>"
    for (code, reason, hint), blocks in reasons.items():
        where = first_of([escape(block.culprit or block.anchor) for block in blocks])
        advice = f"<br><strong>Try:</strong> {unbroken(hint)}" if hint else ""
        yield f"<li><code>{escape(code)}</code>: {unbroken(reason)} <small>({where})</small>{advice}</li>"
    yield "</ul></section>"


def _missed(report: Report) -> Iterator[str]:
    """What fused blocks miss, and what the user can do. Blocks in which only names differ share a
    line."""
    found: dict[tuple[object, ...], dict[int, Missed]] = {}
    for block in report.blocks:
        for missed in block.missed:
            found.setdefault(missed.kind, {})[block.id] = missed
    if not found:
        return
    yield "<section aria-labelledby='missed'><h2 id='missed'>What was fused and could be better</h2><ul>"
    for alike in found.values():
        blocks = f"{_plural(len(alike), 'block')} {ranges(list(alike))}"
        yield f"<li>{_better(next(iter(alike.values())))} <small>({blocks})</small></li>"
    yield "</ul></section>"


def _remarks(report: Report) -> Iterator[str]:
    """What the command prints below its table, too: the operators around attention, caches, and
    notes."""
    lines = [*report.around_lines, *report.cache_lines, *report.notes]
    if lines:
        yield "<section aria-labelledby='remarks'><h2 id='remarks'>What else to know</h2><ul>"
        yield from (f"<li>{unbroken(line)}</li>" for line in lines)
        yield "</ul></section>"


def _better(missed: Missed) -> str:
    """What could be better, why it is not, and what the user can do."""
    where = f" (<code>{escape(missed.culprit)}</code>)" if missed.culprit else ""
    advice = f" <strong>Try:</strong> {unbroken(missed.hint)}." if missed.hint else ""
    reason = f"{unbroken(missed.code.meaning)}. Here {unbroken(missed.reason)}{where}."
    return f"<strong>{escape(missed.word)}:</strong> {reason}{advice}"


def _how_to_run(run: Run, drawn: Drawn) -> Iterator[str]:
    """How the written file is run and measured, or how it is written."""
    report, fused = drawn.report, drawn.report.count("fused")
    if not fused and run.written is None:
        return
    title = "How to run the result" if run.written is not None else "How to write the result"
    yield f"<section aria-labelledby='run'><h2 id='run'>{title}</h2>"
    if run.written is None:
        command = [
            "fa-compiler",
            "optimize",
            str(run.model),
            "-o",
            "fused.onnx",
            *run.options,
            "--verify",
        ]
        yield from _code(shell.command(command))
        if report.possible_buffers:
            yield f"<p>{worded(COPIED)}</p>"
    else:
        yield from _ways(run.written)
    if fused and report.target == "ort":
        yield "<h3>Measure it on this machine</h3>"
        decoding = ["--decode"] if takes_steps(drawn.original, caches_of(drawn.original)) else []
        command = [
            "fa-compiler",
            "bench",
            str(run.model),
            *decoding,
            *run.options,
            "--html",
            str(run.gain),
        ]
        yield from _code(shell.command(command))
        link = link_to(run.gain.name)
        yield f"<p>This command writes {link} beside this page.</p>"
    yield "</section>"


def _ways(written: Written) -> Iterator[str]:
    """The ways to run a file."""
    name = f"<code>{escape(str(written.output))}</code>"
    if written.how is None:
        yield f"<p>{name} is run as the original.</p>"
        return
    yield f"<p>{name}: {worded(written.how.needs)}</p>"
    for way in written.how.ways:
        yield f"<h3>{escape(way.name)}</h3>"
        yield from _code(*way.lines)


def _code(*lines: str) -> Iterator[str]:
    yield f"<pre><code>{unbroken(chr(10).join(lines))}</code></pre>"


def _controls(kinds: Sequence[Kind]) -> Iterator[str]:
    if not kinds:
        return
    yield "<section aria-labelledby='blocks'><h2 id='blocks'>Blocks</h2><form role='search' id='filter'>"
    yield "<label>Search <input type='search' id='words' placeholder='name, operator, reason'></label>"
    yield "<label>Status <select id='status'><option value=''>all</option>"
    present = dict.fromkeys(kind.first.status for kind in kinds)
    yield from (f"<option value='{status}'>{STATUS[status]}</option>" for status in present)
    yield "</select></label>"
    codes = dict.fromkeys(kind.first.code.value for kind in kinds if kind.first.code is not None)
    if codes:
        yield "<label>Code <select id='code'><option value=''>all</option>"
        yield from (f"<option>{escape(code)}</option>" for code in codes)
        yield "</select></label>"
    yield "</form>"
    classes = set[str]().union(*(kind.classes for kind in kinds))
    yield "<p class='legend'>"
    yield from (
        f"<span class='role-{role}'>{role}</span>" for role in ROLES if f"role-{role}" in classes
    )
    if "culprit" in classes:
        yield "<span class='culprit'>what stands in the way</span>"
    yield "</p>"
    yield "<p id='none' hidden>No block fits.</p></section>"


# -- one kind of block
# --------------------------------------------------------------------------------


def _section(number: int, kind: Kind) -> Iterator[str]:
    block, count = kind.first, len(kind.blocks)
    code = "" if block.code is None else block.code.value
    names = " ".join(block.anchor for block in kind.blocks)
    yield (
        f"<details class='kind' data-status='{block.status}' data-code='{escape(code)}' "
        f"data-words='{escape(names.lower())}'{' open' if number < 2 else ''}>"
    )
    yield f"<summary>{_title(block, code, count)}</summary>"
    yield from _advice(block)
    yield f"<details class='names'><summary>{count} {_plural(count, 'block')}</summary><ul>"
    yield from (
        f"<li>{block.id}: <code>{escape(block.anchor)}</code></li>" for block in kind.blocks
    )
    yield "</ul></details><div class='pair'>"
    for drawing in kind.drawings:
        yield from _figure(drawing)
    yield "</div></details>"


def _title(block: Block, code: str, count: int) -> str:
    """The line of a kind of block: the number of blocks, and the fused operator, or the softmax
    that is not fused."""
    chip = f"<span class='chip {block.status}'>{STATUS[block.status]}</span>"
    times = f"<span class='times'>{count} ×</span> " if count > 1 else ""
    title, where = block.anchor, ""
    if block.status == "fused":
        title, where = block.what, f" <small>{escape(shortened(block.anchor, 48))}</small>"
    title = f"{code}: {title}" if code and block.status == "declined" else title
    return f"{chip} {times}{escape(title)}{where}"


def _advice(block: Block) -> Iterator[str]:
    """Why a block was not fused, what it misses, and what the user can do."""
    if block.status != "fused":
        meaning = block.code.meaning if block.code else ""
        yield f"<p>{unbroken(block.reason or meaning)}</p>"
    if block.hint:
        yield f"<p><strong>Try:</strong> {unbroken(block.hint)}</p>"
    for missed in block.missed:
        yield f"<p>Could be better: {_better(missed)}</p>"


def _figure(drawing: Drawing) -> Iterator[str]:
    name = f"{drawing.title}: {drawing.nodes} {_plural(drawing.nodes, 'node')}"
    cut = " (more nodes belong to it than are drawn)" if drawing.cut else ""
    yield f"<figure><figcaption>{name}{cut}<small class='part' hidden>{PART}</small></figcaption>"
    yield "<div class='tools'><button type='button' data-zoom='1.25' aria-label='larger'>+</button>"
    yield "<button type='button' data-zoom='0.8' aria-label='smaller'>−</button>"
    yield "<button type='button' data-zoom='0'>fit</button></div>"
    yield f"<div class='view' tabindex='0' role='group' aria-label='{escape(name)}, movable with the arrow keys'>"
    yield svg(drawing.boxes, drawing.arrows, name, style="")
    yield "</div></figure>"


def _plural(count: int, one: str, many: str | None = None) -> str:
    return one if count == 1 else many or f"{one}s"
