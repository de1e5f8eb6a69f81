"""Updates of MA-JEPA in several programs, which the host starts one after another.

They compile side by side, and nothing is copied around a loop over calls. Where the episodes of the
views begin is known on the host before it is needed: records that nobody remembers are left out,
what is needed is laid out on tracks, and no program waits for a number. The first program that
takes long needs none: it is begun before the host asks, so that the device has something to do
meanwhile. What is computed is what `Majepa.update` computes.

The replay may lie in host memory, for an accelerator that cannot hold it. Rows go in there, views
are drawn there and travel to the accelerator, and fresh latents come back.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from .agent import (
    Actor,
    Bad,
    Critic,
    Fresh,
    JointModel,
    Learner,
    LocalModel,
    Majepa,
    Moments,
    Optimizers,
    Params,
    Views,
    keys_of_halves,
)
from .algorithm import Device, Experience, Program, shapes_on, without_replay
from .compilation import COMPILER_OPTIONS
from .flat import Flat, Scalars, flattened, restored
from .packing import packed
from .replay import Replay, Sequence
from .world_model.strands import Tracks, TrackShape, begins_of, lay_out, lay_out_runs
from .world_model.track_shapes import shapes_of_tracks
from .world_model.unroll import Past, Roots, beginnings


class Drawn(NamedTuple):
    """What a call is given."""

    views: Views
    key_model: Key[Array, "..."]
    key_behaviour: Key[Array, "..."]
    wanted: Bool[Array, "..."]


class Starts(NamedTuple):
    """Where episodes begin in the views of a call."""

    model: Bool[Any, "..."]
    behaviour: Bool[Any, "..."]


class Own(NamedTuple):
    """What the behaviour changes."""

    actor: Actor
    critic: Critic
    actor_state: Moments
    critic_state: Moments


class Between(NamedTuple):
    """What the second half of a call has to know of the first."""

    bad: Bad
    active: Bool[Array, "..."]


class Said(NamedTuple):
    """What is kept of a half of a call until the update is over."""

    metrics: Scalars
    place: Float[Array, "..."]
    """One if it took place, for a run that wanted it."""


class Told(NamedTuple):
    """What a half of a call says beside what it learned."""

    latent: Int[Array, "..."]
    said: Said


class FirstHalf(NamedTuple):
    """A call in which the world model learns, or has learned."""

    learner: Learner
    drawn: Drawn
    """Where the replay lies,"""
    given: Drawn
    """and where everything else does."""
    told: Told
    between: Between


class CallByCall:
    """How runs learn: one, or several `together`; `host` has the replay of one that keeps it there.

    Learners are `flattened` wherever they are given.
    """

    def __init__(
        self, algorithm: Majepa, *, together: bool = False, host: Device | None = None
    ) -> None:
        self._algorithm, self.host = algorithm, host
        self.device = None if host is None else jax.local_devices()[0]
        self._each: Callable[[Callable], Callable] = packed if together else lambda one: one
        self._lay_out = lay_out_runs if together else lay_out
        config = algorithm.config
        self._shapes = functools.cache(functools.partial(shapes_for, algorithm))
        windows = config.local.window, config.joint.window
        self._beginnings = beginnings(config.context, *windows)
        learning = {"donate_argnums": 0, "compiler_options": COMPILER_OPTIONS}
        earned = algorithm.cadence.num_envs * config.calls_per_transition
        self._usual = max(1, math.ceil(earned))
        self._expects_calls = False
        self._insert = self._program(algorithm.take_in, donate_argnums=0)
        self._owe = self._program(algorithm.owe)
        self._copy = jax.jit(_copied)
        self._foresee = jax.jit(self._starts_of_views)
        self._draw = jax.jit(self._draw_views)
        self._recall = functools.cache(self._recall_from)
        self._model = self._program(self._learn_model, **learning)
        self._latents = self._program(self._draw_latents, compiler_options=COMPILER_OPTIONS)
        self._roots = functools.cache(self._find_roots_from)
        self._behaviour = self._program(self._learn_behaviour, **learning)
        self._store = self._program(algorithm.store, donate_argnums=0)

    def _program(self, one: Callable, **options: Any) -> Any:
        # Whether an argument is used or not, it takes memory: `programs` tells what is held.
        return jax.jit(self._each(one), keep_unused=True, **options)

    def place(self, learner: Learner) -> Learner:
        """A learner with every part where it belongs."""
        replay = self._to_host(learner.replay)
        return self._to_device(without_replay(learner))._replace(replay=replay)

    def _to_host(self, tree: Any) -> Any:
        return tree if self.host is None else jax.device_put(tree, self.host)

    def _to_device(self, tree: Any) -> Any:
        return tree if self.host is None else jax.device_put(tree, self.device)

    def programs(self, learner: Learner, data: Experience, key: Any) -> Iterator[Program]:
        """What learns, longest first, traced for arrays or their shapes."""
        yield from self.programs_of_calls(learner, key)
        if self.host is None:
            of_insert, counters = (learner.replay, data.rows), _counters(learner)
            _, enough, _ = jax.eval_shape(self._insert, *of_insert)
            yield Program(self._insert.lower(*of_insert), learner.replay)
            yield Program(self._owe.lower(counters, data, enough), counters)

    def programs_of_calls(self, learner: Learner, key: Any) -> Iterator[Program]:
        """What `learn` takes."""
        rest, calls = without_replay(learner), learner.calls
        number = jax.ShapeDtypeStruct((), jnp.int32)
        given = jax.eval_shape(self._draw, learner.replay, key, calls, number)
        given = self._shapes_on_device(given)
        views, part, world, own = given.views, _of_model(rest), _world(rest), _own(rest)
        of_recall = (*world, views.model)
        past = self._shapes_on_device(jax.eval_shape(self._recall(0), *of_recall))
        of_model = (part, views.model, given.key_model, given.wanted, past)
        yield Program(self._model.lower(*of_model), part, beside=views.behaviour)
        between = self._shapes_on_device(jax.eval_shape(self._model, *of_model)[2])
        of_latents = (rest.params.local, views.behaviour, given.key_behaviour)
        tracks = list(self._shapes_of_tracks(views.behaviour))
        latent = self._shapes_on_device(jax.eval_shape(self._latents, *of_latents, tracks[0]))
        of_roots = (*world, views.behaviour, latent)
        roots = self._shapes_on_device(jax.eval_shape(self._roots(0), *of_roots))
        of_behaviour = (own, world, between, *of_latents[1:], roots)
        beside = (views.model, latent)
        yield Program(self._behaviour.lower(*of_behaviour), (own, world), beside)
        for begin in reversed(self._beginnings):
            found = self._roots(begin).lower(*of_roots)
            yield Program(found, world, beside=views.model)
            recalled = self._recall(begin).lower(*of_recall)
            yield Program(recalled, world, beside=views.behaviour)
        for one in tracks:
            latents = self._latents.lower(*of_latents, one)
            yield Program(latents, rest.params.local, beside=views.model)
        if self.host is None:
            fresh = Fresh(jax.eval_shape(self._model, *of_model)[1].latent, given.wanted)
            yield Program(self._foresee.lower(learner.replay, key, number), learner.replay)
            yield Program(self._draw.lower(learner.replay, key, calls, number), learner.replay)
            if self._algorithm.config.replay.write_back != "none":
                yield Program(self._store.lower(learner.replay, views, fresh), learner.replay)

    def _shapes_of_tracks(self, view: Sequence) -> Iterator[Tracks]:
        """Those that take longest first, as the host gives them: bound to no device."""
        runs = view.record.is_first.shape[:-2]
        for shape in reversed(self._shapes(math.prod(runs))):
            leaf = jax.ShapeDtypeStruct((*runs, *shape), jnp.int32)
            yield Tracks(leaf, leaf)  # pyright: ignore

    def _shapes_on_device(self, shapes: Any) -> Any:
        return shapes if self.host is None else shapes_on(self.device, shapes)

    def __call__(
        self, learner: Learner, data: Experience, key: Key[Array, "..."]
    ) -> tuple[Learner, Callable[[], Scalars]]:
        """What `Majepa.update` does, and what fetches its metrics; those of a half that no call had
        are left out."""
        replay, enough, rows = self._insert(learner.replay, self._to_host(data.rows))
        enough, rows = self._to_device((enough, rows))
        counters, calls = self._owe(_counters(learner), data, enough)
        learner = learner._replace(
            replay=replay, transitions=counters.transitions, due=counters.due
        )
        learner, model, behaviour = self.learn(learner, key, calls)
        # Copies: the next update takes the learner's own away, maybe before anybody asks.
        counts = self._copy(self._algorithm.counts(learner, rows))
        return learner, functools.cache(functools.partial(_report, model, behaviour, counts))

    def learn(
        self, learner: Learner, key: Key[Array, "..."], calls: Int[Array, "..."]
    ) -> tuple[Learner, list[Said], list[Said]]:
        """So many calls, and what their halves said: the world model's and the behaviour's."""
        config = self._algorithm.config
        write_back = config.replay.write_back
        replay, learner = learner.replay, without_replay(learner)
        to_draw = self._to_host((key, calls))
        known = self._copy(learner.calls), calls, self._foresee_all(replay, to_draw[0], self._usual)
        first = self._first_half(replay, learner, to_draw, 0) if self._expects_calls else None
        made, wanted, foreseen = jax.device_get(known)
        number_of_calls = int(np.max(wanted))
        more = self._foresee_all(replay, to_draw[0], number_of_calls, len(foreseen))
        foreseen += jax.device_get(more)
        model, behaviour = [], []
        for number in range(number_of_calls):
            starts = foreseen[number]
            half = first or self._first_half(replay, learner, to_draw, number, starts)
            learner, first = half.learner, None
            model.append(half.told.said)
            fresh = Fresh(half.told.latent, half.given.wanted) if write_back == "model" else None
            is_active = (number < wanted) & (made + number >= config.collect.model_only_calls)
            if np.any(is_active):
                learner, told = self._second_half(learner, half.given, half.between, starts)
                behaviour.append(told.said)
                if write_back == "behaviour":
                    fresh = Fresh(told.latent, half.between.active)
            if fresh is not None:
                replay = self._store(replay, half.drawn.views, self._to_host(fresh))
        if first is not None:
            # Nobody wanted it: it left everything as it was.
            learner = first.learner
        self._expects_calls = number_of_calls > 0
        return learner._replace(replay=replay), model, behaviour

    def _foresee_all(
        self, replay: Replay, key: Key[Array, "..."], calls: int, first: int = 0
    ) -> list[Starts]:
        """Where episodes begin in the views of so many calls, less the first ones."""
        return [self._foresee(replay, key, np.int32(number)) for number in range(first, calls)]

    def _first_half(
        self,
        replay: Replay,
        learner: Learner,
        to_draw: tuple[Key[Array, "..."], Int[Array, "..."]],
        number: int,
        starts: Starts | None = None,
    ) -> FirstHalf:
        """Draw the views of a call, and let the world model learn.

        The first call of an update, of which nothing may be known yet, takes a whole context
        whether it is known or not: a run that goes on repeats itself bit for bit.
        """
        drawn = self._draw(replay, *to_draw, np.int32(number))
        given = self._to_device(drawn)
        begin = 0 if number == 0 or starts is None else self._begin_of(starts.model)
        view = given.views.model
        past = self._recall(begin)(*_world(learner), view)
        part, told, between = self._model(
            _of_model(learner), view, given.key_model, given.wanted, past
        )
        params = learner.params._replace(local=part.params.local, joint=part.params.joint)
        optimizers = learner.optimizers._replace(
            local=part.optimizers.local, joint=part.optimizers.joint
        )
        learner = part._replace(
            params=params, optimizers=optimizers, transitions=learner.transitions, due=learner.due
        )
        return FirstHalf(learner, drawn, given, told, between)

    def _second_half(
        self, learner: Learner, given: Drawn, between: Between, starts: Starts
    ) -> tuple[Learner, Told]:
        view, world = (given.views.behaviour, given.key_behaviour), _world(learner)
        # The device is busy with the first half meanwhile.
        shapes = self._shapes(math.prod(starts.behaviour.shape[:-2]))
        tracks = self._lay_out(starts.behaviour, self._algorithm.config.context, shapes)
        latent = self._latents(world[0], *view, tracks)
        roots = self._roots(self._begin_of(starts.behaviour))(*world, view[0], latent)
        own, nonfinite, told = self._behaviour(_own(learner), world, between, *view, roots)
        params = learner.params._replace(actor=own.actor, critic=own.critic)
        optimizers = learner.optimizers._replace(actor=own.actor_state, critic=own.critic_state)
        learner = learner._replace(params=params, optimizers=optimizers, nonfinite=nonfinite)
        return learner, told

    def _begin_of(self, is_first: Bool[np.ndarray, "..."]) -> int:
        """From where on a view is needed by any sequence of any run."""
        needed = np.min(begins_of(is_first, self._algorithm.config.context))
        return next(begin for begin in self._beginnings if begin <= needed)

    # What the programs compute, for one run.

    def _starts_of_views(
        self, replay: Replay, key: Key[Array, "..."], number: Int[Array, ""]
    ) -> Starts:
        def one(replay: Replay, key: Key[Array, ""]) -> Starts:
            views = self._algorithm.draw(replay, jax.random.fold_in(key, number))
            return Starts(views.model.record.is_first, views.behaviour.record.is_first)

        return self._each(one)(replay, key)

    def _draw_views(
        self, replay: Replay, key: Key[Array, "..."], calls: Array, number: Int[Array, ""]
    ) -> Drawn:
        def one(replay: Replay, key: Key[Array, ""], calls: Int[Array, ""]) -> Drawn:
            key = jax.random.fold_in(key, number)
            return Drawn(self._algorithm.draw(replay, key), *keys_of_halves(key), number < calls)

        return self._each(one)(replay, key, calls)

    def _recall_from(self, begin: int) -> Any:
        """The program that rebuilds the context of the world model's view from this place on."""

        def recall(local: Flat[LocalModel], joint: Flat[JointModel], view: Sequence) -> Past:
            return self._algorithm.recall(local.tree, joint.tree, view, begin)

        return self._program(recall, compiler_options=COMPILER_OPTIONS)

    def _learn_model(
        self,
        part: Learner,
        view: Sequence,
        key: Key[Array, ""],
        wanted: Bool[Array, ""],
        past: Past,
    ) -> tuple[Learner, Told, Between]:
        before = restored(part)
        learner, half, active = self._algorithm.model_half(before, view, key, wanted, past)
        bad = Bad(before.nonfinite, learner.nonfinite)
        said = Said(Scalars.of(half.metrics), wanted.astype(jnp.float32))
        return flattened(learner), Told(half.latent, said), Between(bad, active)

    def _draw_latents(
        self, local: Flat[LocalModel], view: Sequence, key: Key[Array, ""], tracks: Tracks
    ) -> Int[Array, "B T N S"]:
        return self._algorithm.draw_latents(local.tree, view, key, tracks)

    def _find_roots_from(self, begin: int) -> Any:
        """The program that finds roots in the behaviour view, which is needed from there on."""

        def find_roots(
            local: Flat[LocalModel],
            joint: Flat[JointModel],
            view: Sequence,
            latent: Int[Array, "B T N S"],
        ) -> Roots:
            return self._algorithm.find_roots(local.tree, joint.tree, view, latent, begin)

        return self._program(find_roots, compiler_options=COMPILER_OPTIONS)

    def _learn_behaviour(
        self,
        own: Own,
        world: tuple[Flat[LocalModel], Flat[JointModel]],
        between: Between,
        view: Sequence,
        key: Key[Array, ""],
        roots: Roots,
    ) -> tuple[Own, Int[Array, ""], Told]:
        own, (bad, active) = restored(own), between
        local, joint = world[0].tree, world[1].tree
        optimizers: Any = Optimizers(None, None, own.actor_state, own.critic_state)  # pyright: ignore
        params, optimizers, nonfinite, half = self._algorithm.behaviour_half(
            Params(local, joint, own.actor, own.critic), optimizers, bad, view, key, active, roots
        )
        said = Said(Scalars.of(half.metrics), active.astype(jnp.float32))
        own = flattened(Own(*params[2:], *optimizers[2:]))
        return own, nonfinite, Told(half.latent, said)


def _report(model: list[Said], behaviour: list[Said], counts: dict[str, Array]) -> Scalars:
    """Means over calls, and counters; on the host, once they are there."""
    halves, counted = jax.device_get(((model, behaviour), counts))
    means = [_mean(half) for half in halves if half]
    numbers = np.stack([np.asarray(count, np.float32) for count in counted.values()], axis=-1)
    names = [name for mean in means for name in mean.names]
    values = [*(mean.values for mean in means), numbers]
    return Scalars((*names, *counted), np.concatenate(values, axis=-1))


def _copied(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf + jnp.zeros((), leaf.dtype), tree)


def _mean(said: list[Said]) -> Scalars:
    """Over the calls that took place; NaN for a run that had none. Of what the host has fetched."""
    values = sum(one.metrics.values for one in said)
    places = sum(one.place for one in said)
    with np.errstate(invalid="ignore"):
        return Scalars(said[0].metrics.names, values / np.expand_dims(places, -1))


def shapes_for(algorithm: Majepa, runs: int) -> list[TrackShape]:
    """What tracks of the behaviour views of so many runs in one program may have, best first."""
    config = algorithm.config
    sizes = (config.replay.batch, config.context, config.replay.learning)
    return shapes_of_tracks(*sizes, rows=runs * algorithm.spec.num_agents)


# Parts of a learner, as named tuples with nothing in the place of the rest.


def _counters(learner: Learner) -> Learner:
    return learner._replace(params=None, target_encoder=None, optimizers=None, replay=None)  # pyright: ignore


def _of_model(learner: Learner) -> Learner:
    """What the world model changes, and the counters of calls."""
    params: Any = learner.params._replace(actor=None, critic=None)  # pyright: ignore
    optimizers: Any = learner.optimizers._replace(actor=None, critic=None)  # pyright: ignore
    return learner._replace(params=params, optimizers=optimizers, transitions=None, due=None)  # pyright: ignore


def _world(learner: Learner) -> tuple[Any, Any]:
    return learner.params.local, learner.params.joint


def _own(learner: Learner) -> Own:
    params, optimizers = learner.params, learner.optimizers
    return Own(params.actor, params.critic, optimizers.actor, optimizers.critic)
