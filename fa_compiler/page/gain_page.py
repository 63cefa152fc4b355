"""The page that `bench --html` writes: how fast both models are and how much memory they take, as
bars and as a table; for a decoder also whether both make the same.

The bars of one length stand beneath each other, the original's above the fused model's. The longer
one has the same width at each length: short sequences take a hundredth of the time of long ones,
and have bars, too. A thin line over the end of a bar shows where eight of ten runs lie. The page
needs no network.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path

from fa_compiler.measuring.figures import MIB, Benchmark, Measure, Timing
from fa_compiler.page.page import document, title_of
from fa_compiler.page.provenance import Provenance, page_beside
from fa_compiler.page.wording import link_to

LONGEST = 85
"""The longer bar of each length, in percent of the width. The rest is for the line over its end."""
OWN_STYLE = """
main { max-width: 900px }
.plot { margin: 0 0 1.2rem } .plot p { margin: .7rem 0 .1rem; font-weight: 600 }
.row { display: grid; grid-template-columns: 4.5rem 1fr 5.5rem; gap: .6rem; align-items: center; line-height: 1.35 }
.row .number { text-align: right; font-variant-numeric: tabular-nums } .row .model { color: var(--faint) }
.track { position: relative; height: 1.05rem } .bar { position: absolute; inset: 1px auto 1px 0; border-radius: 2px }
.bar.original { background: var(--other) } .bar.fused { background: var(--good) }
.spread { position: absolute; top: 50%; height: 1px; background: var(--ink) }
.wide { overflow-x: auto; background:
  linear-gradient(to right, var(--paper) 30%, transparent) left / 40px 100% no-repeat local,
  linear-gradient(to left, var(--paper) 30%, transparent) right / 40px 100% no-repeat local,
  linear-gradient(to right, var(--line), transparent) left / 12px 100% no-repeat scroll,
  linear-gradient(to left, var(--line), transparent) right / 12px 100% no-repeat scroll }
.wide { margin-bottom: .8rem } .wide small { display: block; color: var(--faint); white-space: nowrap }
.wide td, .wide th { vertical-align: top } .wide td { white-space: nowrap }
@media print { .wide { overflow: visible; background: none }
  .wide th, .wide td { padding: .2rem .3rem; font-size: .8rem } .bar, .spread { print-color-adjust: exact } }
@media (max-width: 600px) { .wide th, .wide td { padding: .2rem .25rem; font-size: .8rem } .row { gap: .4rem } }
"""


def gain_page(
    measured: Benchmark, made: Provenance | None = None, place: Path | None = None
) -> str:
    """The page of a benchmark, as HTML.

    Args:
        measured: the benchmark.
        made: the command and the machine that measured; the page tells of them.
        place: where the page is written. The page with the drawings is linked if it lies beside it.
    """
    return document(
        f"Speed and memory of {measured.report.model}",
        list(_lines(measured, made, place)),
        own_style=OWN_STYLE,
    )


def _lines(measured: Benchmark, made: Provenance | None, place: Path | None) -> Iterator[str]:
    ran, at = measured.measured, measured.at
    yield f'<p class="verdict">{escape(_verdict(ran, at))}</p>'
    fused = (
        f"{measured.report.fused_attentions} of {measured.report.attentions} attentions are fused"
    )
    yield f'<p class="note">{fused}{_link(measured, place)}.</p>'
    yield from (f"<p>{_sentence(warning)}</p>" for warning in measured.warnings)
    if ran:
        yield f"<h2>{'Time of a step of one token' if measured.decode else 'Time of a run'}</h2>"
        yield from _plot(
            ran, at, "ms", lambda timing: timing.median, lambda timing: (timing.low, timing.high)
        )
        yield "<h2>Peak memory</h2>"
        yield from _plot(ran, at, "MiB", lambda timing: timing.memory / MIB, None)
        yield from _table(measured._rows)
        yield from _agreement(measured)
    yield from (
        f"<p>{_sentence(line)}</p>"
        for line in (*measured.faults, *measured.sizes, *measured.advice)
    )
    threads = f"{measured.threads} thread{'s' if measured.threads > 1 else ''}"
    yield (
        f'<p class="note">ONNX Runtime {escape(measured.runtime)} with all its optimisations, '
        f"{measured.batch_in_words}, {threads}. Both models run in turns. A bar shows the median. Eight of ten runs "
        "lie within the thin line; a line that is too long is cut off at the right. Each length has a scale of its "
        "own. Memory is the peak of a process that runs the model.</p>"
    )
    if made is not None:
        yield from made.section()


def _link(measured: Benchmark, place: Path | None) -> str:
    """A link to the page of the same model beside this one."""
    if place is None:
        return ""
    page, title = page_beside(place), f"<title>{escape(title_of(measured.report))}</title>"
    if (
        page == place
        or not page.is_file()
        or title not in page.read_text(encoding="utf-8", errors="replace")
    ):
        return ""
    return f"; {link_to(page.name)} shows them"


def _verdict(ran: Sequence[Measure], at: Callable[[int], str]) -> str:
    """The best length, of those that were measured while the machine did no other work if there are
    such lengths."""
    if not ran:
        return "No length could be measured."
    steady = [measure for measure in ran if measure.is_steady]
    best = max(steady or ran, key=lambda measure: measure.ratio or 0.0)
    return f"{best.ratio:.2f} times as fast at {at(best.length)}"


def _plot(
    ran: Sequence[Measure],
    at: Callable[[int], str],
    of_size: str,
    size: Callable[[Timing], float],
    spread: Callable[[Timing], tuple[float, float]] | None,
) -> Iterator[str]:
    """Two bars for each length."""
    yield '<div class="plot">'
    for measure in ran:
        yield f"<p>{at(measure.length)}</p>"
        percent = LONGEST / max(*map(size, measure.sides), 1e-9)
        for kind, timing in zip(("original", "fused"), measure.sides, strict=True):
            bar = f'<span class="bar {kind}" style="width:{size(timing) * percent:.2f}%"></span>'
            if spread is not None:
                low, high = (min(100.0, number * percent) for number in spread(timing))
                bar += (
                    f'<span class="spread" style="left:{low:.2f}%;width:{high - low:.2f}%"></span>'
                )
            number = f"{_number(size(timing))} {of_size}"
            yield (
                f'<div class="row"><span class="model">{kind}</span><span class="track">{bar}</span>'
                f'<span class="number">{number}</span></div>'
            )
    yield "</div>"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The table that the command prints. What stands in brackets there stands below its number
    here."""
    yield '<h2>Figures</h2><div class="wide" tabindex="0" role="group" aria-label="Figures"><table><thead><tr>'
    header, *rest = rows
    yield from (f"<th scope='col'>{column}</th>" for column in header)
    yield "</tr></thead><tbody>"
    for length, *cells in rest:
        told = (re.sub(r" \((.*)\)", r" <small>\1</small>", cell) for cell in cells)
        row = f"{int(length):,}" if length.isdecimal() else length
        yield f"<tr><th scope='row'>{row}</th>{''.join(f'<td>{cell}</td>' for cell in told)}</tr>"
    yield "</tbody></table></div>"


def _agreement(measured: Benchmark) -> Iterator[str]:
    """Whether a decoder and its fused form made the same."""
    lines = [line for measure in measured.measured for line in measure.agreement]
    if lines:
        yield "<h2>Are the results the same?</h2><ul>"
        yield from (f"<li>{_sentence(line)}</li>" for line in lines)
        yield "</ul>"


def _sentence(text: str) -> str:
    """A line of the command as a sentence of the page."""
    return escape(f"{text[0].upper()}{text[1:]}{'' if text.endswith('.') else '.'}")


def _number(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"
