"""The results of the JSON file as Markdown tables with aligned columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.speed.cases import Case
from bench.speed.memory import AIM
from bench.speed.peer import lower_precision
from bench.speed.workers import HELD

Result = dict[str, Any]


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (heading, *rows)) for i in range(len(heading))]

    def line(cells: Sequence[str]) -> str:
        aligned = [c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return f"| {' | '.join(aligned)} |"

    rule = [(w - 1) * "-" + ":" if i else w * "-" for i, w in enumerate(widths)]
    return "\n".join([line(heading), line(rule), *map(line, rows)]) + "\n"


def number(value: float) -> str:
    """The number with three digits, or with all digits before the point if there are more."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def percent(result: Result, peer: str) -> float:
    """The share of the limit that a peer reaches, in percent."""
    return float(100 * result["limit_ms"] / result["peers"][peer]["median_ms"])


def best_peer(result: Result) -> str | None:
    """The fastest other peer with a right result and the case's own precision."""
    fair = {name: peer["median_ms"] for name, peer in result["peers"].items()
            if peer["right"] and name != "ours" and not lower_precision(name)}  # fmt: skip
    return min(fair, key=fair.__getitem__, default=None)


def reached(result: Result) -> bool | None:
    """Whether our result is right and reaches the aim; None without an aim, or without our operator."""
    mine = result["peers"].get("ours")
    if mine is None or result["aim"] is None:
        return None
    return bool(mine["right"] and round(percent(result, "ours")) >= result["aim"])


def main_table(results: Sequence[Result]) -> str:
    """Our operator, the limit, the aim and the best peer, in one row for each case."""
    rows = []
    for result in results:
        mine, best = result["peers"].get("ours"), best_peer(result)
        ours, share, times = ("-",) * 3
        if mine is not None:
            ours = number(mine["median_ms"]) + ("" if mine["right"] else " WRONG")
            share = f"{percent(result, 'ours'):.0f}"
            if best is not None:
                times = f"{result['peers'][best]['median_ms'] / mine['median_ms']:.2f}"
        aim = {True: "met", False: "missed", None: ""}[reached(result)]
        rows.append([
            Case(**result["case"]).name,
            number(result["limit_ms"]),
            ours,
            share,
            f"{result['aim'] or '-'} {aim}".strip(),
            "-" if best is None else f"{best} {number(result['peers'][best]['median_ms'])}",
            "-" if best is None else f"{percent(result, best):.0f}",
            times,
        ])  # fmt: skip
    return table(["case", "limit ms", "ours ms", "% of limit", "aim", "best peer ms", "its %", "times faster"], rows)


def peer_table(results: Sequence[Result]) -> str:
    """The milliseconds of every peer, in brackets if its result is wrong."""
    names = list(dict.fromkeys(name for result in results for name in result["peers"]))
    rows = []
    for result in results:
        cells = []
        for name in names:
            peer = result["peers"].get(name)
            text = "-" if peer is None else number(peer["median_ms"])
            cells.append(text if peer is None or peer["right"] else f"({text})")
        rows.append([result["case"]["name"], *cells])
    return table(["ms", *names], rows)


def memory_table(rows: Sequence[Result]) -> str:
    """The growth in MiB by case and peer."""
    peers = list(dict.fromkeys(row["peer"] for row in rows))
    cases = list(dict.fromkeys(row["case"] for row in rows))
    grown: dict[tuple[str, str], Any] = {(row["case"], row["peer"]): row.get("mib") for row in rows}
    cells = [
        [case, *("-" if grown.get((case, peer)) is None else number(max(0.0, grown[case, peer])) for peer in peers)]
        for case in cases
    ]
    return table(["MiB", *peers], cells)


def rate_table(results: Sequence[Result]) -> str:
    """The best rates of all rounds, by number of threads."""
    words = {"fma_flops": "float32 multiply-add, GFLOP/s", "bf16_flops": "bf16 dot product, GFLOP/s",
             "tile_flops": "bf16 tile product, GFLOP/s", "exp_rate": "exponentials, G/s"}  # fmt: skip
    threads = sorted({result["threads"] for result in results})

    def best(name: str, count: int) -> float:
        return max((r["rates"].get(name, 0.0) for r in results if r["threads"] == count), default=0.0)

    rows = [[text, *(number(best(name, count) * 1e-9) if best(name, count) else "-" for count in threads)]
            for name, text in words.items()]  # fmt: skip
    reads = []
    for count in threads:
        of = [Case(**r["case"]).cache_bytes / r["limit_ms"] * 1e-6 for r in results
              if r["threads"] == count and "read" in r["limit_parts_ms"]]  # fmt: skip
        reads.append(number(max(of)) if of else "-")
    rows.append(["plain read of a cache, GB/s", *reads])
    return table(["the machine", *(f"{count} thread{'s' * (count > 1)}" for count in threads)], rows)


def remarks(results: Sequence[Result]) -> list[str]:
    """The notes to the tables: wrong results, and other processes that used the machine."""
    lines = []
    for result in results:
        where = f"{result['case']['name']}, {result['threads']} threads"
        for name, peer in result["peers"].items():
            if not peer["right"]:
                error = "NaN" if peer["error"] is None else f"{peer['error']:.1e}"
                lines.append(f"{where}: {name} is wrong (error {error}) and does not count")
        for name, why in result["absent"].items():
            if "failed" in why or "memory" in why or "answer" in why or name == "ours":
                lines.append(f"{where}: {name}: {why}")
        if (result["others_cores"] or 0) > 0.2:
            lines.append(f"{where}: other processes used {result['others_cores']:.1f} cores meanwhile")
    return lines


def document(results: dict[str, Any]) -> str:
    """Everything, as one Markdown document."""
    about = results["about"]
    text = [f"# Attention on {about['processor']}, {about['date']}\n", f"{', '.join(about['versions'])}.\n"]
    if isa := about.get("isa"):
        held = "our kernels, torch, OpenVINO and the limits" if isa in HELD else "our kernels"
        text.append(f"Held to {isa}: {held}. ONNX Runtime has no setting for its own kernels.\n")
    cases = results["cases"]
    if cases:
        text += [
            "The limit is the time of the multiply-adds and exponentials at the machine's best rates (of the longer of "
            "both, where tile registers multiply), or, for a decode step, the time to read the cache once; `its %` is "
            "the best peer's share of it. Peers with * compute in fewer bits than their inputs have and are never the "
            "best; times in brackets are of wrong results.\n",
            rate_table(cases),
        ]  # fmt: skip
    for threads in sorted({result["threads"] for result in cases}):
        mine = [result for result in cases if result["threads"] == threads]
        text += [f"## {threads} thread{'s' * (threads > 1)}\n", main_table(mine), peer_table(mine)]
        aimed = [result for result in mine if reached(result) is not None]
        if aimed:
            text.append(f"{sum(map(bool, map(reached, aimed)))} of {len(aimed)} aims met.\n")
    if results["memory"]:
        text += [f"## Growth of one call (aim: {AIM} MiB)\n", memory_table(results["memory"])]
    notes = remarks(cases)
    if notes:
        text += ["## Remarks\n", "".join(f"- {line}\n" for line in notes)]
    return "\n".join(text)
