"""A recorded battle: the battle that was played, whole on file, and nothing else taken for one."""

from __future__ import annotations

import dataclasses
import gzip
import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from majepa import recording as recordings
from majepa.envs import make_env
from majepa.envs.scripted import scripted_policy
from majepa.envs.sim.scene import scene_of
from majepa.recording import (
    DECIMALS,
    FORMAT,
    Recording,
    RecordingError,
    ScriptedPlayer,
    from_json,
    read,
    record,
    to_json,
    write,
)


class CoinPlayer:
    """Samples from known probabilities and counts the rows it saw."""

    name, choice = "coin", "sampled"

    def begin(self) -> int:
        return 0

    def act(self, carry, row, key):
        favours = jnp.arange(row.legal.shape[-1], dtype=jnp.float32)
        log_probs = jax.nn.log_softmax(jnp.where(row.legal, favours[None, None], -jnp.inf))
        return jax.random.categorical(key, log_probs), log_probs, carry + 1


@pytest.fixture(scope="module")
def env():
    return make_env("2s3z")


@pytest.fixture(scope="module")
def scripted(env) -> Recording:
    return record(env, ScriptedPlayer.named("nearest", env.spec), seed=1)


@pytest.fixture(scope="module")
def sampled(env) -> Recording:
    return record(env, CoinPlayer(), seed=2)


@pytest.mark.slow
def test_the_battle_is_the_one_that_reset_and_step_play(env, scripted):
    """Scenes straight from the simulator, for the same seed, up to rounding."""
    policy = scripted_policy("nearest", env.spec)
    key_env, key_policy = jax.random.split(jax.random.key(1))
    advance = jax.jit(lambda s, r, k: env.step(s, policy(r.observation, r.legal, k)))
    state, row = jax.jit(env.reset)(key_env[None])
    total, scenes = 0.0, scripted.scenes()
    for number, scene in enumerate(scenes):
        live = scene_of(env, state)
        live = dataclasses.replace(live, total_reward=total)
        assert rounded(dataclasses.asdict(live)) == rounded(dataclasses.asdict(scene))
        assert row.is_last[0] == (number == len(scenes) - 1)
        state, row = advance(state, row, jax.random.fold_in(key_policy, number + 1))
        total += float(row.reward[0])


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return round(value, DECIMALS) if isinstance(value, float) else value


def test_the_header_says_what_was_played(env, scripted):
    header = scripted.header
    assert (header.environment, header.environment_version) == ("sim:2s3z", env.spec.version)
    assert (header.player, header.choice, header.seed) == ("nearest", "scripted", 1)
    assert header.limit == 120 and header.agent_names == env.spec.agent_names
    assert [unit.side for unit in header.units] == ["ally"] * 5 + ["enemy"] * 5
    stalker = header.units[0]
    assert (stalker.kind, stalker.glyph, stalker.sight_range) == ("stalker", "S", 9.0)
    assert (stalker.hp_max, stalker.shield_max) == (80.0, 80.0)


@pytest.mark.parametrize("which", ["scripted", "sampled"])
def test_orders_are_legal_and_the_dead_do_nothing(which, request):
    recording: Recording = request.getfixturevalue(which)
    assert [step.orders is None for step in recording.steps[:-1]] == [False] * (
        len(recording.steps) - 1
    )
    assert recording.steps[-1].orders is None
    for step in recording.steps[:-1]:
        assert all(order in legal for order, legal in zip(step.orders, step.legal, strict=True))
        for unit, legal in zip(step.units, step.legal, strict=False):
            assert unit.alive or legal == (0,)


def test_probabilities_are_those_of_the_player(scripted, sampled):
    assert all(step.probabilities is None for step in scripted.steps)
    assert sampled.steps[-1].probabilities is None and sampled.header.choice == "sampled"
    for step in sampled.steps[:-1]:
        for legal, probabilities in zip(step.legal, step.probabilities, strict=True):
            expected = jax.nn.softmax(jnp.array(legal, jnp.float32))
            assert probabilities == pytest.approx(expected.tolist(), abs=1e-4)
            assert sum(probabilities) == pytest.approx(1, abs=1e-3)


def test_a_recording_may_stop_early(env, scripted):
    short = record(env, ScriptedPlayer.named("nearest", env.spec), seed=1, max_steps=2)
    assert short.outcome is None and len(short.steps) == 3
    assert short.steps[:2] == scripted.steps[:2] and short.scenes()[:2] == scripted.scenes()[:2]
    assert short.steps[2].orders is None


@pytest.mark.parametrize("suffix", [".battle.json", ".battle.json.gz"])
@pytest.mark.parametrize("which", ["scripted", "sampled"])
def test_what_is_read_is_what_was_written(which, suffix, request, tmp_path):
    recording: Recording = request.getfixturevalue(which)
    path = tmp_path / "new" / f"x{suffix}"
    write(recording, path)
    assert read(path) == recording
    assert list(path.parent.iterdir()) == [path]
    first = path.read_bytes()
    assert len(first) < 100_000
    write(recording, path)
    assert path.read_bytes() == first, "equal battles are equal files"


def test_a_failure_leaves_the_old_file_and_nothing_else(scripted, tmp_path, monkeypatch):
    path = tmp_path / "x.battle.json.gz"
    path.write_bytes(b"old")
    monkeypatch.setattr(type(path), "replace", lambda self, target: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write(scripted, path)
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == b"old"


def test_a_recording_has_its_own_suffix(scripted, tmp_path):
    with pytest.raises(RecordingError, match=r"\.battle\.json or \.battle\.json\.gz"):
        write(scripted, tmp_path / "x.json")
    assert not list(tmp_path.iterdir())


def changed(recording: Recording, **changes: Any) -> str:
    return json.dumps(json.loads(to_json(recording)) | changes)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not JSON"),
        (b"# a page", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff\xfe\x00", "damaged"),
        (b"\x1f\x8b\x00\x00", "damaged"),
        (b"[]", "not a recorded battle"),
        (b'{"kind": "replay", "format": 1}', "not a recorded battle"),
        (b'{"kind": "majepa battle", "format": 1}', "missing"),
    ],
)
def test_files_that_are_no_recordings(data, message, tmp_path):
    path = tmp_path / "x.battle.json"
    path.write_bytes(data)
    with pytest.raises(RecordingError, match=message) as caught:
        read(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_a_truncated_file_is_refused(scripted, tmp_path):
    text = to_json(scripted).encode()
    for name, data in (("x.battle.json", text), ("x.battle.json.gz", gzip.compress(text))):
        path = tmp_path / name
        path.write_bytes(data[: len(data) // 2])
        with pytest.raises(RecordingError, match="truncated"):
            read(path)


@pytest.mark.parametrize("number", [FORMAT + 1, 0, "1", None])
def test_a_newer_format_asks_for_a_newer_majepa(scripted, number):
    with pytest.raises(RecordingError, match="update majepa"):
        from_json(changed(scripted, format=number))


def spoil(recording: Recording, *path: str | int, value: Any = ...) -> str:
    """The recording's JSON with one entry replaced, or left out."""
    content = json.loads(to_json(recording))
    *parents, last = path
    place = content
    for key in parents:
        place = place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return json.dumps(content)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("header", "seed"), ..., r"header\.seed"),
        (("header", "choice"), "guessed", r"header\.choice"),
        (("header", "units", 0), ..., "its agents"),
        (("header", "units", 0, "hp_max"), "many", r"units\[0\]\.hp_max"),
        (("header", "terrain", "spans"), [], "terrain"),
        (("outcome",), "well", "outcome"),
        (("steps",), [], "no steps"),
        (("steps", 3, "reward"), ..., r"steps\[3\]\.reward"),
        (("steps", 3, "reward"), float("nan"), r"steps\[3\]\.reward"),
        (("steps", 3, "units", 2), [1, 2], r"steps\[3\]\.units\[2\]"),
        (("steps", 3, "units", 2), ..., "step 3 does not fit"),
        (("steps", 3, "units", 2, 7), 10, "step 3 does not fit"),
        (("steps", 3, "orders"), [99] * 5, "step 3 does not fit"),
        (("steps", 3, "orders"), [1], "step 3 does not fit"),
        (("steps", 3, "legal", 0), [99], "step 3 does not fit"),
        (("steps", 3, "probabilities"), [[1.0]] * 5, "step 3 does not fit"),
    ],
)
def test_a_broken_recording_is_named_where_it_breaks(scripted, path, value, message):
    with pytest.raises(RecordingError, match=message) as caught:
        from_json(spoil(scripted, *path, value=value))
    assert "\n" not in str(caught.value)


def test_extra_fields_do_no_harm(scripted):
    assert from_json(changed(scripted, note="kept by a later version")) == scripted


def test_names_of_recordings():
    assert recordings.is_recording("runs/a/X.Battle.JSON.gz")
    assert not recordings.is_recording("2s3z") and not recordings.is_recording("x.json")
