"""Recording an episode, and showing it as a file or in a terminal."""

from __future__ import annotations

import dataclasses
import io
import re
import subprocess
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from runs.counting import CountingEnv

from majepa import watch as watching
from majepa.envs import EnvError, make_env
from majepa.envs.sim.render import to_rgb
from majepa.recording import Recording, RecordingError, ScriptedPlayer, read, record, write
from majepa.watch import (
    FRAMES_PER_STEP,
    HOLD_SECONDS,
    play_in_terminal,
    summary,
    watch,
    write_video,
)


@pytest.fixture(scope="module")
def player():
    env = make_env("3m")
    return env, ScriptedPlayer.named("nearest", env.spec)


@pytest.fixture(scope="module")
def recording(player) -> Recording:
    return record(*player, seed=0)


@pytest.fixture(scope="module")
def scenes(recording):
    return recording.scenes()


def terminal(**options) -> tuple[Console, io.StringIO]:
    screen = io.StringIO()
    return Console(file=screen, **options), screen


def test_record_runs_from_reset_to_the_final_row(scenes):
    assert [scene.step for scene in scenes] == list(range(len(scenes)))
    assert scenes[0].last_actions == (None,) * 3
    assert all(None not in scene.last_actions for scene in scenes[1:])
    assert [scene.outcome is not None for scene in scenes] == [False] * (len(scenes) - 1) + [True]
    returns = [scene.total_reward for scene in scenes]
    assert returns[0] == 0 and returns == sorted(returns) and 0 < returns[-1] <= 20
    end = scenes[-1]
    survivors = {side: any(u.alive for u in end.of(side)) for side in ("ally", "enemy")}
    assert end.outcome == {(True, False): "won", (False, True): "lost"}[tuple(survivors.values())]


def test_record_repeats_itself_and_stops_when_told(player, scenes):
    assert record(*player, seed=0, max_steps=3).scenes() == scenes[:4]


def test_gif_shows_every_step_and_the_way_between(scenes, tmp_path):
    path = tmp_path / "new" / "folder" / "battle.gif"
    write_video(scenes[:6], path, fps=10.0, size=128)
    with Image.open(path) as image:
        # Frames that hold the end are one long frame.
        assert image.n_frames == 5 * FRAMES_PER_STEP + 1
        assert image.info["duration"] == 50
        image.seek(image.n_frames - 1)
        assert image.info["duration"] == HOLD_SECONDS * 1000
    assert [entry.name for entry in path.parent.iterdir()] == ["battle.gif"]


def test_mp4_shows_every_step_and_holds_the_end(scenes, tmp_path):
    path = tmp_path / "battle.mp4"
    write_video(scenes[:3], path, fps=8.0, size=130)
    assert list(tmp_path.iterdir()) == [path]
    drawn = to_rgb(scenes[2], size=130)
    ffmpeg = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(path)]
    raw = subprocess.run(
        [*ffmpeg, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"], check=True, capture_output=True
    ).stdout
    frames = np.frombuffer(raw, np.uint8).reshape(-1, *drawn.shape)
    assert len(frames) == 2 * FRAMES_PER_STEP + round(HOLD_SECONDS * 8 * FRAMES_PER_STEP)
    difference = np.abs(frames[-1].astype(int) - drawn)
    assert difference.mean() < 3, "the codec loses little"


def test_mp4_says_what_the_encoder_said(scenes, tmp_path, monkeypatch):
    monkeypatch.setattr(watching, "to_rgb", lambda scene, *, size: np.zeros((33, 33, 3), np.uint8))
    with pytest.raises(RuntimeError, match="not divisible by 2"):
        write_video(scenes[:2], tmp_path / "battle.mp4")
    assert not list(tmp_path.iterdir())


def test_svg_shows_the_end(scenes, tmp_path):
    path = tmp_path / "end.SVG"
    write_video(scenes, path)
    assert f">{scenes[-1].outcome.upper()}<" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["battle.avi", "battle", "battle.gif.bak"])
def test_an_unknown_suffix_is_refused_before_anything_happens(scenes, tmp_path, name):
    with pytest.raises(ValueError, match=r"\.gif, \.mp4, \.svg"):
        write_video(scenes, tmp_path / "folder" / name)
    with pytest.raises(ValueError, match=r"\.gif, \.mp4, \.svg"):
        watch("no such map", out=tmp_path / "folder" / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", [".gif", ".mp4"])
def test_a_failure_leaves_the_old_file_and_nothing_else(scenes, tmp_path, monkeypatch, suffix):
    path = tmp_path / f"battle{suffix}"
    path.write_bytes(b"old")
    frames = []

    def breaks(scene, *, size):
        frames.append(scene)
        if len(frames) > 8:
            raise RuntimeError("no more paint")
        return draw(scene, size=size)

    draw = watching.to_rgb
    monkeypatch.setattr(watching, "to_rgb", breaks)
    with pytest.raises(RuntimeError, match="no more paint"):
        write_video(scenes, path, size=64)
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == b"old"


def test_no_scenes_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no scenes"):
        write_video([], tmp_path / "battle.gif")
    assert not list(tmp_path.iterdir())


def test_summary_counts_the_losses(scenes):
    end = scenes[-1]
    fallen = [sum(not u.alive for u in end.of(side)) for side in ("ally", "enemy")]
    assert summary(scenes) == (
        f"3m: {end.outcome} after {end.step} steps, return {end.total_reward:.2f}, "
        f"{fallen[0]} of 3 allies lost, {fallen[1]} of 3 enemies killed"
    )
    assert summary(scenes[:3]).startswith("3m: stopped after 2 steps")


def test_plain_output_has_key_moments_and_the_outcome(scenes):
    console, screen = terminal(width=50)
    play_in_terminal(scenes, console=console)
    text = screen.getvalue()
    assert "\x1b" not in text
    assert text.splitlines()[-1] == summary(scenes)
    shown = [line for line in text.splitlines() if line.startswith("3m  step")]
    assert len(shown) == 3 and shown[-1] == f"3m  step {scenes[-1].step} of 60"
    full = "[" + "=" * watching.BAR_WIDTH + "]"
    assert text.count(full) < 6, "the first key moment shows the first damage"


def test_letters_stand_where_units_do(scenes):
    console, screen = terminal(width=80)
    ally, foe = scenes[0].units[0], scenes[0].units[-1]
    # The ground of 3m is 32 x 16 cells from (0, 8), with a wall of one cell around it.
    ally = dataclasses.replace(ally, x=2.5, y=23.5)
    foe = dataclasses.replace(foe, x=31.5, y=8.5)
    play_in_terminal([dataclasses.replace(scenes[0], units=(ally, foe))], console=console)
    board = [line for line in screen.getvalue().splitlines() if line.startswith("##")]
    assert len(board) == 18 and board[0] == "#" * 68
    assert board[1] == "##. . M " + ". " * 29 + "##"
    assert board[-2] == "##" + ". " * 31 + " m##"


def test_terminal_animates_and_fits_its_window(scenes):
    console, screen = terminal(force_terminal=True, width=60, height=16, color_system="truecolor")
    play_in_terminal(scenes[:4], console=console, fps=1000.0)
    text = screen.getvalue()
    assert "\x1b[38;2;" in text
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).splitlines()
    titles = dict.fromkeys(line for line in plain if line.startswith("3m  step"))
    assert list(titles) == [f"3m  step {step} of 60" for step in range(4)]
    # At half the detail: a letter for each square of two by two cells.
    board = [line for line in plain if line.count(".") > 9]
    assert len(board) % 9 == 0 and {len(line) for line in board} == {34}
    assert plain[-1] == summary(scenes[:4])


def test_watch_writes_a_file_and_one_line(recording, tmp_path, monkeypatch):
    played = []

    def recorded(env, player, *, seed):
        played.append((env.spec.name, player.name, seed))
        return recording

    monkeypatch.setattr(watching, "record", recorded)
    console, screen = terminal(width=30)
    path = tmp_path / "[end].svg"
    watch("3m", policy="stop", seed=7, out=path, console=console)
    assert played == [("sim:3m", "stop", 7)]
    assert screen.getvalue() == f"{summary(recording.scenes())}; wrote {path}\n"
    assert path.exists()


def test_watch_plays_in_the_terminal(recording, monkeypatch):
    monkeypatch.setattr(watching, "record", lambda env, player, *, seed: recording)
    console, screen = terminal()
    watch("3m", console=console)
    assert screen.getvalue().endswith(f"{summary(recording.scenes())}\n")


def test_watch_keeps_a_battle_and_shows_it_again(recording, tmp_path):
    first, second, page = (tmp_path / n for n in ("a.battle.json", "b.battle.json.GZ", "c.html"))
    write(recording, first)
    for source, out in ((first, second), (second, page)):
        console, screen = terminal(width=200)
        watch(str(source), out=out, console=console)
        assert screen.getvalue() == f"{summary(recording.scenes())}; wrote {out}\n"
    assert read(second) == recording and page.read_text().startswith("<!doctype html>")
    console, screen = terminal()
    watch(str(second), console=console)
    assert screen.getvalue().endswith(f"{summary(recording.scenes())}\n")
    assert len(list(tmp_path.iterdir())) == 3


def test_watch_refuses_to_play_what_has_been_played(recording, tmp_path):
    path = tmp_path / "a.battle.json"
    write(recording, path)
    for options in ({"policy": "random"}, {"seed": 3}):
        with pytest.raises(EnvError, match="played already"):
            watch(str(path), **options)


def test_watch_says_what_is_wrong_with_a_file(tmp_path):
    path = tmp_path / "a.battle.json"
    path.write_text("{}")
    with pytest.raises(RecordingError, match="not a recorded battle"):
        watch(str(path))


@pytest.mark.parametrize("source", ["runs/nope", "folder", "file.txt", "./2s4z"])
def test_watch_says_that_a_path_is_nothing_to_watch(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file.txt").touch()
    with pytest.raises(EnvError) as caught:
        watch(source)
    assert str(caught.value) == f"{source} is neither a run's folder, a map nor a recorded battle"


def test_watch_takes_the_name_of_a_map_for_it_even_where_a_folder_has_it(
    recording, tmp_path, monkeypatch
):
    monkeypatch.setattr(watching, "record", lambda env, player, *, seed: recording)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "3m").mkdir()
    watch("3m", console=terminal()[0])
    with pytest.raises(EnvError, match="did you mean nearest"):
        watch("3m", policy="neerest")


@pytest.mark.parametrize("name", ["a.battle.json", "a.battle.json.gz", "no/where.battle.json"])
def test_watch_says_that_a_recording_is_not_there(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=f"^there is no recorded battle at {name}$"):
        watch(name)


@pytest.mark.parametrize("suffix", [".gif", ".mp4", ".svg", ".html", ".battle.json"])
def test_watch_names_the_file_that_cannot_be_written(recording, suffix, tmp_path, monkeypatch):
    monkeypatch.setattr(watching, "record", lambda env, player, *, seed: recording)
    (tmp_path / "file").touch()
    out = tmp_path / "file" / f"battle{suffix}"
    with pytest.raises(OSError, match=f"^cannot write {out}: {tmp_path / 'file'} is a file$"):
        watch("3m", out=out)
    out = Path(f"/proc/battle{suffix}")
    with pytest.raises(OSError, match=f"^cannot write {out}: No such file or directory$"):
        watch("3m", out=out)


def test_watch_draws_nothing_but_the_simulator(monkeypatch):
    monkeypatch.setattr(watching, "make_env", lambda name: CountingEnv())
    with pytest.raises(EnvError, match="only battles of the embedded simulator"):
        watch("other:world")


@pytest.mark.parametrize("options", [{"source": "3n"}, {"source": "3m", "policy": "neerest"}])
def test_watch_helps_with_wrong_names(options):
    with pytest.raises(EnvError, match="did you mean"):
        watch(**options, out=Path("never.gif"))
