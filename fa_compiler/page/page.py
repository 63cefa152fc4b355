"""Writes the page: a summary, what was not fused and what to do about it, and each kind of block as a drawing.

Blocks of one kind have the same outcome and the same drawing but for names. The page holds its styles, its script and
its drawings, and asks no network for anything.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources

import onnx
import onnx_ir as ir

from fa_compiler.lowering.drawing import Arrow, Box, sheet, shortened, svg
from fa_compiler.lowering.onnx_file import to_graph_operators
from fa_compiler.model_files.foreign_types import without_types
from fa_compiler.model_files.reading import LoadedModel
from fa_compiler.op_registry import DOMAIN
from fa_compiler.page.gain import Scores, in_units, largest_scores, nodes_of
from fa_compiler.page.regions import Region, Regions, data_inputs, shape_texts
from fa_compiler.passes import Block, Report
from fa_compiler.protos.subgraphs import all_nodes

LENGTHS = (512, 2048, 8192, 32768)
"""The sequence lengths for which the page says how large the scores are."""
ROLES = ("query", "key", "value", "mask", "bias")
STATUS = {
    "fused": "fused",
    "already_fused": "fused already",
    "declined": "not fused",
    "not_attention": "not attention",
    "linear_attention": "no softmax",
}


@dataclass(frozen=True)
class Kind:
    """Blocks that are alike, and the regions of the first one."""

    blocks: tuple[Block, ...]
    before: Region
    after: Region

    @property
    def first(self) -> Block:
        """The block that stands for all."""
        return self.blocks[0]

    @property
    def sides(self) -> tuple[tuple[str, Region], ...]:
        """What is drawn, with its title."""
        return ("before", self.before), ("after", self.after)


def page(report: Report, loaded: LoadedModel, result: onnx.ModelProto | None) -> str:
    """The page of a run.

    Args:
        report: what became of each block.
        loaded: the model before.
        result: the model after, as `pipeline.run` returns it; None if it was not changed.
    """
    result, kinds, shapes = _drawn(report, loaded, result)
    body = [
        *_summary(report, loaded.proto, result),
        *_left(report),
        *_missed(report),
        *_controls(kinds),
        *(line for number, kind in enumerate(kinds) for line in _section(number, kind, shapes)),
    ]
    title = f"Attention in {report.model}"
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{style()}</style></head><body>",
            f'<header><h1>{escape(title)}</h1><button id="theme" type="button">dark or light</button></header><main>',
            *body,
            f"</main><script>{_file('page.js')}</script></body></html>",
            "",
        ]
    )


def drawings(report: Report, loaded: LoadedModel, result: onnx.ModelProto | None) -> str:
    """The drawings of the page alone, as one SVG: each kind of block before and after. The arguments are those of
    `page`."""
    _, kinds, shapes = _drawn(report, loaded, result)
    sides = [(kind.first, title, region) for kind in kinds for title, region in kind.sides if region.nodes]
    return sheet([(f"{block.anchor}, {title}", *_drawing(region, block, shapes)) for block, title, region in sides])


def _drawn(
    report: Report, loaded: LoadedModel, result: onnx.ModelProto | None
) -> tuple[onnx.ModelProto | None, list[Kind], dict[str, str]]:
    """The result with the operators of the graph, the kinds of blocks, and the shapes of values as text."""
    result = None if result is None else to_graph_operators(result)
    kinds = _kinds(report, Regions.of(loaded.proto, result))
    shapes = shape_texts(loaded.to_ir())
    if result is not None:
        shapes |= shape_texts(ir.from_proto(without_types(result, loaded.foreign) if loaded.foreign else result))
    return result, kinds, shapes


def style() -> str:
    """The style sheet that all pages share."""
    return _file("page.css")


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text()


def _kinds(report: Report, regions: Regions) -> list[Kind]:
    """The blocks by kind, in the order of the first of each."""
    found: dict[tuple[object, ...], list[tuple[Block, Region, Region]]] = {}
    for block in report.blocks:
        before, after = regions.around(block)
        reason = re.sub(r"'[^']*'", "", block.reason or "")
        outcome = (block.status, block.kind, block.op, block.layout, block.mask, block.heads, block.extensions)
        missed = tuple(entry.kind for entry in block.missed)
        key = (*outcome, block.assumed, block.code, reason, block.hint, missed, _form(before), _form(after))
        found.setdefault(key, []).append((block, before, after))
    return [Kind(tuple(each[0] for each in alike), *alike[0][1:]) for alike in found.values()]


def _form(region: Region) -> tuple[int, ...]:
    """Numbers that are equal for regions that differ in names and in the order of their nodes alone."""
    form: dict[str, int] = {}
    numbers = []
    for node in region.nodes:
        numbers.append(hash((node.op_type, tuple(form.get(name, 0) for name in node.input))))
        form.update({name: hash((numbers[-1], place)) for place, name in enumerate(node.output) if name})
    return tuple(sorted(numbers))


# -- the summary --------------------------------------------------------------------------------------


def _summary(report: Report, original: onnx.ModelProto, result: onnx.ModelProto | None) -> Iterator[str]:
    fused, total, declined = report.count("fused"), report.softmaxes, report.count("declined")
    yield "<section aria-labelledby='summary'><h2 id='summary'>Summary</h2>"
    if not total:
        what = "attention with a softmax" if report.blocks else "attention"
        yield f"<p class='verdict'>There is no {what} in this model.</p></section>"
        return
    already = report.count("already_fused")
    yield f"<p class='verdict'>{_verdict(fused, total - already, already)}</p>"
    before = nodes_of(original)
    after = before if result is None else nodes_of(result)
    cards = {
        "fused": str(fused),
        **({"fused already": str(already)} if already else {}),
        "not fused": str(declined),
        "not attention": str(report.count("not_attention")),
        "nodes before": f"{before:,}",
        "nodes after": f"{after:,}",
    }
    yield "<dl class='cards'>"
    yield from (f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in cards.items())
    yield "</dl>"
    if (scores := largest_scores(report)) is not None:
        yield from _memory(scores)
    if result is not None:
        yield from _operators(original, result)
    yield "</section>"


def _verdict(fused: int, total: int, already: int) -> str:
    """What became of `total` attentions, and of the others that `already` were fused."""
    if not already:
        return _outcome(fused, total)
    before = f"{_plural(already, 'was', 'were')} fused already."
    if not total:
        return f"{already} {_plural(already, 'attention')} {before}"
    return f"{_outcome(fused, total)} {already} more {before}"


def _outcome(fused: int, total: int) -> str:
    if total == 1:
        return f"The one attention is {'' if fused else 'not '}fused."
    if fused in (0, total):
        return f"None of the {total} attentions is fused." if not fused else f"All {total} attentions are fused."
    return f"{fused} of {total} attentions {_plural(fused, 'is', 'are')} fused."


def _memory(scores: Scores) -> Iterator[str]:
    fixed = [f"{size:,} {_plural(size, what)}" for size, what in ((scores.rows, "row"), (scores.keys, "key")) if size]
    of = ", ".join((f"{scores.heads} {_plural(scores.heads, 'head')}", *fixed, "one sequence"))
    yield "<h3>Memory that is not needed any more</h3>"
    yield (
        f"<p>The scores and the probabilities of one attention with {of} and float32 numbers. The fused operator holds "
        "a tile of them at a time.</p>"
    )
    if not scores.is_open:
        yield f"<p>{in_units(scores.count_bytes(0))}</p>"
        return
    yield "<table><thead><tr><th scope='col'>tokens</th><th scope='col'>scores and probabilities</th></tr></thead>"
    yield "<tbody>"
    for length in LENGTHS:
        size = in_units(scores.count_bytes(length))
        yield f"<tr><td>{length:,}</td><td>{size}</td></tr>"
    yield "</tbody></table>"


def _operators(original: onnx.ModelProto, result: onnx.ModelProto) -> Iterator[str]:
    """The number of nodes of each operator before and after, folded away."""
    before, after = (Counter(node.op_type for node in all_nodes(model.graph.node)) for model in (original, result))
    yield "<details><summary>Nodes by operator</summary><table><thead><tr>"
    yield from (f"<th scope='col'>{column}</th>" for column in ("operator", "before", "after"))
    yield "</tr></thead><tbody>"
    for name in sorted({*before, *after}):
        yield f"<tr><td>{escape(name)}</td><td>{before[name]:,}</td><td>{after[name]:,}</td></tr>"
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
        where = ", ".join(escape(block.culprit or block.anchor) for block in blocks[:3])
        more = f" and {len(blocks) - 3} more" if len(blocks) > 3 else ""
        advice = f"<br><strong>Try:</strong> {escape(hint)}" if hint else ""
        yield f"<li><code>{escape(code)}</code> {escape(reason)} <small>({where}{more})</small>{advice}</li>"
    yield "</ul></section>"


def _missed(report: Report) -> Iterator[str]:
    """What fused blocks miss, and what the user can do."""
    if report.missed:
        yield "<section aria-labelledby='missed'><h2 id='missed'>What was fused and could be better</h2><ul>"
        yield from (f"<li>{escape(line)}</li>" for line in report.missed)
        yield "</ul></section>"


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
    yield "<p class='legend'>"
    yield from (f"<span class='role-{role}'>{role}</span>" for role in ROLES)
    yield "<span class='culprit'>what stands in the way</span></p>"
    yield "<p id='none' hidden>No block fits.</p></section>"


# -- one kind of block --------------------------------------------------------------------------------


def _section(number: int, kind: Kind, shapes: Mapping[str, str]) -> Iterator[str]:
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
    yield from (f"<li>{block.id}: <code>{escape(block.anchor)}</code></li>" for block in kind.blocks)
    yield "</ul></details><div class='pair'>"
    for title, region in kind.sides:
        if region.nodes:
            yield from _figure(title, region, block, shapes)
    yield "</div></details>"


def _title(block: Block, code: str, count: int) -> str:
    """The line of a kind of block: the number of blocks, and the fused operator, or the softmax that is not fused."""
    chip = f"<span class='chip {block.status}'>{STATUS[block.status]}</span>"
    times = f"<span class='times'>{count} ×</span> " if count > 1 else ""
    title, where = block.anchor, ""
    if block.status == "fused":
        title, where = block.what, f" <small>{escape(shortened(block.anchor, 48))}</small>"
    title = f"{code}: {title}" if code else title
    return f"{chip} {times}{escape(title)}{where}"


def _advice(block: Block) -> Iterator[str]:
    """Why a block was not fused, what it misses, and what the user can do."""
    if block.status != "fused":
        meaning = block.code.meaning if block.code else ""
        yield f"<p>{escape(block.reason or meaning)}</p>"
    if block.hint:
        yield f"<p><strong>Try:</strong> {escape(block.hint)}</p>"
    for missed in block.missed:
        advice = f"<br><strong>Try:</strong> {escape(missed.hint)}" if missed.hint else ""
        yield f"<p><strong>Missed</strong> {escape(str(missed))}{advice}</p>"


def _figure(title: str, region: Region, block: Block, shapes: Mapping[str, str]) -> Iterator[str]:
    boxes, arrows = _drawing(region, block, shapes)
    count = len(region.nodes)
    name = f"{title}: {count} {_plural(count, 'node')}"
    cut = " (more nodes belong to it than are drawn)" if region.cut else ""
    yield f"<figure><figcaption>{title}: {count} {_plural(count, 'node')}{cut}</figcaption>"
    yield "<div class='tools'><button type='button' data-zoom='1.25' aria-label='larger'>+</button>"
    yield "<button type='button' data-zoom='0.8' aria-label='smaller'>−</button>"
    yield "<button type='button' data-zoom='0'>fit</button></div>"
    yield f"<div class='view' tabindex='0' role='group' aria-label='{escape(name)}, movable with the arrow keys'>"
    yield svg(boxes, arrows, name, style="")
    yield "</div></figure>"


def _drawing(region: Region, block: Block, shapes: Mapping[str, str]) -> tuple[list[Box], list[Arrow]]:
    """The boxes of the nodes and of the values that come from outside, and what flows between them."""
    boxes: list[Box] = []
    arrows: list[Arrow] = []
    maker: dict[str, str] = {}
    flows: dict[str, str] = dict(region.roles)
    for number, node in enumerate(region.nodes):
        key = f"n{number}"
        given = list(dict.fromkeys(data_inputs(node)))
        role = _role({flows[name] for name in given if name in flows})
        for name in given:
            if name not in maker and name in region.roles:
                maker[name] = source = f"v{len(boxes)}"
                kind = f"value role-{flows[name]}"
                boxes.append(Box(source, flows[name], name, f"{name} {shapes.get(name, '')}", kind))
            if name in maker:
                arrows.append(Arrow(maker[name], key, shapes.get(name, ""), f"role-{flows.get(name, 'other')}"))
        boxes.append(Box(key, node.op_type, node.name, _hint(node, shapes), _classes(node, role, block.culprit)))
        for name in filter(None, node.output):
            maker[name] = key
            if role:
                flows.setdefault(name, role)
    return boxes, arrows


def _role(reached: set[str]) -> str:
    """The role of a node: the only one of its inputs, or "other" for several; "" if they have none."""
    if len(reached) == 1:
        return reached.pop()
    return "other" if reached else ""


def _classes(node: onnx.NodeProto, role: str, culprit: str | None) -> str:
    """The style classes of a node's box."""
    kind = "fused" if node.domain == DOMAIN else f"role-{role or 'other'}"
    return f"{kind} culprit" if culprit and culprit in (node.name, *node.output) else kind


def _hint(node: onnx.NodeProto, shapes: Mapping[str, str]) -> str:
    lines = [f"{node.op_type} {node.name}".strip()]
    lines += [f"{attr.name} = {_value(attr)}" for attr in node.attribute]
    lines += [f"{kind} {name} {shapes.get(name, '')}" for kind, names in _values(node) for name in names if name]
    return "\n".join(lines)


def _values(node: onnx.NodeProto) -> tuple[tuple[str, Sequence[str]], ...]:
    return ("input", node.input), ("output", node.output)


def _value(attr: onnx.AttributeProto) -> str:
    if attr.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.TENSOR, onnx.AttributeProto.SPARSE_TENSOR):
        return str(onnx.AttributeProto.AttributeType.Name(attr.type)).lower()
    text = str(onnx.helper.get_attribute_value(attr))
    return text if len(text) < 80 else f"{text[:77]}..."


def _plural(count: int, one: str, many: str | None = None) -> str:
    return one if count == 1 else many or f"{one}s"
