"""The page that `bench --html` writes: how fast both models are and how much memory they take, as bars and as a table.

The bars of one length stand beneath each other, the original's above the fused model's. Their scale begins at 0. A thin
line over the end of a bar shows where eight of ten runs lie. The page needs no network and no script.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape

from fa_compiler.measuring.figures import Benchmark, Measure, Timing
from fa_compiler.page.page import style

MIB = 1 << 20
BAR, GAP, LEFT, WIDTH, ROOM = 18, 16, 140, 330, 130
"""Pixels: the height of a bar, the space between lengths, the space for labels, the longest bar, the space after it."""
OWN_STYLE = """
.plot { max-width: 100%; height: auto; font: 14px system-ui, sans-serif } .wide { overflow-x: auto }
.plot text { fill: var(--ink) } .plot .faint { fill: var(--faint) }
.plot .original { fill: var(--other) } .plot .fused { fill: var(--good) } .plot .spread { stroke: var(--ink) }
"""


def gain_page(measured: Benchmark) -> str:
    """The page of a benchmark, as HTML."""
    return "\n".join(_lines(measured))


def _lines(measured: Benchmark) -> Iterator[str]:
    name = escape(str(measured.report.model))
    ran, unit = measured.measured, "cached keys" if measured.decode else "tokens"
    yield "<!doctype html>"
    yield '<html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{name}: measured</title><style>{style()}{OWN_STYLE}</style></head><body>"
    yield f"<header><h1>{name}</h1></header><main>"
    yield f'<p class="verdict">{escape(_verdict(ran, unit))}</p>'
    if ran:
        what = "Time of a step of one token" if measured.decode else "Time of a run"
        yield f"<h2>{what}, ms</h2>"
        yield from _plot(ran, unit, what, lambda timing: timing.median, lambda timing: (timing.low, timing.high))
        yield "<h2>Peak memory, MiB</h2>"
        yield from _plot(ran, unit, "Peak memory", lambda timing: timing.memory / MIB, None)
        yield from _table(ran, unit)
    for fault in measured.faults:
        yield f"<p>{escape(fault)}</p>"
    threads = f"{measured.threads} thread{'s' if measured.threads > 1 else ''}"
    yield (
        f"<p>{measured.report.count('fused')} of {measured.report.softmaxes} attentions are fused. ONNX Runtime "
        f"{escape(measured.runtime)} with all its optimisations, batch {measured.batch}, {threads}. Medians of runs in "
        "turns; eight of ten runs lie within the thin line. Memory is the peak of a process that runs the model.</p>"
    )
    yield "</main></body></html>"


def _verdict(ran: Sequence[Measure], unit: str) -> str:
    if not ran:
        return "No length could be measured."
    best = max(ran, key=lambda measure: measure.ratio or 0.0)
    return f"{best.ratio:.2f} times as fast at {best.length:,} {unit}"


def _plot(
    ran: Sequence[Measure],
    unit: str,
    title: str,
    size: Callable[[Timing], float],
    spread: Callable[[Timing], tuple[float, float]] | None,
) -> Iterator[str]:
    """Two bars for each length."""
    ends = [size(timing) if spread is None else spread(timing)[1] for measure in ran for timing in _both(measure)]
    scale = WIDTH / max(*ends, 1e-9)
    height = len(ran) * (2 * BAR + GAP)
    told = "; ".join(f"{measure.length} {unit}: {_pair(measure, size)}" for measure in ran)
    yield f'<svg class="plot" role="img" viewBox="0 0 {LEFT + WIDTH + ROOM} {height}" width="{LEFT + WIDTH + ROOM}">'
    yield f"<title>{escape(title)}. {escape(told)}</title>"
    for place, measure in enumerate(ran):
        top = place * (2 * BAR + GAP)
        yield f'<text x="{LEFT - 8}" y="{top + BAR + 4}" text-anchor="end">{measure.length:,} {unit}</text>'
        for index, (kind, timing) in enumerate(zip(("original", "fused"), _both(measure), strict=True)):
            y, end = top + index * BAR, size(timing) * scale
            yield f'<rect class="{kind}" x="{LEFT}" y="{y + 1}" width="{end:.1f}" height="{BAR - 2}"/>'
            right = end
            if spread is not None:
                low, high = (number * scale for number in spread(timing))
                middle, right = y + BAR / 2, max(end, high)
                yield (
                    f'<line class="spread" x1="{LEFT + low:.1f}" x2="{LEFT + high:.1f}" y1="{middle}" y2="{middle}"/>'
                )
            label = f"{_number(size(timing))} {kind}"
            yield f'<text class="faint" x="{LEFT + right + 6:.1f}" y="{y + BAR - 4}">{label}</text>'
    yield "</svg>"


def _table(ran: Sequence[Measure], unit: str) -> Iterator[str]:
    yield '<h2>Figures</h2><div class="wide"><table><thead>'
    yield f"<tr><th scope=col>{unit}<th scope=col>original, ms<th scope=col>fused, ms"
    yield "<th scope=col>faster<th scope=col>original, MiB<th scope=col>fused, MiB</tr></thead><tbody>"
    for measure in ran:
        original, fused = _both(measure)
        cells = [
            f"{_number(timing.median)} ({_number(timing.low)}-{_number(timing.high)})" for timing in (original, fused)
        ]
        cells += [f"{measure.ratio:.2f} x", *(f"{timing.memory / MIB:,.0f}" for timing in (original, fused))]
        yield f"<tr><th scope=row>{measure.length:,}" + "".join(f"<td>{cell}" for cell in cells)
    yield "</tbody></table></div>"


def _both(measure: Measure) -> tuple[Timing, Timing]:
    assert measure.original is not None and measure.fused is not None
    return measure.original, measure.fused


def _pair(measure: Measure, size: Callable[[Timing], float]) -> str:
    original, fused = (_number(size(timing)) for timing in _both(measure))
    return f"{original} original, {fused} fused"


def _number(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"
