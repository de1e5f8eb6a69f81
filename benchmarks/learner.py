"""How long a learner call of MA-JEPA takes, whole and in parts, on the replay of a real run.

    uv run python benchmarks/learner.py runs/majepa-2s3z-0-1 --seeds 1 3
    uv run python benchmarks/learner.py --made-up 2s3z --preset paper --only call

The folder must hold a checkpoint with its replay: of a run that goes on, or was stopped early.
`--preset` measures another size on the records of that run, with latents drawn at random. Without a
run, `--made-up` takes random records, in episodes whose lengths lie between two numbers.

Prints one JSON line per measurement:

- `call`: mean over many calls in a row, of one seed or several in one program; `tracks` counts the
  shapes of the tracks (how many by how long) that latents of behaviour views are drawn on, as the
  run's own episodes have it. With `--plain` also of the learner without savings that the tests
  keep;
- `context`: what depends on how much of a view is needed: drawing latents on tracks of each shape,
  rebuilding contexts and finding roots for each number of records before the learning ones;
- `phase`: each part of a call by itself, beside the floating-point operations and the bytes of its
  matrix products, counted in the traced program;
- `profile`: how long the device works for each program of a call and for each part of it, a named
  scope of the package, and which kernels take longest. Programs that differ in lengths alone have
  one name and count together. On GPUs programs then run without CUDA graphs, in which kernels have
  no names, so that it is measured by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from compiled import REST, parts_of

from majepa import machine
from majepa.agent import Learner, Majepa
from majepa.ahead import Ahead
from majepa.call_by_call import CallByCall, shapes_for
from majepa.checkpoint import read_omitted
from majepa.compilation import COMPILER_OPTIONS, keep_programs
from majepa.config import MajepaConfig, preset
from majepa.envs import make_env
from majepa.flat import flattened
from majepa.imagine import imagine
from majepa.nn.layers import cast
from majepa.nn.transformer import apart
from majepa.policy.condense import condense_actor, condense_critic
from majepa.policy.ppo import freeze, replay_targets
from majepa.replay import Sequence, sample
from majepa.run_folder import newest_checkpoint, read_config
from majepa.training import load_run, make_algorithm
from majepa.world_model import unroll
from majepa.world_model.condense import Basis, condense_joint, condense_local
from majepa.world_model.losses import model_loss
from majepa.world_model.strands import lay_out, lay_out_runs
from majepa.world_model.tokens import tokens_of
from majepa.world_model.track_shapes import cost_of

LEAST = 20_000
"""Transitions that a run must have to be taken for a real one."""
MADE_UP = 25_000
"""Made-up records."""
PROFILED = 4
"""Calls in a profile."""
NO_GRAPHS = "--xla_gpu_enable_command_buffer="


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--made-up", metavar="MAP", help="take random records of this world")
    parser.add_argument("--lengths", nargs=2, type=int, default=[60, 120], metavar=("LOW", "HIGH"),
                        help="of made-up episodes")  # fmt: skip
    parser.add_argument("--preset", help="measure this size instead of the run's own")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=10, help="of each phase and context")
    parser.add_argument("--only", nargs="+", choices=["call", "context", "phase", "profile"])
    parser.add_argument("--plain", action="store_true", help="calls without savings, too")
    parser.add_argument("--short", action="store_true", help="accept shorter runs, to try it out")
    options = parser.parse_args()
    kinds = options.only or ["call", "context", "phase"]
    if not options.runs and options.made_up is None:
        parser.error("give a run's folder, or --made-up MAP")
    if "profile" in kinds:
        if kinds != ["profile"]:
            parser.error("a profile is measured by itself: --only profile")
        # Before anything is asked of a device.
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {NO_GRAPHS}"
    keep_programs()
    subjects = [load(folder, options.preset, short=options.short) for folder in options.runs]
    if options.made_up is not None:
        subjects.append(make_up(options.made_up, options.preset or "paper", options.lengths))
    for subject in subjects:
        for line in measure(subject, kinds, options):
            report(subject, line)


def measure(
    subject: Subject, kinds: list[str], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    if "call" in kinds:
        yield from (measure_calls(subject, seeds, options.calls) for seeds in options.seeds)
        if options.plain:
            given = subject.algorithm
            again = Majepa(given.config, given.spec, steps=given.steps)
            with plainly():
                yield measure_plain(subject._replace(algorithm=again), options.calls)
    if "context" in kinds:
        yield from measure_contexts(subject, options.repeats)
    if "phase" in kinds:
        yield from measure_phases(subject, options.repeats)
    if "profile" in kinds:
        for seeds in options.seeds:
            yield from measure_profile(subject, seeds)


def plainly() -> contextlib.AbstractContextManager[None]:
    """The learner without any saving, from the tests."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from world_model import plain

    return plain.plainly()


class Subject(NamedTuple):
    """A learner in the middle of a run."""

    env: str
    preset: str
    algorithm: Majepa
    learner: Learner


def load(folder: Path, name: str | None, *, short: bool) -> Subject:
    config = read_config(folder)
    if not isinstance(config.algo, MajepaConfig):
        sys.exit(f"{folder} is a run of {config.algorithm}; this measures MA-JEPA")
    which = newest_checkpoint(folder)
    if which is None:
        sys.exit(f"{folder} holds no checkpoint yet")
    if read_omitted(folder / which):
        sys.exit(f"{folder / which} was kept without its replay: take a run that was stopped early")
    env = make_env(config.env)
    algorithm = make_algorithm(config, env.spec)
    learner = load_run(folder, algorithm, env, which=which).learner
    transitions = int(learner.transitions)
    if transitions < LEAST and not short:
        sys.exit(
            f"{folder} has {transitions:,} transitions; a replay of {LEAST:,} or more is asked"
        )
    if name is not None:
        wanted = dataclasses.replace(preset("majepa", name, config.env), steps=config.steps)
        algorithm = make_algorithm(wanted, env.spec)
        learner = with_records_of(learner, algorithm)
    return Subject(config.env, name or "own", algorithm, past_the_first(learner))


def with_records_of(given: Learner, algorithm: Majepa) -> Learner:
    """A fresh learner of another size whose replay holds the same records."""
    fresh = jax.jit(algorithm.init)(jax.random.key(0))
    old, new, count = given.replay.stored, fresh.replay.stored, int(given.replay.inserted)
    (old_rows, old_envs), (rows, envs) = old.reward.shape, new.reward.shape
    if old_envs != envs or count > min(old_rows, rows):
        sys.exit(
            f"the replay has {count} of {old_rows} rows of {old_envs} environments, the preset has "
            f"room for {rows} of {envs}: take a run with as many environments that is younger"
        )
    classes = algorithm.config.local.classes
    latent = np.random.default_rng(0).integers(classes, size=(count, *new.latent.shape[1:]))
    taken = jax.tree.map(lambda leaf: leaf[:count], old)._replace(latent=latent)
    stored = jax.tree.map(
        lambda into, leaf: into.at[:count].set(jnp.asarray(leaf, into.dtype)), new, taken
    )
    return fresh._replace(replay=given.replay._replace(stored=stored))


def make_up(env: str, name: str, lengths: list[int]) -> Subject:
    """A fresh learner whose replay holds random records: of an action 60 % are legal."""
    config = dataclasses.replace(preset("majepa", name, env), steps=MADE_UP)
    algorithm = make_algorithm(config, make_env(config.env).spec)
    learner = jax.jit(algorithm.init)(jax.random.key(0))
    rng, stored = np.random.default_rng(0), learner.replay.stored
    room, envs = stored.reward.shape
    rows, spec = min(MADE_UP // envs, room), algorithm.spec
    is_first = np.zeros((rows, envs), bool)
    for number in range(envs):
        ends = np.cumsum(rng.integers(lengths[0], lengths[1] + 1, size=rows // lengths[0] + 1))
        is_first[[0, *ends[ends < rows]], number] = True
    is_last = np.append(is_first[1:], is_first[:1], axis=0)
    shape = (rows, envs, spec.num_agents)
    legal = rng.random((*shape, spec.num_actions)) < 0.6
    legal[..., -1] |= ~legal.any(axis=-1)
    classes = algorithm.config.local.classes
    made = stored._replace(
        observation=rng.normal(size=(*shape, spec.observation_size)),
        legal=legal,
        alive=np.ones(shape, bool),
        reward=rng.normal(size=(rows, envs)),
        is_first=is_first,
        is_last=is_last,
        is_terminal=is_last,
        action=np.argmax(legal, axis=-1),
        latent=rng.integers(classes, size=(*shape, stored.latent.shape[-1])),
    )
    stored = jax.tree.map(
        lambda into, leaf: into.at[:rows].set(jnp.asarray(leaf, into.dtype)), stored, made
    )
    replay = learner.replay._replace(stored=stored, inserted=jnp.asarray(rows, jnp.int32))
    return Subject(config.env, name, algorithm, past_the_first(learner._replace(replay=replay)))


def past_the_first(learner: Learner) -> Learner:
    """Calls, which train the world model alone."""
    return learner._replace(calls=jnp.asarray(1_000_000, jnp.int32))


def report(subject: Subject, line: dict[str, Any]) -> None:
    device = jax.devices()[0].device_kind
    shared = {
        "env": subject.env,
        "agents": subject.algorithm.spec.num_agents,
        "preset": subject.preset,
        "precision": subject.algorithm.config.precision,
        "device": device,
    }
    print(json.dumps(line | shared), flush=True)


class Calls(NamedTuple):
    """What makes calls of one run, or of several in one program."""

    updater: CallByCall
    learner: Any
    seeds: int

    @staticmethod
    def of(subject: Subject, seeds: int) -> Calls:
        def several(leaf: jax.Array) -> jax.Array:
            return jnp.copy(leaf) if seeds == 1 else jnp.stack([leaf] * seeds)

        learner = flattened(jax.tree.map(several, subject.learner))
        return Calls(CallByCall(subject.algorithm, together=seeds > 1), learner, seeds)

    def compiled(self) -> list[Any]:
        """All programs of a call, compiled side by side."""
        with Ahead(machine.cores()) as ahead:
            programs = self.updater.programs_of_calls(self.learner, self._given(1, 0)[0])
            begun = [ahead.begin(program.lowered.compile) for program in programs]
            ahead.wait()
        return [one.result() for one in begun]

    def made(self, calls: int, key: int) -> Calls:
        """After so many more of them, when the device has done them."""
        learner, *_ = self.updater.learn(self.learner, *self._given(calls, key))
        jax.block_until_ready(learner)
        return self._replace(learner=learner)

    def _given(self, calls: int, key: int) -> tuple[jax.Array, jax.Array]:
        """Random keys and numbers of calls."""
        if self.seeds == 1:
            return jax.random.key(key), jnp.asarray(calls)
        return jax.random.split(jax.random.key(key), self.seeds), jnp.full(self.seeds, calls)


def measure_calls(subject: Subject, seeds: int, number: int) -> dict[str, Any]:
    calls = Calls.of(subject, seeds)
    started = time.perf_counter()
    calls.compiled()
    calls = calls.made(3, 0)
    starting = time.perf_counter() - started
    # The same views once before: what a program does once, when it first runs, is done.
    calls = calls.made(number, 1)
    started = time.perf_counter()
    calls.made(number, 1)
    spent = time.perf_counter() - started
    return {
        "what": "call",
        "seeds": seeds,
        "calls": number,
        "ms": round(1e3 * spent / number, 2),
        "starting_s": round(starting, 1),
        "tracks": shapes(subject, seeds, 100),
    }


def measure_profile(subject: Subject, seeds: int) -> Iterator[dict[str, Any]]:
    """Milliseconds a call that the device works, and launches."""
    calls = Calls.of(subject, seeds)
    parts: dict[str, dict[str, str]] = defaultdict(dict)
    for program in calls.compiled():
        text = program.as_text()
        found = re.match(r"HloModule (\S+),", text)
        assert found is not None
        parts[found[1]] |= parts_of(text)
    calls = calls.made(3, 0).made(PROFILED, 1)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            calls.made(PROFILED, 1)
        (path,) = Path(folder).rglob("*.xplane.pb")
        events = list(launches(jax.profiler.ProfileData.from_file(str(path))))
    by_part: dict[tuple[str, str], list[float]] = defaultdict(list)
    by_kernel: dict[str, list[float]] = defaultdict(list)
    for event in events:
        part = parts.get(event.program, {}).get(event.operation, REST)
        by_part[event.program, part].append(event.ms)
        by_kernel[event.kernel].append(event.ms)

    def line(what: str, spent: list[float], **named: str) -> dict[str, Any]:
        ms, count = round(sum(spent) / PROFILED, 3), round(len(spent) / PROFILED, 1)
        return {"what": what, "seeds": seeds, **named, "ms": ms, "launches": count}

    yield line("profile", [event.ms for event in events])
    for (program, part), spent in sorted(by_part.items(), key=lambda item: -sum(item[1])):
        yield line("profile", spent, program=program, part=part)
    longest = sorted(by_kernel.items(), key=lambda item: -sum(item[1]))
    for kernel, spent in longest[:40]:
        yield line("kernel", spent, kernel=kernel)


class Launch(NamedTuple):
    """Of a kernel, or a copy."""

    program: str
    operation: str
    kernel: str
    ms: float


def launches(profile: jax.profiler.ProfileData) -> Iterator[Launch]:
    """What a GPU did, or the threads of a CPU."""
    on_gpu = any(plane.name.startswith("/device:GPU") for plane in profile.planes)
    for plane in profile.planes:
        if on_gpu and not plane.name.startswith("/device:GPU"):
            continue
        for timeline in plane.lines:
            if on_gpu and not timeline.name.startswith("Stream"):
                continue
            for event in timeline.events:
                named = {str(name): str(value) for name, value in event.stats}
                if on_gpu or "hlo_op" in named:
                    where = named.get("hlo_module", ""), named.get("hlo_op", "")
                    yield Launch(*where, event.name, event.duration_ns / 1e6)


def measure_plain(subject: Subject, calls: int) -> dict[str, Any]:
    """Calls in one program."""
    keys = jax.random.split(jax.random.key(1), calls + 3)
    learner, wanted = jax.tree.map(jnp.copy, subject.learner), jnp.asarray(True)
    call = jax.jit(subject.algorithm.call, donate_argnums=0, compiler_options=COMPILER_OPTIONS)
    for number, key in enumerate(keys):
        if number == 3:
            jax.block_until_ready(learner)
            started = time.perf_counter()
        learner, _ = call(learner, key, wanted)
    jax.block_until_ready(learner)
    spent = time.perf_counter() - started
    return {"what": "call", "seeds": 1, "calls": calls, "ms": round(1e3 * spent / calls, 2),
            "plain": True}  # fmt: skip


def shapes(subject: Subject, seeds: int, views: int) -> dict[str, int]:
    """How often latents are drawn on tracks of each shape, the one that suits all seeds."""
    config, replay = subject.algorithm.config, subject.learner.replay
    allowed = shapes_for(subject.algorithm, seeds)

    @jax.jit
    def starts(keys: jax.Array) -> jax.Array:
        def one(key: jax.Array) -> jax.Array:
            return sample(replay, config.replay, config.context, key).record.is_first

        return jax.vmap(one)(keys)

    keys = jax.random.split(jax.random.key(2), (views, seeds))
    found = Counter(
        lay_out_runs(np.asarray(starts(together)), config.context, allowed).shape
        for together in keys
    )
    return {f"{tracks}x{length}": often for (tracks, length), often in sorted(found.items())}


def draw_view(subject: Subject, begin: int | None = None) -> Sequence:
    """A view of the replay; `begin` is where the episodes of all its learning records begin."""
    config = subject.algorithm.config
    view = jax.jit(lambda key: sample(subject.learner.replay, config.replay, config.context, key))(
        jax.random.key(3)
    )
    if begin is None:
        return view
    is_first = view.record.is_first.at[:, : config.context + 1].set(False).at[:, begin].set(True)
    return view._replace(record=view.record._replace(is_first=is_first))


def measure_contexts(subject: Subject, repeats: int) -> Iterator[dict[str, Any]]:
    algorithm, learner = subject.algorithm, subject.learner
    config, key = algorithm.config, jax.random.key(5)
    local, joint = learner.params.local, learner.params.joint
    program = jax.jit(algorithm.draw_latents, compiler_options=COMPILER_OPTIONS)
    view = draw_view(subject)
    # Of records that are all starts few are needed, and find room on tracks of any shape.
    starts = np.ones(view.record.is_first.shape, bool)
    for shape in sorted(shapes_for(algorithm, 1)):
        tracks = lay_out(starts, config.context, [shape])
        of_latents = (local, view, key, jax.device_put(tracks))
        yield {
            "what": "context",
            "tracks": shape.tracks,
            "track": shape.length,
            "expected_ms": round(cost_of(shape, algorithm.spec.num_agents) / 1e3, 2),
            "latents_ms": clock(program, of_latents, repeats),
        }
    latent = program(*of_latents)
    for begin in unroll.beginnings(config.context, config.local.window, config.joint.window):
        view = draw_view(subject, begin)
        recall, find_roots = (
            jax.jit(functools.partial(one, begin=begin), compiler_options=COMPILER_OPTIONS)
            for one in (algorithm.recall, algorithm.find_roots)
        )
        yield {
            "what": "context",
            "records": config.context - begin,
            "recall_ms": clock(recall, (local, joint, view), repeats),
            "roots_ms": clock(find_roots, (local, joint, view, latent), repeats),
        }


def measure_phases(subject: Subject, repeats: int) -> Iterator[dict[str, Any]]:
    config, view = subject.algorithm.config, draw_view(subject)
    begin = int(unroll.first_needed(view.record, config.context))
    needed = config.context - begin
    for name, function, arguments in phases(subject, view):
        work = counted(function, arguments, begin)
        program = jax.jit(function, compiler_options=COMPILER_OPTIONS)
        ms = clock(program, arguments, repeats)
        yield {
            "what": "phase",
            "phase": name,
            "records": needed,
            "ms": ms,
            "tflop": round(work.flops / 1e12, 4),
            "gib": round(work.bytes / 2**30, 3),
            "tflop_per_s": round(work.flops / 1e9 / ms, 1),
        }


def phases(subject: Subject, view: Sequence) -> Iterator[tuple[str, Callable, tuple]]:
    """Names, functions and arguments, in the order of a call."""
    algorithm, learner = subject.algorithm, subject.learner
    config, params = algorithm.config, learner.params
    context, key = config.context, jax.random.key(6)
    dtype = jnp.dtype(config.precision)
    local, joint = jax.jit(lambda params: apart(cast(params, dtype)))(params[:2])
    tokens = tokens_of(view, view.record.latent)
    record = jax.tree.map(lambda leaf: leaf[:, context:], view.record)
    suffix = tokens.between(context, None)

    def rebuild(local: Any, joint: Any) -> unroll.Past:
        return unroll.rebuild_context(local, joint, view, tokens, context)

    past = jax.jit(rebuild)(local, joint)

    def infer(local: Any) -> unroll.States:
        return unroll.infer(local, record, suffix, past, key)

    def infer_back(local: Any) -> Any:
        def total(local: Any) -> jax.Array:
            states = infer(local)
            return jnp.sum(states.h, dtype=jnp.float32) + jnp.sum(states.q)

        return jax.grad(total)(local)

    def objective(groups: Any) -> Any:
        return jax.grad(model_loss, has_aux=True)(
            groups, learner.target_encoder, view, config, key
        )[0]

    basis = jax.jit(Basis)(local.dynamics)
    thin = jax.jit(
        lambda: (
            condense_local(local, basis), condense_joint(joint, basis),
            cast(condense_actor(params.actor, basis), dtype), condense_critic(params.critic, basis),
        )
    )()  # fmt: skip

    def reinfer(local: Any, joint: Any) -> unroll.Roots:
        return unroll.reinfer(local, joint, view, context, key)

    roots = jax.jit(reinfer)(*thin[:2])

    def dream(local: Any, joint: Any, actor: Any) -> Any:
        noop = algorithm.spec.noop_index
        return imagine(local, joint, actor, roots, record, config, noop, key)

    imagined = jax.jit(dream)(*thin[:3])

    def judge(critic: Any) -> Any:
        return freeze(imagined, critic, config)

    frozen = jax.jit(judge)(thin[3])
    replayed = replay_targets(record, frozen.returns[0], config)

    def improve(params: Any, optimizers: Any) -> Any:
        return algorithm.improve(params, optimizers, frozen, replayed, basis)

    yield "context", rebuild, (local, joint)
    yield "inference", infer, (local,)
    yield "inference and its gradient", infer_back, (local,)
    yield "objective and its gradient", objective, (params[:2],)
    yield "model step", algorithm.train_model, (learner._replace(replay=None), view, key)
    yield "re-inference", reinfer, thin[:2]
    yield "imagination", dream, thin[:3]
    yield "advantages", judge, thin[3:]
    yield "five epochs", improve, (params, learner.optimizers)
    behaviour = (params, learner.optimizers, view, key)
    yield "behaviour step", algorithm.train_behaviour, behaviour


def clock(function: Callable, arguments: tuple, repeats: int) -> float:
    """Milliseconds of one run, on average over several in a row."""
    jax.block_until_ready(function(*arguments))
    started = time.perf_counter()
    for _ in range(repeats):
        last = function(*arguments)
    jax.block_until_ready(last)
    return round(1e3 * (time.perf_counter() - started) / repeats, 2)


class Work(NamedTuple):
    """Of matrix products: a multiplication and an addition are two operations; bytes are those of
    both factors and the result."""

    flops: float = 0.0
    bytes: float = 0.0

    def plus(self, other: Work, times: int = 1) -> Work:
        return Work(self.flops + times * other.flops, self.bytes + times * other.bytes)


def counted(function: Callable, arguments: tuple, begin: int) -> Work:
    """The work of a function, for views whose learning records remember back to `begin`."""
    first_needed = unroll.first_needed
    # A bound that is known makes loops whose length is known.
    unroll.first_needed = lambda record, context: begin  # type: ignore[assignment]

    def anew(*arguments: Any) -> Any:
        """What was traced before, with an unknown bound, is not found again."""
        return function(*arguments)

    try:
        return work_of(jax.make_jaxpr(anew)(*arguments).jaxpr)
    finally:
        unroll.first_needed = first_needed


def work_of(jaxpr: Any) -> Work:
    total = Work()
    for step in jaxpr.eqns:
        if step.primitive.name == "dot_general":
            total = total.plus(product_of(step))
            continue
        inner = [work_of(part) for part in programs(step.params)]
        if step.primitive.name == "cond":
            total = total.plus(max(inner))
        elif step.primitive.name == "while" and any(part.flops for part in inner):
            raise ValueError("a loop of unknown length multiplies matrices")
        else:
            times = step.params["length"] if step.primitive.name == "scan" else 1
            for part in inner:
                total = total.plus(part, times)
    return total


def product_of(step: Any) -> Work:
    left, right = (var.aval for var in step.invars)
    out = step.outvars[0].aval
    (contracted, _), _ = step.params["dimension_numbers"]
    inner = math.prod(left.shape[axis] for axis in contracted)
    size = sum(aval.size * aval.dtype.itemsize for aval in (left, right, out))
    return Work(2.0 * out.size * inner, float(size))


def programs(params: dict[str, Any]) -> Iterator[Any]:
    """Programs inside a step's parameters; of a custom rule the function itself alone."""
    for name, value in params.items():
        if name in ("fwd_jaxpr_thunk", "bwd", "jvp_jaxpr_fun"):
            continue
        parts = value if isinstance(value, tuple | list) else [value]
        yield from (
            inner for part in parts if hasattr(inner := getattr(part, "jaxpr", part), "eqns")
        )


if __name__ == "__main__":
    main()
