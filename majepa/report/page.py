"""The page of a run: the result in large, then the sections."""

from __future__ import annotations

from .bars import interval_strip
from .data import Estimate, Run
from .document import document
from .html import Markup, joined, tag
from .numbers import duration, number, percent
from .sections import sections

WHICH = {
    "finished": "Final win rate",
    "stopped": "Win rate at the early stop",
    "unfinished": "Win rate so far",
}
ALGORITHMS = {"majepa": "MA-JEPA", "mappo": "MAPPO", "qmix": "QMIX", "mat": "MAT"}
"""Names as people write them."""


def page(run: Run, battle_html: str | None = None) -> str:
    """The whole document; the same run gives the same text."""
    found = sections(run, Markup(battle_html) if battle_html else None)
    title = f"{_algorithm(run)} on {run.map_name}, seed {_seed(run)}"
    return document(title, _header(run), found)


def _header(run: Run) -> Markup:
    return tag(
        "header",
        tag("p", "Training report", class_="eyebrow"),
        tag("h1", f"{_algorithm(run)} on {run.map_name}"),
        tag("p", " · ".join(_facts(run)), class_="facts"),
        _score(run),
        tag("p", _status(run), class_=f"status {run.status}"),
        tag("p", _world(run), class_="caveat"),
        _notes(run),
    )


def _algorithm(run: Run) -> str:
    return ALGORITHMS.get(run.algorithm, run.algorithm)


def _seed(run: Run) -> str:
    return str(run.config.get("seed", "unknown"))


def _facts(run: Run) -> list[str]:
    facts = [f"seed {_seed(run)}"]
    if run.preset is not None:
        changed = len(run.changed)
        near = f" with {changed} field{'s' * (changed != 1)} changed" if changed else ""
        facts.append(f"preset {run.preset.name}{near}")
    facts.append(f"{number(run.last['transitions'])} transitions")
    if run.seconds is not None:
        facts.append(duration(run.seconds))
    devices = run.versions.get("devices")
    if isinstance(devices, list) and devices:
        facts.append(", ".join(_device(str(device)) for device in dict.fromkeys(devices)))
    return facts


def _device(text: str) -> str:
    """`gpu: NVIDIA H200` as `NVIDIA H200`, `cpu: cpu` as `CPU`."""
    platform, _, kind = text.partition(": ")
    return platform.upper() if kind in ("", platform) else kind


def _score(run: Run) -> Markup:
    score = run.score
    if score is None:
        return tag("div", tag("p", "No score yet", class_="none"), class_="score")
    at = f"{number(score.episodes)} episodes at {number(score.transitions)} transitions"
    return tag(
        "div",
        _result(f"{WHICH[run.status]}, argmax actions", score.argmax, at, "argmax", "first"),
        score.sampled and _result("Sampled actions", score.sampled, at, "sampled", "second"),
        class_="score",
    )


def _result(title: str, rate: Estimate, at: str, style: str, rank: str) -> Markup:
    interval = f"95 % interval {percent(rate.low)} to {percent(rate.high)}"
    return tag(
        "div",
        tag("p", title, class_="what"),
        tag("p", percent(rate.value), class_=f"value {style}"),
        interval_strip(rate.value, rate.low, rate.high, style),
        tag("p", f"{interval} (Wilson), {at}", class_="detail"),
        class_=rank,
    )


def _status(run: Run) -> Markup:
    done = number(run.last["transitions"])
    of_budget = f"{done} of {number(run.budget)}" if run.budget is not None else done
    if run.status == "finished":
        return _claim(
            "Finished.",
            f"The budget is spent ({of_budget} transitions), and the win rate is that of the "
            "final evaluation: the result of this run.",
        )
    if run.status == "stopped":
        return _claim(
            "Stopped early",
            f"at {of_budget} transitions. The win rate was measured at the stop; it is not the "
            "result of the full budget.",
        )
    if run.score is None:
        return _claim(
            "Unfinished,",
            f"at {of_budget} transitions, and not yet evaluated. "
            "The run still goes on, was interrupted, or failed.",
        )
    return _claim(
        "Unfinished,",
        f"at {of_budget} transitions: the run still goes on, was interrupted, or failed. The win "
        f"rate is that of the last evaluation on the way, at {number(run.score.transitions)} "
        f"transitions over {number(run.score.episodes)} episodes, and not a result.",
    )


def _claim(strong: str, rest: str) -> Markup:
    return joined(tag("strong", strong), " ", rest)


def _world(run: Run) -> str:
    version = run.versions.get("environment_version")
    known = f"version {version}" if version is not None else "version unknown"
    if not run.is_simulated:
        return f"Environment {run.config.get('env')}, {known}."
    return (
        f"Embedded battle simulator, {known}. The simulator is not StarCraft II: do not compare "
        "these win rates with ones from the game without saying so."
    )


def _notes(run: Run) -> Markup | None:
    notes = list(run.notes)
    refused = int(run.last_value("nonfinite_in_a_row") or 0)
    if refused:
        notes.insert(0, f"The last {refused} updates were refused: something was not finite.")
    return tag("ul", *(tag("li", note) for note in notes), class_="notes") if notes else None
