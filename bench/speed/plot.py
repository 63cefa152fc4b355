"""Plots the results as an SVG: a bar for each peer and case, as a share of the limit, and a mark for our aim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

from bench.speed.tables import percent

OURS = "#0b6e4f"
PALETTE = ("#9aa5b1", "#7c9cbf", "#b39ddb", "#d4a373", "#e5989b", "#90a955", "#c9ada7", "#84a9ac", "#bdb76b", "#a3a3c2")
BAR, GAP, LABEL, SCALE, TOP = 7, 9, 170, 6, 64
"""In pixels: height of a bar, space between cases, width of the names, width of one percent, height of the legend."""

LAST = 115
"""The percentage at the right edge of the picture."""


def svg(results: Sequence[dict[str, Any]], title: str) -> str:
    """The picture of the results for one number of threads."""
    names = list(dict.fromkeys(name for result in results for name in result["peers"]))
    names.sort(key=lambda name: name != "ours")
    colours = {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(n for n in names if n != "ours")}
    colours["ours"] = OURS
    body, y = [], TOP
    for result in results:
        shown = [name for name in names if name in result["peers"]]
        body.append(_text(LABEL - 8, y + len(shown) * BAR / 2 + 4, result["case"]["name"], "end"))
        for index, name in enumerate(shown):
            body.append(_bar(result, name, y + index * BAR, colours[name]))
        if result["aim"] is not None and "ours" in shown:
            x = LABEL + SCALE * result["aim"]
            body.append(f'<path d="M{x} {y - 2}v{BAR + 3}" stroke="black" stroke-width="2"/>')
        y += len(shown) * BAR + GAP
    height, width = y + 24, LABEL + SCALE * LAST + 60
    frame = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LABEL}" y="18" font-size="14">{escape(title)}</text>',
        *(f'<path d="M{LABEL + SCALE * x} {TOP - 8}V{y}" stroke="#dddddd"/>' for x in range(0, 100, 20)),
        *(_text(LABEL + SCALE * x, y + 14, f"{x} %", "middle") for x in range(0, 101, 20)),
        *_legend(names, colours),
    ]
    limit = LABEL + SCALE * 100
    line = f'<path d="M{limit} {TOP - 8}V{y}" stroke="#c1121f" stroke-width="1.5"/>'
    return "\n".join([*frame, *body, line, _text(limit + 4, TOP - 10, "limit", "start"), "</svg>\n"])


def _bar(result: dict[str, Any], name: str, y: float, colour: str) -> str:
    """The bar of a peer; that of a wrong result is only an outline."""
    share, right = percent(result, name), result["peers"][name]["right"]
    length = SCALE * min(share, LAST)
    fill = colour if right else "none"
    label = f"{result['case']['name']}: {name} {result['peers'][name]['median_ms']:.3g} ms, {share:.0f} %"
    return (
        f'<rect x="{LABEL}" y="{y}" width="{length:.1f}" height="{BAR - 1}" fill="{fill}" stroke="{colour}" '
        f'stroke-width="0.5"><title>{escape(label if right else label + ", wrong")}</title></rect>'
    )


def _legend(names: Sequence[str], colours: dict[str, str]) -> list[str]:
    parts, x = [], LABEL
    for name in names:
        parts.append(f'<rect x="{x}" y="30" width="9" height="9" fill="{colours[name]}"/>')
        parts.append(_text(x + 12, 39, name, "start"))
        x += 22 + 7 * len(name)
    return parts


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'
