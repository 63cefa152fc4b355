"""The tables that coverage.py prints."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

from rich.console import Console
from rich.table import Table

from fa_compiler.passes.answer.report import Code
from tools.corpus.outcome import Outcome, shares, unlisted


def print_models(console: Console, outcomes: Sequence[Outcome]) -> None:
    """Print one row for each model: the expected and the fused blocks, and the difference of its outputs."""
    tools = sorted({tool for outcome in outcomes for tool in outcome.peers})
    table = Table(title="Models", title_justify="left")
    for column in ("model", "expected", "fused", "declined", "difference", *tools):
        table.add_column(column, justify="left" if column in ("model", "declined") else "right", overflow="fold")
    for outcome in outcomes:
        codes = Counter(block["code"] for block in outcome.declined)
        words = ", ".join(code if count == 1 else f"{count} {code}" for code, count in codes.items())
        measured = outcome.compared in ("ort", "reference")
        row = [outcome.id, str(outcome.expected), str(outcome.fused), words]
        row.append(f"{outcome.error:.1e}" if measured else "not run")
        row += [_peer(outcome.peers.get(tool, {})) for tool in tools]
        table.add_row(*row, style="red" if outcome.problems else None)
    console.print(table)


def _peer(result: dict[str, object]) -> str:
    return str(result.get("fused", "failed" if result else ""))


def print_shares(console: Console, outcomes: Sequence[Outcome]) -> int:
    """Print the shares of fused blocks, and the differences from the list checked by hand; returns their number."""
    everything, expressible = shares(outcomes)
    console.print(f"\nFused of all expected blocks: {everything.text}", highlight=False)
    console.print(f"not counting what the operator cannot express: {expressible.text}", highlight=False)
    for code, what in ((Code.SCORES_ARE_OUTPUT, "scores"), (Code.PROBABILITIES_ARE_OUTPUT, "probabilities")):
        count = sum(outcome.counted([code]) for outcome in outcomes)
        line = f"  left out there: blocks whose {what} the model needs, too ({code}, docs/recognised.md): {count}"
        console.print(line, highlight=False)
    for tool in sorted({tool for outcome in outcomes for tool in outcome.peers}):
        counted = [outcome for outcome in outcomes if tool in outcome.peers]
        fused = sum(min(outcome.peers[tool].get("fused", 0), outcome.expected) for outcome in counted)
        failed = sum("error" in outcome.peers[tool] for outcome in counted)
        expected = sum(outcome.expected for outcome in counted)
        share = f"{fused} of {expected} ({100 * fused / max(expected, 1):.0f} %)"
        console.print(f"{tool}: {share}, failed on {failed} models; its results were not run", highlight=False)
    differing = unlisted(outcomes)
    for line in differing:
        console.print(f"  inexpressible.json: {line}", markup=False, highlight=False)
    return len(differing)


def print_totals(console: Console, title: str, groups: dict[str, list[Outcome]]) -> None:
    """Print one row for each group, and the sum."""
    table = Table(title=title, title_justify="left", show_footer=len(groups) > 1)
    columns: dict[str, Callable[[list[Outcome]], int]] = {
        "models": lambda rows: len(rows),
        "blocks": lambda rows: sum(row.expected for row in rows),
        "fused": lambda rows: sum(row.fused for row in rows),
        "declined": lambda rows: sum(len(row.declined) for row in rows),
        "complete": lambda rows: sum(row.fused == row.expected for row in rows),
        "same (ORT)": lambda rows: sum(row.compared == "ort" and not row.problems for row in rows),
        "same (ref.)": lambda rows: sum(row.compared == "reference" and not row.problems for row in rows),
        "not run": lambda rows: sum(row.compared in ("no", "refused") for row in rows),
        "defects": lambda rows: sum(bool(row.problems) for row in rows),
    }
    everything = [row for rows in groups.values() for row in rows]
    table.add_column("group", footer="all")
    for name, count in columns.items():
        table.add_column(name, justify="right", footer=str(count(everything)))
    for group, rows in groups.items():
        table.add_row(group, *(str(count(rows)) for count in columns.values()))
    console.print(table)


def print_runs(console: Console, outcomes: Sequence[Outcome]) -> None:
    """Print one line for each onnxruntime."""
    runs: dict[str, Counter[str]] = defaultdict(Counter)
    for outcome in outcomes:
        for version, word in outcome.runs.items():
            runs[version][word] += 1
    for version, words in runs.items():
        console.print(f"onnxruntime {version}: " + ", ".join(f"{n} {word}" for word, n in words.most_common()))
    console.print(f"compared on {sum(outcome.varied for outcome in outcomes)} other sets of inputs, too")


def print_declined(console: Console, outcomes: Iterable[Outcome]) -> None:
    """Print the declined blocks by code, with the models that have them."""
    table = Table(title="Declined blocks", title_justify="left")
    for column in ("code", "blocks", "models"):
        table.add_column(column, justify="right" if column == "blocks" else "left", overflow="fold")
    models: dict[str, list[str]] = defaultdict(list)
    for outcome in outcomes:
        for block in outcome.declined:
            models[block["code"]].append(outcome.id)
    for code, ids in sorted(models.items(), key=lambda item: -len(item[1])):
        distinct = list(dict.fromkeys(ids))
        more = f" and {len(distinct) - 6} more" if len(distinct) > 6 else ""
        table.add_row(code, str(len(ids)), ", ".join(distinct[:6]) + more)
    console.print(table)


def print_fused(console: Console, outcomes: Iterable[Outcome]) -> None:
    """Print the fused blocks by layout, mask and extensions."""
    table = Table(title="Fused blocks", title_justify="left")
    table.add_column("layout, mask, extensions")
    table.add_column("blocks", justify="right")
    words: Counter[str] = Counter()
    for outcome in outcomes:
        words.update(outcome.fused_as)
    for name, count in words.most_common():
        table.add_row(name, str(count))
    console.print(table)


def print_defects(console: Console, outcomes: Iterable[Outcome]) -> int:
    """Print every defect with its model; returns the number of models with a defect."""
    broken = [outcome for outcome in outcomes if outcome.problems]
    console.print(f"\n[bold]Defects: {len(broken)} models[/bold]" if broken else "\n[bold green]No defects.[/]")
    for outcome in broken:
        for problem in outcome.problems:
            console.print(f"  {outcome.id}: {problem}", markup=False, highlight=False)
    return len(broken)


def print_missing(console: Console, groups: dict[str, list[Outcome]]) -> None:
    """Print the models with blocks that are not fused, by group, with the reasons."""
    for group, rows in groups.items():
        for row in rows:
            if row.fused != row.expected:
                console.print(
                    f"  {group}: {row.id} {row.fused}/{row.expected}",
                    markup=False,
                    highlight=False,
                )
                for block in row.declined:
                    text = f"      {block['code']}: {block['reason']} ({block['culprit'] or block['anchor']})"
                    console.print(text, markup=False, highlight=False)
