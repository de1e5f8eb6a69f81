"""Updates in several programs are those in one, and a replay in host memory changes nothing."""

import contextlib
import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agent.test_agent import Marking, batch_of, blank, compiled, marking
from agent.test_packed import ALGO, ALGORITHM, ENV
from drawn import jit, quick
from runs.counting import CountingEnv
from safetensors.numpy import load_file

from majepa import call_by_call, lanes, machine
from majepa import training as loop
from majepa.agent import Majepa
from majepa.algorithm import InPrograms, Updater, without_replay
from majepa.checks import Memory
from majepa.collect import collect
from majepa.config import MAPPO_DEBUG, ConfigError, EvaluationConfig, TrainConfig
from majepa.flat import flattened, restored
from majepa.memory import Need, bytes_of
from majepa.run import Result
from majepa.run_folder import CHECKPOINT, read_config
from majepa.training import run_shapes, train, train_together
from majepa.world_model import unroll
from majepa.world_model.strands import Tracks, TrackShape, lay_out, lay_out_runs
from majepa.world_model.track_shapes import cost_of, shapes_of_tracks
from majepa.world_model.unroll import first_needed

(DEVICE, *_) = jax.devices()
CONFIG = TrainConfig(
    ALGO, env="test:counting", steps=60, evaluation=EvaluationConfig(every=1000, final_episodes=6)
)


def placed(place: str, config: TrainConfig = CONFIG) -> TrainConfig:
    replay = dataclasses.replace(config.algo.replay, place=place)
    return dataclasses.replace(config, algo=dataclasses.replace(config.algo, replay=replay))


def assert_same(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize(
    ("mode", "host"),
    [
        pytest.param("none", None, marks=pytest.mark.slow),
        ("model", None),
        ("model", DEVICE),
        pytest.param("behaviour", None, marks=pytest.mark.slow),
        pytest.param("behaviour", DEVICE, marks=pytest.mark.slow),
    ],
)
def test_every_batch_leaves_the_same_learner_and_metrics(mode, host):
    """Views, marks in the replay, counters: of an algorithm that leaves marks, not learning."""
    algorithm = marking(mode)
    assert isinstance(algorithm, InPrograms)
    updater = algorithm.updater(host=host)
    assert isinstance(updater, Updater)
    in_one, in_parts = blank(algorithm), updater.place(flattened(blank(algorithm)))
    for row in range(24):
        key = jax.random.key(row)
        in_one, expected = compiled(algorithm)(in_one, batch_of(row), key)
        in_parts, metrics = updater(in_parts, batch_of(row), key)
        assert_same(in_one, restored(in_parts))
        told = metrics().by_name()
        assert told.keys() <= expected.keys()
        for name, value in expected.items():
            if name in told:
                assert np.float32(told[name]).tobytes() == np.float32(value).tobytes(), name
            else:
                assert np.isnan(value), name
    assert in_one.calls > 2 and {"model/place", "behaviour/place"} <= told.keys()


def test_a_call_that_was_begun_for_nothing_changes_nothing():
    """The first one of an update is begun before anybody knows whether it is owed."""
    algorithm = marking()
    updater = algorithm.updater()
    learner, key = flattened(blank(algorithm)), jax.random.key(0)
    for row in range(24):
        learner, _ = updater(learner, batch_of(row), key)
    assert updater._expects_calls
    kept = jax.tree.map(np.array, restored(learner))
    begun, first_half = [], updater._first_half
    updater._first_half = lambda *given: begun.append(given) or first_half(*given)
    learner, model, behaviour = updater.learn(learner, key, jnp.asarray(0))
    assert len(begun) == 1 and model == behaviour == []
    assert_same(kept, restored(learner))
    # Nor is one begun after that, until calls are owed again.
    learner, *_ = updater.learn(learner, key, jnp.asarray(0))
    assert len(begun) == 1


@pytest.mark.slow
def test_packed_runs_get_the_calls_they_are_owed():
    """Runs that are not in step: one of them waits while another learns."""
    algorithm = marking()
    updater = algorithm.updater(together=True)
    alone = [blank(algorithm) for _ in range(2)]
    # The other run has a head start, so that it earns calls earlier.
    for row in range(8):
        alone[1], _ = compiled(algorithm)(alone[1], batch_of(row), jax.random.key(100 + row))
    both = flattened(jax.tree.map(lambda *leaves: jnp.stack(leaves), *alone))
    differed = False
    for row in range(8, 26):
        keys = jax.random.split(jax.random.key(row))
        data = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), batch_of(row))
        before = [int(learner.calls) for learner in alone]
        results = [
            compiled(algorithm)(learner, batch_of(row), key)
            for learner, key in zip(alone, keys, strict=True)
        ]
        alone = [learner for learner, _ in results]
        made = [int(learner.calls) - calls for learner, calls in zip(alone, before, strict=True)]
        differed |= made[0] != made[1]
        both, metrics = updater(both, data, keys)
        for lane, (learner, expected) in enumerate(results):
            assert_same(learner, jax.tree.map(lambda leaf, lane=lane: leaf[lane], restored(both)))
            values = jax.tree.map(lambda leaf, lane=lane: leaf[lane], metrics()).by_name()
            for name, value in values.items():
                np.testing.assert_array_equal(value, expected[name], err_msg=name)
    assert differed and min(int(learner.calls) for learner in alone) > 2


LEARNING = marking().config.replay.learning


def noting_tracks(updater: call_by_call.CallByCall, then) -> None:
    """What latents are drawn for, and on which tracks, is told before they are."""
    latents = updater._latents

    def note(local, view, key, tracks):
        then(view, tracks)
        return latents(local, view, key, tracks)

    updater._latents = note


def shapes_of(algorithm: Majepa, apart: int, counts: tuple[int, ...]) -> list[TrackShape]:
    """More than sequences of one or two chunks have, cheapest first."""
    longest = algorithm.config.context + algorithm.config.replay.learning
    lengths = range(apart, longest + apart, apart)
    shapes = [TrackShape(count, length) for count in counts for length in lengths]
    return sorted(shapes, key=lambda shape: cost_of(shape, algorithm.spec.num_agents))


@pytest.mark.parametrize("counts", [(1,), (1, 2)])
def test_latents_are_drawn_on_the_tracks_that_a_view_needs(counts):
    """They are laid out for the view of that very call, and their shape chooses the program."""
    algorithm = marking()
    traced = []

    class Noting(type(algorithm)):
        def draw_latents(self, local, view, key, tracks):
            traced.append(tracks.shape)
            return super().draw_latents(local, view, key, tracks)

    noting = Noting(algorithm.config, algorithm.spec, steps=algorithm.steps)
    updater, context = noting.updater(), noting.config.context
    shapes = shapes_of(noting, size := 2, counts)
    updater._shapes = lambda runs: shapes
    chosen = []

    def check(view, tracks):
        expected = lay_out(np.asarray(view.record.is_first), context, shapes)
        assert_same(tracks, expected)
        # Of one sequence alone, as this algorithm has it: from its own beginning on.
        needed = context + noting.config.replay.learning - int(first_needed(view.record, context))
        count, length = tracks.shape
        assert needed <= count * length and (count > 1 or length - size < needed)
        chosen.append(tracks.shape)

    noting_tracks(updater, check)
    learner = flattened(blank(noting))
    for row in range(30):
        learner, _ = updater(learner, batch_of(row), jax.random.key(row))
    assert len(chosen) == int(learner.calls) - noting.config.collect.model_only_calls
    assert len(set(chosen)) > 1 and sorted(traced) == sorted(set(chosen))
    assert max(shape.tracks for shape in chosen) == max(counts)


@pytest.mark.slow
def test_packed_runs_have_tracks_of_one_shape():
    algorithm = Marking(marking().config, marking().spec, steps=marking().steps)
    updater, context = algorithm.updater(together=True), algorithm.config.context
    shapes, asked, differed = shapes_of(algorithm, 2, (1, 2)), set(), []
    updater._shapes = lambda runs: asked.add(runs) or shapes

    def check(view, tracks):
        is_first = np.asarray(view.record.is_first)
        assert_same(tracks, lay_out_runs(is_first, context, shapes))
        alone = {lay_out(one, context, shapes).shape for one in is_first}
        assert tracks.time.shape == (2, *tracks.shape)
        differed.append(len(alone) > 1)

    noting_tracks(updater, check)
    learner = flattened(jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), blank(algorithm)))
    for row in range(24):
        data = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), batch_of(row))
        learner, _ = updater(learner, data, jax.random.split(jax.random.key(row)))
    assert any(differed) and asked == {2}


@pytest.mark.parametrize("runs", [1, 3])
def test_shapes_are_those_for_the_agents_of_all_runs(runs):
    sizes = (ALGO.replay.batch, ALGO.context, ALGO.replay.learning)
    expected = shapes_of_tracks(*sizes, rows=runs * ENV.spec.num_agents)
    assert call_by_call.shapes_for(ALGORITHM, runs) == expected


@pytest.mark.parametrize("runs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_contexts_and_roots_are_those_of_what_a_view_needs(monkeypatch, runs):
    """Of that very call: from the last place on that is enough for all sequences of all runs. The
    context of an update's first call is whole, since it is begun before anything is known."""
    algorithm = Marking(marking().config, marking().spec, steps=marking().steps)
    updater, context = algorithm.updater(together=runs > 1), algorithm.config.context
    updater._beginnings = [9, 6, 3, 0]
    noted, differed, is_begun = {"_recall": [], "_roots": []}, [], []

    def several(leaf):
        return leaf if runs == 1 else jnp.stack([leaf] * runs)

    def noting(name):
        found = getattr(updater, name)

        def program(begin):
            def run(local, joint, view, *more):
                is_first = np.asarray(view.record.is_first).reshape(runs, -1, context + LEARNING)
                needed = [np.flatnonzero(one[0, : context + 1]) for one in is_first]
                needed = [int(places[-1]) if len(places) else 0 for places in needed]
                differed.append(needed[0] > min(needed))
                least = min(needed)
                if name == "_recall" and not is_begun:
                    assert begin == 0
                else:
                    assert begin <= least and not any(begin < n <= least for n in (3, 6, 9))
                noted[name].append(begin)
                is_begun.append(True)
                return found(begin)(local, joint, view, *more)

            return run

        return program

    for name in noted:
        monkeypatch.setattr(updater, name, noting(name))
    learner = flattened(jax.tree.map(several, blank(algorithm)))
    for row in range(30):
        data, key = jax.tree.map(several, batch_of(row)), jax.random.key(row)
        key = key if runs == 1 else jax.random.split(key, runs)
        is_begun.clear()
        learner, _ = updater(learner, data, key)
    calls = int(np.max(learner.calls))
    assert len(noted["_recall"]) >= calls > len(noted["_roots"]) > 0
    assert all(len(set(begun)) > 1 for begun in noted.values())
    assert any(differed) == (runs > 1)


@pytest.mark.parametrize(("together", "host"), [(False, None), (False, DEVICE), (True, None)])
def test_programs_are_traced_for_every_shape(together, host):
    algorithm = Marking(marking().config, marking().spec, steps=marking().steps)
    updater = algorithm.updater(together=together, host=host)
    learner = blank(algorithm)
    data, key = batch_of(0), jax.random.key(0)
    if together:
        learner, data = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), (learner, data))
        key = jax.random.split(key)
    programs = updater.programs(updater.place(flattened(learner)), data, key)
    # Arguments of those that draw latents end with the tracks.
    last = [program.lowered.in_avals[0][-1] for program in programs]
    tracks = [one for one in last if isinstance(one, Tracks)]
    runs = (2,) if together else ()
    expected = call_by_call.shapes_for(algorithm, 2 if together else 1)
    assert len({shape.tracks for shape in expected}) > 1
    assert [one.time.shape for one in tracks] == [(*runs, *shape) for shape in expected[::-1]]


def test_nothing_small_is_run_between_the_halves_of_a_call(times_compiled):
    """A program to find a minimum, say, would wait for the first half, and the host for it."""
    algorithm = Marking(marking().config, marking().spec, steps=marking().steps)
    updater, learner = algorithm.updater(), flattened(blank(algorithm))
    for row in range(24):
        learner, _ = updater(learner, batch_of(row), jax.random.key(row))
    assert int(learner.calls) > algorithm.config.collect.model_only_calls
    ours = {"take_in", "owe", "_starts_of_views", "_draw_views", "recall", "_learn_model"}
    ours |= {"_draw_latents", "find_roots", "_copied"}
    of_test = {
        "_threefry_seed",
        "convert_element_type",
        "dynamic_slice",
        "squeeze",
        "broadcast_in_dim",
    }
    assert set(times_compiled()) - of_test <= ours | {"_learn_behaviour", "store"}


LONGER = dataclasses.replace(
    ALGO,
    # Views of 35 records, of which 8 need not be drawn.
    replay=dataclasses.replace(ALGO.replay, learning=27),
    collect=dataclasses.replace(ALGO.collect, prefill=160, train_ratio=40.0, model_only_calls=1),
)


@pytest.mark.slow
def test_what_is_learned_in_several_programs_is_what_is_learned_in_one(monkeypatch):
    """Of real learning, with latents on tracks of more than one shape, and views of which more or
    less is needed."""
    monkeypatch.setattr(unroll, "SHORTEST_CHUNK", 1)
    algorithm = Majepa(LONGER, ENV.spec, steps=400)
    updater = algorithm.updater()
    batch = LONGER.replay.batch
    shapes = shapes_of(algorithm, 4, (batch, batch + 2, 2 * batch))
    updater._shapes = lambda runs: shapes
    chosen, begun = set(), {"_recall": set(), "_roots": set()}
    noting_tracks(updater, lambda view, tracks: chosen.add(tracks.shape))
    for name, noted in begun.items():
        program = getattr(updater, name)
        monkeypatch.setattr(
            updater, name, lambda begin, noted=noted, to=program: noted.add(begin) or to(begin)
        )
    state = jax.jit(loop._fresh(algorithm, ENV))(jax.random.key(0))
    gather = jit(functools.partial(collect, algorithm, ENV, rows=1))
    update = jit(algorithm.update)
    in_one, in_parts, stream = state.learner, flattened(state.learner), state.stream
    for number in range(80):
        key_collect, key = jax.random.split(jax.random.key(number))
        gathered = gather(without_replay(in_one), stream, key_collect)
        stream = gathered.stream
        in_one, metrics = update(in_one, gathered.data, key)
        # A copy: what is donated is the other's own.
        in_parts, told = updater(in_parts, gathered.data, key)
    assert int(in_one.calls) > 5 and len({shape.tracks for shape in chosen}) > 1
    assert all(len(noted) > 1 for noted in begun.values())
    other = restored(in_parts)
    assert_same((in_one.replay, in_one.calls), (other.replay, other.calls))
    for name, value in told().by_name().items():
        assert value == pytest.approx(float(metrics[name]), rel=2e-2, abs=1e-4), name


@pytest.mark.slow
@pytest.mark.parametrize("place", ["device", "host"])
def test_a_run_compiles_and_traces_each_program_once(tmp_path, times_compiled, monkeypatch, place):
    monkeypatch.setattr(loop, "_is_accelerated", lambda: True)
    algorithm = Marking(marking().config, marking().spec, steps=marking().steps)
    traced, half = [], algorithm.model_half
    monkeypatch.setattr(algorithm, "model_half", lambda *given: traced.append(1) or half(*given))
    train(placed(place), tmp_path / "run", env=CountingEnv(), algorithm=algorithm)
    assert load_file(tmp_path / "run" / CHECKPOINT)["learner/calls"] > 2
    learning = ("recall", "_learn_model", "find_roots", "_learn_behaviour")
    drawing = ("take_in", "owe", "_starts_of_views", "_draw_views", "store")
    for name in ("_collect", *learning, *drawing, "_play"):
        assert times_compiled()[name] == 1, name
    # One for each shape of tracks, all of them ahead: views need more than one.
    assert times_compiled()["_draw_latents"] == len(call_by_call.shapes_for(algorithm, 1)) > 1
    assert len(traced) == 1


def test_shapes_are_not_asked_for_again(monkeypatch):
    algorithm = marking()
    updater = algorithm.updater(host=DEVICE)
    learner = updater.place(flattened(blank(algorithm)))
    for row in range(20):
        learner, _ = updater(learner, batch_of(row), jax.random.key(row))
    before = int(learner.calls)
    monkeypatch.setattr(jax, "eval_shape", lambda *_: 1 / 0)
    for row in range(20, 24):
        learner, _ = updater(learner, batch_of(row), jax.random.key(row))
    assert learner.calls > before > algorithm.config.collect.model_only_calls


@pytest.mark.slow
@pytest.mark.parametrize(("place", "is_host"), [("auto", True), ("device", False)])
def test_the_replay_leaves_for_temporaries_too(tmp_path, monkeypatch, capsys, place, is_host):
    def ends_at_once(runs, lanes, _):
        assert lanes.on_host
        return [Result(run.folder, 0, 0.0, None, None, None) for run in runs]

    monkeypatch.setattr(loop, "_loop", ends_at_once)
    monkeypatch.setattr(loop, "_programs", lambda *_: ())
    monkeypatch.setattr(machine, "device_memory", lambda: Memory(10**9, 10**9))
    monkeypatch.setattr(lanes.Lanes, "need", lambda self: Need(1, 1 if self.on_host else 10**9))
    refused = pytest.raises(ConfigError, match=r"--algo.replay.place host")
    with contextlib.nullcontext() if is_host else refused:
        train(placed(place), tmp_path / "run", env=CountingEnv(), algorithm=marking())
    assert ("the replay lies in the memory of the host" in capsys.readouterr().out) == is_host
    assert (tmp_path / "run").exists() == is_host


@pytest.mark.parametrize(
    ("place", "size", "runs", "is_on_host"),
    [
        ("device", 1, 1, False),
        ("host", None, 1, True),
        ("auto", None, 1, False),
        ("auto", 10**12, 1, False),
        ("auto", 1, 1, True),
        ("auto", 1, 3, False),
    ],
)
def test_the_host_holds_what_the_device_cannot(place, size, runs, is_on_host):
    there = None if size is None else Memory(size, size)
    held = bytes_of(run_shapes(ALGORITHM, ENV))
    updater = loop._updater(placed(place), ALGORITHM, runs, held, there)
    assert lanes.is_on_host(updater) == is_on_host


@pytest.mark.parametrize(("backend", "in_programs"), [("cpu", False), ("gpu", True)])
def test_accelerators_learn_in_programs(monkeypatch, backend, in_programs):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    updaters = [loop._updater(CONFIG, ALGORITHM, runs, 10, Memory(100, 100)) for runs in (1, 2)]
    assert all((updater is not None) == in_programs for updater in updaters)
    assert not any(map(lanes.is_on_host, updaters))


def test_other_algorithms_have_no_such_choice():
    config = dataclasses.replace(CONFIG, algo=MAPPO_DEBUG)
    algorithm = loop.make_algorithm(config, ENV.spec)
    assert loop._updater(config, algorithm, 1, 10, Memory(1, 1)) is None


def test_seeds_in_one_program_keep_their_replays_on_the_device(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "make_env", lambda _: ENV)
    configs = [dataclasses.replace(placed("host"), seed=seed) for seed in (0, 1)]
    with pytest.raises(ConfigError, match="host memory is for one run: train or resume one"):
        train_together(configs, [tmp_path / "0", tmp_path / "1"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="host memory is for one run"):
        train_together(configs)
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_a_run_is_the_same_wherever_its_replay_lies(tmp_path, monkeypatch):
    monkeypatch.setattr(call_by_call, "jax", SimpleNamespace(**{**vars(jax), "jit": quick}))
    monkeypatch.setattr(loop, "_is_accelerated", lambda: True)
    updaters = {host: ALGORITHM.updater(host=host) for host in (None, DEVICE)}
    monkeypatch.setattr(ALGORITHM, "updater", lambda *, host=None, **_: updaters[host])

    def run(place, name, **options):
        return train(placed(place), tmp_path / name, env=ENV, algorithm=ALGORITHM, **options)

    # Begun on the host, gone on with on the device, ended on the host.
    run("host", "moved", stop_after=36)
    run("device", "moved", stop_after=48, resume=True)
    moved, whole = run("host", "moved", resume=True), run("device", "whole")
    assert read_config(tmp_path / "moved").algo.replay.place == "host"
    assert whole.transitions == moved.transitions
    np.testing.assert_array_equal(whole.sampled.episode_return, moved.sampled.episode_return)
    one, other = (load_file(tmp_path / name / CHECKPOINT) for name in ("whole", "moved"))
    assert one["learner/calls"] > ALGO.collect.model_only_calls
    assert one.keys() == other.keys()
    for name, array in one.items():
        assert array.tobytes() == other[name].tobytes(), name


def test_a_replay_that_does_not_fit_goes_to_the_host_before_anything_is_refused(
    tmp_path, monkeypatch
):
    shapes = run_shapes(ALGORITHM, ENV)
    size = bytes_of(shapes) - 1
    monkeypatch.setattr(machine, "device_memory", lambda: Memory(size, size))
    monkeypatch.setattr(loop, "interruptible", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(placed("auto"), tmp_path / "auto", env=ENV, algorithm=ALGORITHM)
    with pytest.raises(ConfigError, match=r"--algo.replay.place host"):
        train(placed("device"), tmp_path / "device", env=ENV, algorithm=ALGORITHM)
