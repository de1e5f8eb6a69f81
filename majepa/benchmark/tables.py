"""The table of methods × maps as Markdown, CSV and LaTeX, with published numbers set apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..stats import Interval
from .aggregates import Aggregates
from .data_files import csv_text
from .published import SOURCES, Rate
from .results import Results, clocks, counted
from .scores import OURS, PUBLISHED, Row, Score, caution, sources_of

NOTHING = "–"
RULE = (
    "Mean over seeds (sample standard deviation) [95 % interval: seeds are redrawn, each with a "
    "win rate that its episodes leave possible]; the best mean of each map is bold."
)


def markdown_table(results: Results, rows: Sequence[Row], aggregates: Aggregates) -> str:
    parts = [
        f"# {results.grid.title}",
        about_table(results),
        *filter(None, [caution(rows)]),
        f"## Ours: {results.world}",
        _grid(rows, _markdown_score),
    ]
    for source in sources_of(rows):
        parts.append(f"## {PUBLISHED}: {source}")
        parts.append(_grid(rows, lambda score, source=source: plain_rate(score.published(source))))
    parts += [
        "## Over all maps",
        aggregates.describe(len(rows)),
        *_markdown_aggregates(aggregates),
        *_markdown_gaps(results),
    ]
    return "\n\n".join(parts) + "\n"


def csv_table(rows: Sequence[Row]) -> str:
    """One line for each method on each map, every number as it is; rates are in per cent."""
    columns = [
        "map", "method", "seeds", "planned_seeds", "mean", "std", "low", "high", "is_best",
        "win_rates", "sampled_mean", "mean_return", "mean_length", "wall_seconds",
        "environment_version",
        *(f"{source}_{what}" for source in SOURCES for what in ("mean", "std")),
    ]  # fmt: skip
    return csv_text(columns, [_csv_line(score) for row in rows for score in row])


def latex_table(results: Results, rows: Sequence[Row]) -> str:
    """A table environment; needs the package booktabs."""
    titles = [method.title for method in results.grid.methods]
    lines = [
        "% Needs \\usepackage{booktabs}.",
        "\\begin{table}",
        "  \\centering",
        f"  \\caption{{{latex_text(_caption(results, rows))}}}",
        f"  \\label{{tab:{''.join(c for c in results.grid.name if c.isalnum() or c in '-:')}}}",
        f"  \\begin{{tabular}}{{l{'r' * len(titles)}}}",
        "    \\toprule",
        _latex_line(["map", *map(latex_text, titles)]),
        *_latex_block(f"Ours: {results.world}", rows, _latex_score),
    ]
    for source in sources_of(rows):
        lines += _latex_block(
            f"{PUBLISHED}: {source}",
            rows,
            lambda score, source=source: _latex_dashes(plain_rate(score.published(source))),
        )
    lines += ["    \\bottomrule", "  \\end{tabular}", "\\end{table}"]
    return "\n".join(lines) + "\n"


def about_table(results: Results) -> str:
    seeds = counted(len(results.grid.seeds), "seed")
    return f"Our {OURS}, in the {results.world}, over {seeds} unless a cell says otherwise. {RULE}"


def plain_rate(rate: Rate | None) -> str:
    """`78.7 (14.5)`."""
    if rate is None:
        return NOTHING
    return f"{decimal(rate.mean)} ({decimal(rate.deviation)})"


def decimal(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1f}"


def bounds(interval: Interval | None) -> str:
    return f"[{decimal(interval.low)}, {decimal(interval.high)}]" if interval else f"[{NOTHING}]"


def seeds_note(score: Score) -> str:
    """Of a cell that lacks seeds."""
    return "" if score.is_complete else f"{score.seeds} of {counted(score.planned, 'seed')}"


def markdown_text(text: str) -> str:
    for special in "\\|*<`":
        text = text.replace(special, f"\\{special}")
    return text


def markdown_rows(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, align: str = "---:"
) -> str:
    """A table whose first column is text; the others are numbers unless aligned otherwise."""
    lines = [heads, ["---", *[align] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def latex_text(text: str) -> str:
    """Any text, with what LaTeX would take for commands escaped."""
    return "".join(LATEX.get(character, character) for character in text)


LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "_": r"\_", "%": r"\%", "&": r"\&",
    "#": r"\#", "$": r"\$", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "–": "--", "×": r"$\times$",
}  # fmt: skip


def _grid(rows: Sequence[Row], write: Callable[[Score], str]) -> str:
    heads = ["map", *(markdown_text(score.title) for score in rows[0])]
    return markdown_rows(heads, [[row[0].map, *(write(score) for score in row)] for row in rows])


def _markdown_score(score: Score) -> str:
    note = seeds_note(score)
    if score.mean is None:
        return f"{NOTHING}, {note}"
    mean = decimal(score.mean)
    shown = f"**{mean}**" if score.is_best else mean
    text = f"{shown} ({decimal(score.deviation)}) {bounds(score.interval)}"
    return f"{text}, {note}" if note else text


def _markdown_aggregates(aggregates: Aggregates) -> list[str]:
    if not aggregates.methods:
        return []
    means = [
        [markdown_text(one.title), _percent(one.iqm), bounds(_scaled(one.interval)), str(one.runs)]
        for one in aggregates.methods
    ]
    parts = [markdown_rows(["method", "IQM of win rates", "95 % interval", "runs"], means)]
    pairs = [
        [
            f"{markdown_text(one.title)} over {markdown_text(one.other)}",
            _percent(one.probability),
            bounds(_scaled(one.interval)),
        ]
        for one in aggregates.pairs
    ]
    if pairs:
        parts.append(markdown_rows(["probability of improvement", "%", "95 % interval"], pairs))
    return parts


def _markdown_gaps(results: Results) -> list[str]:
    lines = [f"- {gap.cell.name}: {gap.state}, {gap.reason}" for gap in results.gaps]
    lines += [f"- {note}" for note in results.notes]
    return ["## What is missing", "\n".join(map(markdown_text, lines))] if lines else []


def _csv_line(score: Score) -> list[Any]:
    interval, results = score.interval, score.results
    rates = " ".join(f"{one.cell.seed}:{100 * one.win_rate:g}" for one in results)
    published = [score.published(source) for source in SOURCES]
    return [
        score.map, score.title, score.seeds, score.planned, score.mean, score.deviation,
        interval and interval.low, interval and interval.high, int(score.is_best), rates,
        _mean([100 * one.sampled_win_rate for one in results]),
        _mean([one.mean_return for one in results]),
        _mean([one.mean_length for one in results]),
        sum(one.seconds for one in clocks(results)) if results else None,
        results[0].environment_version if results else None,
        *(number for rate in published for number in (rate or (None, None))),
    ]  # fmt: skip


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _caption(results: Results, rows: Sequence[Row]) -> str:
    title = results.grid.title
    title += "" if title.endswith((".", "?", "!")) else "."
    return " ".join(filter(None, [title, about_table(results), caution(rows)]))


def _latex_block(label: str, rows: Sequence[Row], write: Callable[[Score], str]) -> list[str]:
    """The rows of one world under its name."""
    width = len(rows[0]) + 1
    return [
        "    \\midrule",
        f"    \\multicolumn{{{width}}}{{l}}{{\\emph{{{latex_text(label)}}}}} \\\\",
        *(_latex_line([latex_text(row[0].map), *(write(score) for score in row)]) for row in rows),
    ]


def _latex_line(cells: Sequence[str]) -> str:
    return f"    {' & '.join(cells)} \\\\"


def _latex_score(score: Score) -> str:
    note = seeds_note(score)
    if score.mean is None:
        return _latex_dashes(f"{NOTHING}, {note}")
    mean = decimal(score.mean)
    shown = f"\\textbf{{{mean}}}" if score.is_best else mean
    text = f"{shown} ({decimal(score.deviation)}) {{\\scriptsize {bounds(score.interval)}}}"
    return _latex_dashes(f"{text}, {note}" if note else text)


def _latex_dashes(text: str) -> str:
    return text.replace(NOTHING, LATEX[NOTHING])


def _percent(share: float) -> str:
    return decimal(100 * share)


def _scaled(interval: Interval | None) -> Interval | None:
    return interval and Interval(100 * interval.low, 100 * interval.high)
