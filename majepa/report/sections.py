"""The sections of the page, each from the run alone."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence

from .bars import bin_edges, histogram, parts_bar
from .catalogue import Chapter, Panel, chapters_of
from .chapters import CHAPTERS
from .charts import Axis, Series, line_chart
from .data import Actions, Estimate, Record, Run, finite, win_rate
from .document import Section, absent
from .drawing import LARGE, SMALL
from .html import Markup, joined, tag
from .numbers import duration, percent, written
from .settings import config_tables, versions_table

TRANSITIONS = Axis(title="transitions")
WALL_TIME = Axis("seconds", "wall time")
SHARE = Axis("percent", domain=(0, 1))
PHASES = ("compiling", "collecting", "learning", "evaluating", "saving")
COLOURS = ("c1", "c2", "c3", "c4", "c5")
ORDERED = ("k1", "k2", "k3", "k4", "k5")


def sections(run: Run, battle: Markup | None) -> list[Section]:
    chapters = chapters_of(CHAPTERS.get(run.algorithm, ()), run.metric_names)
    return [
        _learning(run),
        _battle(battle),
        _episodes(run),
        *(_chapter(run, chapter, index) for index, chapter in enumerate(chapters, 1)),
        _speed(run),
        Section("config", "Settings", config_tables(run), _about_config(run)),
        Section("versions", "Versions", versions_table(run)),
        _commands(run),
    ]


def _learning(run: Run) -> Section:
    if not run.evaluated:
        return Section("learning", "Learning curves", absent("Not evaluated yet."))
    wins = _evaluated(run, "transitions", win_rate)
    wins_by_time = _evaluated(run, "seconds", win_rate)
    returns = _evaluated(run, "transitions", run.mean_return)
    lengths = Series("argmax", *_line(run, "evaluation/length"), "argmax")
    collected = Series("training", *_line(run, "training/win_rate"), "training")
    by_time = Series("training", *_line(run, "training/win_rate", "seconds"), "training")
    collected_returns = Series("training", *_line(run, "training/return"), "training")
    figures = [
        _large("Win rate against transitions", [collected, *wins], TRANSITIONS, SHARE),
        _large("Win rate against wall time", [by_time, *wins_by_time], WALL_TIME, SHARE),
        _large("Return of an episode", [collected_returns, *returns], TRANSITIONS, Axis()),
        _large("Length of an episode, argmax actions", [lengths], TRANSITIONS, Axis()),
    ]
    introduction = (
        "Argmax takes the most probable actions, sampled draws them; training is what happened "
        "while experience was collected. Bands are 95 % intervals over the episodes of one "
        "evaluation (Wilson's for win rates, the normal approximation for returns). They say "
        "nothing about other seeds."
    )
    if not run.episodes:
        introduction += " Single episodes are not stored here, so returns have no bands."
    return Section(
        "learning", "Learning curves", tag("div", *figures, class_="large"), introduction
    )


def _battle(battle: Markup | None) -> Section:
    if battle is None:
        missing = "No battle is embedded in this page. To see these agents fight, run the command "
        instead = joined(missing, tag("code", "majepa watch RUN"), " at the end of the page.")
        return Section("battle", "A battle", tag("p", instead, class_="absent"))
    return Section("battle", "A battle", tag("div", battle, class_="battle"))


def _episodes(run: Run) -> Section:
    title = "Episodes of the last evaluation"
    groups: dict[str, Sequence[Record]] = {}
    if run.evaluated:
        record = run.evaluated[-1]
        both: tuple[Actions, Actions] = ("argmax", "sampled")
        groups = {actions: run.episodes_of(record, actions) for actions in both}
    figures = [
        _distribution(f"{title}, {actions} actions", field, episodes, groups)
        for actions, episodes in groups.items()
        for title, field in (("Return", "return"), ("Length", "length"))
        if _numbers(episodes, field)
    ]
    if not figures:
        return Section("episodes", title, absent("No single episodes are stored."))
    legend = tag(
        "p",
        tag("span", class_="swatch won"),
        "won ",
        tag("span", class_="swatch lost"),
        "lost",
        class_="legend",
    )
    return Section("episodes", title, joined(legend, tag("div", *figures, class_="large")))


def _distribution(
    title: str, field: str, episodes: Sequence[Record], all_groups: Mapping[str, Sequence[Record]]
) -> Markup:
    """Of one way of acting, on the axis of both."""
    won = [one for one in episodes if one.get("won")]
    lost = [one for one in episodes if not one.get("won")]
    both = [value for group in all_groups.values() for value in _numbers(group, field)]
    note = f"{len(won)} won, {len(lost)} lost"
    chart = histogram(
        [("won", "won", _numbers(won, field)), ("lost", "lost", _numbers(lost, field))],
        bin_edges(both, is_whole=field == "length"),
        "return" if field == "return" else "transitions",
        dataclasses.replace(LARGE, height=190),
        f"{title}: {note}",
    )
    return tag("figure", tag("figcaption", tag("b", title), " ", tag("span", note)), chart)


def _numbers(records: Sequence[Record], field: str) -> list[float]:
    return [value for one in records if (value := finite(one.get(field))) is not None]


def _chapter(run: Run, chapter: Chapter, index: int) -> Section:
    panels = [_panel(run, panel) for panel in chapter.panels]
    return Section(
        f"metrics-{index}",
        chapter.title,
        tag("div", *panels, class_="small"),
        chapter.introduction,
    )


def _panel(run: Run, panel: Panel) -> Markup:
    colours = ORDERED if panel.is_ordered else COLOURS
    series = [
        Series(label, *_line(run, name), colours[index % len(colours)])
        for index, (name, label) in enumerate(panel.metrics.items())
    ]
    names = panel.name or ", ".join(panel.metrics)
    axis = Axis(panel.unit, is_log=panel.is_log, domain=(0, 1.0) if panel.is_share else None)
    describes = f"{names} against transitions"
    return tag(
        "figure",
        tag("figcaption", tag("b", panel.title), tag("span", _last(series, panel), class_="last")),
        tag("p", panel.meaning, " " if panel.meaning else "", tag("code", names), class_="meaning"),
        line_chart(series, Axis(), axis, SMALL, describes),
    )  # fmt: skip


def _last(series: Sequence[Series], panel: Panel) -> str:
    """Where the line ended; of an ordered family, its first and last line."""
    if len(series) > 1 and not panel.is_ordered:
        return ""
    ends = dict.fromkeys(written(one.y[-1], panel.unit) for one in (series[0], series[-1]))
    return " … ".join(ends)


def _speed(run: Run) -> Section:
    figures = []
    if run.seconds:
        figures.append(_wall_time(run, run.seconds))
    times, speeds = _line(run, "speed/transitions_per_second", "seconds")
    if times:
        steep = min(speeds) > 0 and max(speeds) > 8 * min(speeds)
        series = [Series("transitions per second", times, speeds, "c1")]
        title = "Transitions per second"
        figures.append(_large(title, series, WALL_TIME, Axis(is_log=steep)))
    if not figures:
        return Section("speed", "Speed", absent("No times are logged."))
    introduction = "Transitions per second count collecting and learning alone."
    return Section("speed", "Speed", tag("div", *figures, class_="large"), introduction)


def _wall_time(run: Run, total: float) -> Markup:
    spent = {name: run.last_value(f"seconds/{name}") or 0.0 for name in PHASES}
    spent["other"] = max(0.0, total - sum(spent.values()))
    scale = max(total, sum(spent.values()))
    parts = [(name, f"phase-{name}", seconds / scale) for name, seconds in spent.items()]
    rows = [
        tag(
            "tr",
            tag("th", tag("span", class_=f"swatch phase-{name}"), name, scope="row"),
            tag("td", duration(seconds)),
            tag("td", percent(seconds / scale)),
        )
        for name, seconds in spent.items()
    ]
    shares = ", ".join(f"{name} {percent(share)}" for name, _, share in parts)
    return tag(
        "figure",
        tag("figcaption", tag("b", "Where the wall time went"), " ", tag("span", duration(total))),
        parts_bar(parts, shares),
        tag("table", tag("tbody", *rows), class_="phases"),
    )


def _about_config(run: Run) -> str:
    if run.preset is None:
        return ""
    if not run.changed:
        return f"As preset {run.preset.name} has them; map and seed aside, nothing was changed."
    return (
        f"Nearest to preset {run.preset.name}. Marked fields differ from it; its own value stands "
        "beside them."
    )


def _commands(run: Run) -> Section:
    folder = shlex.quote(str(run.folder))
    commands = (
        (f"majepa train --resume {folder}", "go on where it stopped, bit for bit"),
        (f"majepa evaluate {folder}", "play more episodes with these agents"),
        (f"majepa watch {folder}", "watch them fight"),
        (f"majepa report {folder}", "write this page anew"),
    )
    rows = [
        tag("tr", tag("td", tag("code", command)), tag("td", what)) for command, what in commands
    ]
    content = tag("table", tag("tbody", *rows), class_="commands")
    needs = "" if run.has_checkpoint else "All but the last need a checkpoint, which is missing."
    return Section("commands", "Going on", content, needs)


def _large(title: str, series: Sequence[Series], x: Axis, y: Axis) -> Markup:
    chart = line_chart(series, x, y, LARGE, title)
    return tag("figure", tag("figcaption", tag("b", title)), chart)


def _evaluated(
    run: Run, along: str, estimate: Callable[[Record, Actions], Estimate | None]
) -> list[Series]:
    """A series with its band for each way of acting."""
    both: tuple[Actions, Actions] = ("sampled", "argmax")
    found = []
    for actions in both:
        points = [
            (float(record[along]), value)
            for record in run.evaluated
            if along in record and (value := estimate(record, actions)) is not None
        ]
        values = [value for _, value in points]
        line = Series(actions, [x for x, _ in points], [value.value for value in values], actions)
        if any(value.low < value.high for value in values):
            lows, highs = [value.low for value in values], [value.high for value in values]
            line = dataclasses.replace(line, low=lows, high=highs)
        found.append(line)
    return found


def _line(run: Run, name: str, along: str = "transitions") -> tuple[list[float], list[float]]:
    places = [(finite(record.get(along)), value) for record, value in run.values(name)]
    points = [(x, y) for x, y in places if x is not None]
    return [x for x, _ in points], [y for _, y in points]
