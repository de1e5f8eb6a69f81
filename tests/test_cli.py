"""The command line as a user meets it: subprocesses, exit codes, one clear line for a mistake."""

import json
import subprocess
import sys

import pytest

from majepa.envs.sim import SCENARIOS


def majepa(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "majepa", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_help_names_every_command():
    result = majepa("--help")
    assert result.returncode == 0
    assert "maps" in result.stdout and "watch" in result.stdout
    assert "StarCraft" in result.stdout


def test_maps_as_json_is_complete():
    result = majepa("maps", "--json")
    entries = json.loads(result.stdout)
    assert [entry["map"] for entry in entries] == list(SCENARIOS)
    by_name = {entry["map"]: entry for entry in entries}
    assert by_name["2s3z"] | {"sim_version": ""} == {
        "map": "2s3z",
        "agents": 5,
        "enemies": 5,
        "limit": 120,
        "actions": 11,
        "observation": 80,
        "state": 120,
        "agent_state": 173,
        "allies": {"stalker": 2, "zealot": 3},
        "opponents": {"stalker": 2, "zealot": 3},
        "sim_version": "",
    }


def test_maps_as_a_table_has_a_row_per_map():
    result = majepa("maps")
    assert result.returncode == 0
    for name in SCENARIOS:
        assert f" {name} " in result.stdout


def test_watch_writes_a_file_and_says_how_it_ended(tmp_path):
    out = tmp_path / "deep" / "battle.gif"
    result = majepa("watch", "3m", "--policy", "nearest", "--out", str(out))
    assert result.returncode == 0, result.stderr
    assert out.read_bytes()[:4] == b"GIF8"
    assert "3m" in result.stdout and "steps" in result.stdout
    assert list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("watch", "2s4z"), "did you mean 2s3z"),
        (("watch", "3m", "--policy", "nearst"), "did you mean nearest"),
        (("watch", "3m", "--out", "battle.avi"), ".gif"),
        (("watch", "3m", "--out", "/proc/battle.gif"), "/proc"),
    ],
)
def test_a_mistake_is_one_clear_line(arguments, message):
    result = majepa(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_an_unknown_command_lists_the_known_ones():
    result = majepa("wach")
    assert result.returncode != 0
    assert "watch" in result.stdout + result.stderr
