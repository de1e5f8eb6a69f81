"""The examples run, with smaller budgets than a person would give them."""

import importlib.util
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "examples"
SMALL = {
    "preset": "debug",
    "steps": 400,
    "overrides": {
        "evaluation.every": 160,
        "evaluation.episodes": 4,
        "evaluation.final_episodes": 4,
    },
}


def example(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "first"
    rate = example("train_and_judge").main(folder, "mappo", **SMALL)
    assert 0 <= rate <= 1
    return folder


def test_they_are_short():
    names = {path.stem for path in ROOT.glob("*.py")}
    assert len(names) >= 5
    for name in names:
        assert len((ROOT / f"{name}.py").read_text().splitlines()) < 60, name


@pytest.mark.slow
def test_agents_act_alone(run):
    assert len(example("act_alone").main(run, episodes=2)) == 2


@pytest.mark.slow
def test_a_battle_is_kept(run):
    page = example("watch_and_keep").main(run, battles=2)
    names = {path.name for path in page.parent.iterdir()}
    assert {"best.battle.json.gz", "best.html", "best.gif"} <= names


@pytest.mark.slow
def test_the_model_is_asked(tmp_path, capsys):
    lines = '{"transitions": 5, ' + ", ".join(
        f'"rollout/{name}_{k}": 0.{k}'
        for name in ("reward_error", "cont_error", "alive_error", "illegal", "similarity")
        for k in range(1, 6)
    )
    (tmp_path / "metrics.jsonl").write_text(lines + "}\n")
    assert example("trust_the_model").main(tmp_path)["illegal"] == [0.1, 0.2, 0.3, 0.4, 0.5]
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(SystemExit, match="nothing yet"):
        example("trust_the_model").main(tmp_path)


@pytest.mark.slow
def test_a_world_of_ones_own(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["own_world.py"])
    runpy.run_path(str(ROOT / "own_world.py"), run_name="__main__")
    assert "both agree in 100%" in capsys.readouterr().out
