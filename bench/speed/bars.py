"""Bars for each peer and case, as a share of the limit, and a mark for our aim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.speed.chart import Card, settings
from bench.speed.tables import percent

OURS = "#0b6e4f"
PALETTE = ("#9aa5b1", "#7c9cbf", "#b39ddb", "#d4a373", "#e5989b", "#90a955", "#c9ada7", "#84a9ac", "#bdb76b", "#a3a3c2")
"""The colours of the bars of other peers."""
BAR, GAP, LABEL, SCALE, HEAD = 7, 9, 170, 6, 64
"""In pixels: height of a bar, space between cases, width of the names, width of one percent, height of the legend."""

LAST = 115
"""The percentage at the right edge of the bars."""


def picture(results: Sequence[Mapping[str, Any]], title: str) -> str:
    """The picture of the results for one number of threads. The bar of a wrong result is an outline."""
    names = list(dict.fromkeys(name for result in results for name in result["peers"]))
    names.sort(key=lambda name: name != "ours")
    colours = {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(n for n in names if n != "ours")}
    colours["ours"] = OURS
    rows = [(result, [name for name in names if name in result["peers"]]) for result in results]
    high = sum(BAR * len(shown) + GAP for _, shown in rows)
    with settings():
        card = Card(LABEL + SCALE * LAST + 60, HEAD + high + 24)
        axes = card.axes(LABEL, HEAD, SCALE * LAST, high)
        axes.set(xlim=(0, LAST), ylim=(high, 0), yticks=[])
        axes.set_xticks(range(0, 101, 20), [f"{share} %" for share in range(0, 101, 20)])
        axes.spines[:].set_visible(False)
        axes.grid(axis="x", color="#dddddd")
        axes.tick_params(length=0, labelsize=11)
        axes.axvline(100, color="#c1121f", linewidth=1.5)
        axes.text(100.7, -8, "limit", fontsize=11)
        top = 0
        for result, shown in rows:
            axes.text(
                -8 / SCALE, top + len(shown) * BAR / 2, result["case"]["name"], ha="right", va="center", fontsize=11
            )
            for index, name in enumerate(shown):
                share, right = percent(result, name), result["peers"][name]["right"]
                note = f"{result['case']['name']}: {name} {result['peers'][name]['median_ms']:.3g} ms, {share:.0f} %"
                (bar,) = axes.barh(top + index * BAR, min(share, LAST), BAR - 1, align="edge", linewidth=0.5,
                                   color=colours[name] if right else "none", edgecolor=colours[name])  # fmt: skip
                bar.set_gid(card.noted(note if right else f"{note}, wrong"))
            if result["aim"] is not None and "ours" in shown:
                axes.plot([result["aim"]] * 2, [top - 2, top + BAR + 1], color="black", linewidth=2)
            top += len(shown) * BAR + GAP
        card.figure.text(LABEL / card.width, 1 - 18 / card.height, title, fontsize=14)
        handles = [axes.plot([], [], "s", color=colours[name], label=name)[0] for name in names]
        axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1 + 12 / high), ncols=len(names),
                    frameon=False, fontsize=11, handlelength=1, handletextpad=0.3, columnspacing=1, borderpad=0,
                    borderaxespad=0.5)  # fmt: skip
        return card.svg(title)
