"""Watch a battle: play one episode, or take one from a file, then show or keep it.

The recording plays in the terminal as a map of letters, or goes to a file: a page to look into it
(`.html`), a video (`.gif`, `.mp4`), a drawing of the end (`.svg`), or the recording itself.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from .config import require_seed
from .envs.base import Env, EnvError
from .envs.make import make_env
from .envs.sim.env import BattleEnv
from .envs.sim.render import COLOURS, bounds, to_rgb, to_svg
from .envs.sim.scene import Scene, SceneUnit, Side, blend
from .files import written_beside
from .recording import SUFFIXES, Recording, ScriptedPlayer, is_recording, read, record, write
from .run_folder import CONFIG
from .viewer.page import to_html

FRAMES_PER_STEP = 2
"""Units move up to one and a half cells in a step; a frame between shows a walk, not a jump."""
HOLD_SECONDS = 1.5
"""How long a video shows the end of the battle."""


def watch(
    source: str,
    policy: str | None = None,
    seed: int | None = None,
    out: Path | None = None,
    *,
    console: Console | None = None,
) -> None:
    """Show a battle in the terminal or write it to a file, and say how it ended.

    `source` is a map, on which `policy` plays, the folder of a run, whose agents play, or the file
    of a recorded battle.
    """
    if out is not None:
        _check_suffix(out)
    if seed is not None:
        require_seed(seed)
    if (Path(source) / CONFIG).is_file():
        recording = play_run(Path(source), policy or "argmax", seed or 0)
    elif not is_recording(source):
        recording = play(source, policy or "nearest", seed or 0)
    elif policy is None and seed is None:
        recording = read(Path(source))
    else:
        raise EnvError(f"{source} has been played already; leave out the policy and the seed")
    show(recording, out, console=console)


def play(map_name: str, policy: str, seed: int) -> Recording:
    """One battle of a scripted policy."""
    env = battle_env(map_name)
    return record(env, ScriptedPlayer.named(policy, env.spec), seed=seed)


def play_run(folder: Path, actions: str, seed: int) -> Recording:
    """One battle of trained agents, with argmax or sampled actions."""
    from .team import make_player, open_run

    if actions not in ("argmax", "sampled"):
        raise EnvError(f"the agents of a run take argmax or sampled actions, not {actions!r}")
    run = open_run(folder)
    return record(_drawable(run.env), make_player(run, greedy=actions == "argmax"), seed=seed)


def battle_env(map_name: str) -> BattleEnv:
    try:
        env = make_env(map_name)
    except EnvError as error:
        if "/" not in map_name and not Path(map_name).exists():
            raise
        raise EnvError(
            f"{map_name} is neither a run's folder, a map nor a recorded battle"
        ) from error
    return _drawable(env)


def _drawable(env: Env) -> BattleEnv:
    if not isinstance(env, BattleEnv):
        raise EnvError(
            f"{env.spec.name} cannot be watched: only battles of the embedded simulator can be "
            "drawn; name one of its maps, such as sim:2s3z"
        )
    return env


def show(recording: Recording, out: Path | None, *, console: Console | None = None) -> None:
    console = console or Console()
    scenes = recording.scenes()
    if out is None:
        play_in_terminal(scenes, console=console)
        return
    if is_recording(out):
        write(recording, out)
    elif out.suffix.lower() == PAGE:
        with written_beside(out) as partial:
            partial.write_text(to_html(recording), encoding="utf-8")
    else:
        write_video(scenes, out)
    _say(console, f"{summary(scenes)}; wrote {out}")


def write_video(scenes: Sequence[Scene], path: Path, *, fps: float = 8.0, size: int = 640) -> None:
    """Write scenes to a file whose suffix says how; `fps` counts steps, not the frames between."""
    _check_suffix(path, VIDEOS)
    if not scenes:
        raise ValueError("there are no scenes to write; record an episode first")
    with written_beside(path) as partial:
        partial.touch()  # An encoder that cannot write would name this file and not `path`.
        VIDEOS[path.suffix.lower()](scenes, partial, fps, size)


def play_in_terminal(
    scenes: Sequence[Scene], *, console: Console | None = None, fps: float = 8.0
) -> None:
    """Animate a battle on a terminal; elsewhere print its key moments. Then say how it ended."""
    console = console or Console()
    if console.is_terminal:
        coarse = _coarseness(scenes[0], console)
        with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
            for scene in scenes:
                live.update(_picture(scene, coarse), refresh=True)
                time.sleep(1 / fps)
    else:
        for scene in _key_moments(scenes):
            console.print(_picture(scene, 1), soft_wrap=True)
    _say(console, summary(scenes))


def summary(scenes: Sequence[Scene]) -> str:
    """How an episode ended, in one line."""
    end = scenes[-1]
    parts = [f"{end.map_name}: {end.outcome or 'stopped'} after {end.step} steps"]
    if end.total_reward is not None:
        parts.append(f"return {end.total_reward:.2f}")
    for side, fate in (("allies", "lost"), ("enemies", "killed")):
        team = end.of(SIDES[side])
        parts.append(f"{sum(not unit.alive for unit in team)} of {len(team)} {side} {fate}")
    return ", ".join(parts)


def _say(console: Console, words: str) -> None:
    console.print(words, soft_wrap=True, markup=False, highlight=False)


# Files.

Writer = Callable[[Sequence[Scene], Path, float, int], None]


def _write_gif(scenes: Sequence[Scene], path: Path, fps: float, size: int) -> None:
    # One palette for all frames, made from a few of them: files half as large, written ten times
    # as fast as with a palette for each.
    samples = [scenes[at] for at in np.linspace(0, len(scenes) - 1, 6).astype(int)]
    sheet = np.concatenate([to_rgb(scene, size=size) for scene in samples])
    palette = Image.fromarray(sheet).quantize(256)
    frames = (
        Image.fromarray(to_rgb(scene, size=size)).quantize(
            palette=palette, dither=Image.Dither.NONE
        )
        for scene in _smooth(scenes, fps)
    )
    duration = 1000 / (fps * FRAMES_PER_STEP)
    next(frames).save(path, save_all=True, append_images=frames, duration=duration, loop=0)


def _write_mp4(scenes: Sequence[Scene], path: Path, fps: float, size: int) -> None:
    import imageio_ffmpeg

    height, width, _ = to_rgb(scenes[0], size=size).shape
    source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}"]
    source += ["-r", str(fps * FRAMES_PER_STEP), "-i", "-"]
    # The one pixel format that every browser plays, and its header in front, to play at once.
    target = ["-c:v", "libx264", "-crf", "18", "-pix_fmt", "yuv420p", "-movflags", "+faststart"]
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-y", *source, *target, str(path)]
    # Not through imageio, which runs code of its own after the fork: JAX's threads may hang it.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as encoder:
        assert encoder.stdin
        with contextlib.suppress(BrokenPipeError):
            for scene in _smooth(scenes, fps):
                encoder.stdin.write(to_rgb(scene, size=size).tobytes())
        _, complaint = encoder.communicate()
    if encoder.returncode:
        raise RuntimeError(f"ffmpeg could not write {path}: {complaint.decode().strip()}")


def _write_svg(scenes: Sequence[Scene], path: Path, fps: float, size: int) -> None:
    path.write_text(to_svg(scenes[-1]), encoding="utf-8")


VIDEOS: Mapping[str, Writer] = {".gif": _write_gif, ".mp4": _write_mp4, ".svg": _write_svg}
PAGE = ".html"


def _check_suffix(path: Path, suffixes: Iterable[str] = (*VIDEOS, PAGE, *SUFFIXES)) -> None:
    if not path.name.lower().endswith(tuple(suffixes)):
        raise EnvError(
            f"cannot write {str(path)!r}: name a file that ends in {', '.join(suffixes)}"
        )


def _smooth(scenes: Sequence[Scene], fps: float) -> Iterator[Scene]:
    """All frames of a video: scenes, what lies between them, and the end for a while."""
    for before, after in itertools.pairwise(scenes):
        for part in range(FRAMES_PER_STEP):
            yield blend(before, after, part / FRAMES_PER_STEP)
    yield from [scenes[-1]] * max(round(HOLD_SECONDS * fps * FRAMES_PER_STEP), 1)


# The terminal.

SIDES: Mapping[str, Side] = {"allies": "ally", "enemies": "enemy"}
BAR_WIDTH = 24


def _picture(scene: Scene, coarse: int) -> Group:
    step = f"{scene.map_name}  step {scene.step} of {scene.limit}"
    return Group(Text(step, style="bold"), *_standings(scene), _board(scene, coarse))


def _standings(scene: Scene) -> Iterator[Text]:
    """One line per side: its strength and who lives. Allies have capital letters on the map."""
    for words, side in SIDES.items():
        team = scene.of(side)
        part = sum(u.vitality for u in team) / sum(u.hp_max + u.shield_max for u in team)
        bar = "=" * math.ceil(part * BAR_WIDTH)
        line = Text(f"{words:8}[{bar:{BAR_WIDTH}}] {part:4.0%}", style=COLOURS[side])
        for kind in dict.fromkeys(unit.kind for unit in team):
            squad = [unit for unit in team if unit.kind == kind]
            living = sum(unit.alive for unit in squad)
            line.append(f"  {_letter(squad[0])} {kind} {living}/{len(squad)}")
        yield line


def _board(scene: Scene, coarse: int) -> Text:
    """Two characters for each cell, or square of cells: an ally's letter, then an enemy's."""
    west, south, east, north = (int(edge) for edge in bounds(scene.terrain))
    rows, columns = (math.ceil(length / coarse) for length in (north - south, east - west))
    grid = np.full((rows, columns, 2), "#")
    for mark, spans in (("~~", scene.terrain.cliffs), (". ", scene.terrain.spans)):
        for y, x_from, x_to in spans:
            first, last = (x_from - west) // coarse, (x_to - 1 - west) // coarse
            grid[(y - south) // coarse, first : last + 1] = list(mark)
    for unit in scene.units:
        if unit.alive:
            row = min(max(int(unit.y - south) // coarse, 0), rows - 1)
            column = min(max(int(unit.x - west) // coarse, 0), columns - 1)
            cell = grid[row, column]
            cell[int(unit.side == "enemy")] = _letter(unit)
            cell[cell == "."] = " "
    lines = ("".join(line.ravel().tolist()) for line in grid[::-1])
    board = Text("\n".join((*lines, "")), no_wrap=True, overflow="crop")
    board.highlight_regex(r"[#.~ ]+", "grey42")
    board.highlight_regex(r"[A-Z]", f"bold {COLOURS['ally']}")
    board.highlight_regex(r"[a-z]", f"bold {COLOURS['enemy']}")
    return board


def _letter(unit: SceneUnit) -> str:
    return unit.glyph.upper() if unit.side == "ally" else unit.glyph.lower()


def _coarseness(scene: Scene, console: Console) -> int:
    """How many cells a letter must stand for, so that the map and three lines of text fit."""
    west, south, east, north = bounds(scene.terrain)
    wide, high = 2 * (east - west) / console.width, (north - south) / max(console.height - 4, 1)
    return max(math.ceil(max(wide, high)), 1)


def _key_moments(scenes: Sequence[Scene]) -> list[Scene]:
    """First blood, the end, and the middle between them."""
    full = sum(unit.vitality for unit in scenes[0].units)
    end = len(scenes) - 1
    hurt = (at for at, s in enumerate(scenes) if sum(u.vitality for u in s.units) < full)
    contact = next(hurt, 0)
    return [scenes[at] for at in sorted({contact, (contact + end) // 2, end})]
