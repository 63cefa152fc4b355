"""The plots of docs/speed.md: the roofline, time and memory by the number of keys, and how threads share a call."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bench.speed.cases import LENGTHS, LONG_ROWS, Case
from bench.speed.chart import COLOURS, Axis, Chart, picture
from bench.speed.tables import best_peer

Result = Mapping[str, Any]

GROUPS = {"row": "1 row, 8 heads on 2", "chunk": "512 rows, causal, 4 heads on 1", "rows": "8,192 rows, 1 head"}
"""The long cases by the beginning of their names."""

IDLE = 6.0
"""Where no number of threads is idle for more percent, a case has no line of its own."""

ROOFS = {"fma_flops": "float32", "bf16_flops": "bfloat16", "tile_flops": "bfloat16 in tiles"}
"""The rates that the roofline shows, and the words of their limits."""

_DECADES = {-2: "0.01", -1: "0.1", 0: "1", 1: "10", 2: "100", 3: "1,000", 4: "10k", 5: "100k"}


def _decades(name: str, low: int, high: int) -> Axis:
    """A logarithmic axis from 10^low to 10^high."""
    powers = range(low, high + 1)
    return Axis(name, 10.0**low, 10.0**high, [10.0**p for p in powers], [_DECADES[p] for p in powers])


def roofline(results: Sequence[Result], threads: int) -> str:
    """The cases by their work for each byte of operands and results, and by the rates of ours and of the best peer."""
    mine = [result for result in results if result["threads"] == threads]
    roofs = {key: 1e-9 * max((r["rates"].get(key, 0.0) for r in mine), default=0.0) for key in ROOFS}
    highest = max(roofs.values())
    chart = Chart(
        f"Rate by work, {threads} thread{'s' * (threads > 1)}; hollow: best peer",
        _decades("multiplications and additions for each byte", -1, 4),
        _decades("GFLOP/s", 1, max(3, math.ceil(math.log10(max(highest, 1.0))))),
    )
    read = max((1e-6 * Case(**r["case"]).cache_bytes / r["limit_ms"] for r in mine if "read" in r["limit_parts_ms"]),
               default=0.0)  # fmt: skip
    for key, best in roofs.items():
        if best:
            start = max(chart.x.low, best / read if read else 0.0)
            chart.line([(start, best), (chart.x.high, best)], "#555", dashes=(2.5, 1.5))
            chart.word(chart.x.high, best, f"limit, {ROOFS[key]}", "right")
    if read:
        end = highest / read
        start = max(chart.x.low, chart.y.low / read)
        chart.line([(start, read * start), (end, read * end)], "#555", dashes=(2.5, 1.5))
        chart.word(start, chart.y.high / 2, f"slope: memory, {read:.0f} GB/s")
    for result in mine:
        case = Case(**result["case"])
        kind = ("gradient" if case.gradient else case.kind) + (", 16 bits" if case.dtype != "float32" else ", float32")
        colour = COLOURS[_KINDS.index(kind)]
        for peer in ("ours", best_peer(result)):
            if peer in result["peers"]:
                rate = 1e-6 * case.flops / result["peers"][peer]["median_ms"]
                note = f"{case.name}: {peer} {rate:.0f} GFLOP/s"
                chart.point(case.flops / case.moved_bytes, rate, colour, note, kind, hollow=peer != "ours")
    return picture([chart])


_KINDS = ("forward, float32", "forward, 16 bits", "decode, float32", "decode, 16 bits", "gradient, float32",
          "gradient, 16 bits")  # fmt: skip


def lengths(results: Sequence[Result], memory: Sequence[Result], threads: int) -> str:
    """Time and memory of the long cases by the number of keys; the limit and a tensor of all scores are dashed."""
    ticks, words = list(LENGTHS.values()), [word.upper() for word in LENGTHS]
    keys = Axis("keys", ticks[0], ticks[-1], ticks, words)
    time = Chart(f"Time of a call, {threads} threads; dashed: limit", keys, _decades("ms", -1, 5))
    space = Chart("Memory of a call; dashed: a tensor of the scores", keys, _decades("MiB", -1, 5))
    grown = {row["case"]: max(row["mib"], space.y.low) for row in memory if row["peer"] == "ours" and "mib" in row}
    for group, colour in zip(LONG_ROWS, COLOURS, strict=False):
        mine = sorted((r for r in results if r["case"]["name"].partition("-")[0] == group and r["threads"] == threads),
                      key=lambda result: result["case"]["keys"])  # fmt: skip
        if not mine:
            continue
        cases = [Case(**result["case"]) for result in mine]
        time.line([(c.keys, r["peers"]["ours"]["median_ms"]) for c, r in zip(cases, mine, strict=True)], colour,
                  GROUPS[group])  # fmt: skip
        time.line([(c.keys, r["limit_ms"]) for c, r in zip(cases, mine, strict=True)], colour, dashes=(1, 1.5))
        space.line([(case.keys, grown[case.name]) for case in cases if case.name in grown], colour, GROUPS[group])
        space.line([(case.keys, case.score_bytes / 2**20) for case in cases], colour, dashes=(1, 1.5))
    return picture([time, space])


def sharing(idle: Mapping[str, Sequence[float]], threads: Sequence[int]) -> str:
    """The share of the threads' time that is busy, by case and number of threads.

    The cases in which little is idle share a line, which is that of the most idle.
    """
    drawn = {name: shares for name, shares in idle.items() if max(shares) > IDLE}
    others = [shares for name, shares in idle.items() if name not in drawn]
    if others:
        drawn["all others"] = [max(shares) for shares in zip(*others, strict=True)]
    x = Axis("threads", threads[0], threads[-1], threads, [str(count) for count in threads])
    chart = Chart("Busy share of the threads, simulated", x, Axis("%", 0, 100, range(0, 101, 20),
                  [str(share) for share in range(0, 101, 20)], log=False))  # fmt: skip
    for (name, shares), colour in zip(drawn.items(), COLOURS, strict=False):
        chart.line([(n, 100 - share) for n, share in zip(threads, shares, strict=True)], colour, name)
    return picture([chart])
