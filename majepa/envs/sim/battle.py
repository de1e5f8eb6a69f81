"""The battle itself: orders in, eight game loops of moving and fighting, units out.

One loop: choose targets, walk or take aim, move, recover, shoot (the side that shoots first is
drawn by lot, and who falls to the first side does not shoot back), burst, heal.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from . import combat, enemy, motion
from .arena import Arena, Column, Healer
from .maps import AttackMove
from .state import Minds, State, Units, mix, step_noise, uniform

NOOP, STOP, NORTH, SOUTH, EAST, WEST, FIRST_TARGET = range(7)
MOVES = np.array([[0, 1], [0, -1], [1, 0], [-1, 0]], np.float32)
"""Directions of the actions NORTH to WEST."""

ARRIVED = 0.01
"""Units this near their goal stand."""
SETTLE_PASSES = 40
"""Push-apart passes that free units packed too tightly at the start."""


Moment = tuple[Units, Minds]
LoopFunction = Callable[[Int[Array, ""] | int, Moment], Moment]


class Orders(NamedTuple):
    """What the agents were told to do for one step."""

    target: Int[Array, "A B"]
    """An enemy, for healers an ally; -1 for none."""
    goal_x: Float[Array, "A B"]
    goal_y: Float[Array, "A B"]
    walks: Bool[Array, "A B"]


def begin(arena: Arena, seed: UInt32[Array, "2 B"], episode: UInt32[Array, " B"]) -> State:
    """Battles at their first moment."""
    batch = seed.shape[1]

    def full(column):
        return jnp.broadcast_to(jnp.asarray(column, jnp.float32), (arena.num_units, batch))

    x, y = (full(column) for column in _start(arena))
    stream = step_noise(seed, episode, jnp.zeros(batch, jnp.int32))
    if arena.rules.spawn_jitter > 0:
        x, y = _shifted(arena, x, y, stream)

    def zeros(dtype=jnp.float32):
        return jnp.zeros(x.shape, dtype)

    pools = (full(arena.hp_max), full(arena.shield_max), full(arena.energy_start))
    units = Units(x, y, *pools, cooldown=zeros())
    minds = Minds(
        target=zeros(jnp.int32) - 1, windup=zeros(), stride=zeros(), drift_x=zeros(),
        drift_y=zeros(), calm=zeros(), fuse=zeros(bool),
    )  # fmt: skip
    return State(
        units, minds, _march_goal(arena, stream), jnp.zeros(batch, jnp.int32),
        jnp.full((arena.num_allies, batch), -1, jnp.int32), jnp.zeros(batch, bool),
        jnp.zeros(batch, jnp.int32), episode, seed,
    )  # fmt: skip


def begin_again(arena: Arena, state: State) -> State:
    """The next episode of every battle, for those that are over."""
    return begin(arena, state.seed, state.episode + 1)


def _shifted(
    arena: Arena, x: Float[Array, "U B"], y: Float[Array, "U B"], stream: UInt32[Array, " B"]
) -> motion.XY:
    """Each side as a whole a little off its place; buildings stay."""
    shift = uniform(stream, np.arange(4, dtype=np.uint32)[:, None]) * 2.0 - 1.0
    side = (np.arange(arena.num_units) >= arena.num_allies).astype(np.int32)
    room = _room(arena) * arena.is_mobile
    return x + room * shift[side], y + room * shift[side + 2]


@functools.lru_cache(maxsize=256)
def _room(arena: Arena) -> Column:
    """How far each unit's side can be shifted along both axes before any of it meets a wall."""
    x, y = _start(arena)
    is_ally = np.arange(arena.num_units)[:, None] < arena.num_allies
    corners = np.array([[-1, -1, 1, 1], [-1, 1, -1, 1]], np.float32) * arena.rules.spawn_jitter
    room = np.zeros((arena.num_units, 1), np.float32)
    keep_inside = jax.jit(lambda x, y: motion.keep_inside(arena, x, y))
    for share in (0.25, 0.5, 0.75, 1.0):
        off_x, off_y = x + share * corners[:1], y + share * corners[1:]
        with jax.ensure_compile_time_eval():
            free_x, free_y = (np.asarray(free) for free in keep_inside(off_x, off_y))
        stays = np.hypot(free_x - off_x, free_y - off_y).max(axis=1, keepdims=True) < ARRIVED
        for side in (is_ally, ~is_ally):
            if stays[side].all():
                room[side] = share * arena.rules.spawn_jitter
    return room


@functools.lru_cache(maxsize=256)
def _start(arena: Arena) -> tuple[Column, Column]:
    """Start positions, free of each other and of walls; worked out once per arena."""
    with jax.ensure_compile_time_eval():
        x, y = jax.jit(lambda x, y: _settle(arena, x, y))(arena.x, arena.y)
        return np.asarray(x), np.asarray(y)


def _settle(arena: Arena, x: Float[Array, "U B"], y: Float[Array, "U B"]) -> motion.XY:
    """Units free of each other and of walls."""
    alive = jnp.ones(x.shape, bool)
    weight = jnp.broadcast_to(arena.is_mobile.astype(jnp.float32), x.shape)

    def one(_, at: motion.XY) -> motion.XY:
        return motion.keep_inside(arena, *motion.push_apart(arena, at[0], at[1], weight, alive))

    return jax.lax.fori_loop(0, SETTLE_PASSES, one, motion.keep_inside(arena, x, y))


def _march_goal(arena: Arena, stream: UInt32[Array, " B"]) -> Float[Array, "2 B"]:
    order = arena.scenario.order
    if not isinstance(order, AttackMove):
        return jnp.zeros((2, stream.shape[0]), jnp.float32)
    start = np.array(order.start, np.float32)[:, None]
    end = start if order.end is None else np.array(order.end, np.float32)[:, None]
    part = uniform(stream, np.full((1, 1), 4, np.uint32))
    return jnp.asarray(start) + part * (end - start)


def decode(arena: Arena, units: Units, action: Int[Array, "A B"]) -> Orders:
    """Orders from legal actions."""
    x, y = units.x[arena.allies], units.y[arena.allies]
    walks = (action >= NORTH) & (action <= WEST)
    amount = arena.rules.move_amount
    goal_x, goal_y = x, y
    for index, (dx, dy) in enumerate(MOVES):
        chosen = action == NORTH + index
        goal_x = jnp.where(chosen, x + dx * amount, goal_x)
        goal_y = jnp.where(chosen, y + dy * amount, goal_y)
    return Orders(jnp.maximum(action - FIRST_TARGET, -1), goal_x, goal_y, walks)


def fight(arena: Arena, state: State, orders: Orders) -> tuple[Units, Minds]:
    """One environment step of game loops."""
    start, one_loop = engage(arena, state, orders)
    return jax.lax.fori_loop(0, arena.rules.loops_per_step, one_loop, start)


def engage(arena: Arena, state: State, orders: Orders) -> tuple[Moment, LoopFunction]:
    """The moment the orders arrive, and the function from loop number and moment to the next."""
    stream = step_noise(state.seed, state.episode, state.steps + 1)

    def one_loop(loop: Int[Array, ""] | int, now: Moment) -> Moment:
        lot = mix(stream + jnp.asarray(loop, jnp.uint32))
        return _loop(arena, now[0], now[1], orders, state.goal, lot)

    return (state.units, _take_orders(arena, state.minds, orders)), one_loop


def _take_orders(arena: Arena, minds: Minds, orders: Orders) -> Minds:
    """Agents turn to their new targets; a shot in progress at another one is lost."""
    same = orders.target == minds.target[arena.allies]
    windup = minds.windup.at[arena.allies].multiply(same.astype(jnp.float32))
    return minds._replace(target=minds.target.at[arena.allies].set(orders.target), windup=windup)


class _Aim(NamedTuple):
    """Ally-enemy pairs at the start of a loop."""

    dx: Float[Array, "A E B"]
    dy: Float[Array, "A E B"]
    distance2: Float[Array, "A E B"]
    ally: Bool[Array, "A E B"]
    """The ally is after the enemy."""
    enemy: Bool[Array, "A E B"]


def _loop(
    arena: Arena, units: Units, minds: Minds, orders: Orders, march: Float[Array, "2 B"],
    stream: UInt32[Array, " B"],
) -> tuple[Units, Minds]:  # fmt: skip
    alive = units.alive
    aim, minds, cap = _take_aim(arena, units, minds)
    plan = _plan(arena, units, minds, aim, orders, march)
    stride, pace = _pace(arena, minds.stride, plan.stands, cap)
    want = _want(arena, units, plan, pace)
    drift = (minds.drift_x, minds.drift_y)
    x, y = motion.move(arena, units.x, units.y, want, drift, alive)
    x, y = jnp.where(alive, x, units.x), jnp.where(alive, y, units.y)

    hp, shield, energy, calm = combat.recover(
        arena, units.hp, units.shield, units.energy, minds.calm
    )
    cooldown = jnp.maximum(units.cooldown - 1.0, 0.0)
    is_ready = plan.attacks & (cooldown <= 0)
    shoots = is_ready & (minds.windup >= arena.damage_point)
    windup = jnp.where(is_ready & ~shoots, minds.windup + 1.0, 0.0)

    before_hp, before_shield = hp, shield
    hp, shield, shot = _exchange(arena, hp, shield, shoots, aim, stream)
    fuse = minds.fuse
    if arena.is_blast.any():
        hp, shield, fuse = _burst(arena, hp, shield, before_hp, shot, fuse, aim.distance2)
    was_hit = (hp < before_hp) | (shield < before_shield)
    calm = jnp.where(was_hit, float(arena.rules.shield_delay), calm)
    cooldown = jnp.where(shot, arena.rest + _jitter(arena, stream), cooldown)

    if arena.is_healer.any():
        for side, healers in _healing_sides(arena):
            side_hp, side_energy, healing = combat.mend(
                arena, healers, arena.hp_max[side], x[side], y[side], hp[side], energy[side],
                minds.target[side], minds.windup[side],
            )  # fmt: skip
            hp, energy = hp.at[side].set(side_hp), energy.at[side].set(side_energy)
            windup = windup.at[side].set(jnp.where(arena.is_healer[side], healing, windup[side]))
    return (
        Units(x, y, hp, shield, energy, cooldown),
        Minds(minds.target, windup, stride, x - units.x, y - units.y, calm, fuse),
    )


def _take_aim(arena: Arena, units: Units, minds: Minds) -> tuple[_Aim, Minds, Float[Array, "U B"]]:
    """Who is after whom; enemies choose anew."""
    allies, enemies = arena.allies, arena.enemies
    alive = units.alive
    dx = units.x[enemies][None] - units.x[allies][:, None]
    dy = units.y[enemies][None] - units.y[allies][:, None]
    distance2 = dx * dx + dy * dy
    enemy_ids = np.arange(arena.num_enemies)[None, :, None]
    ally_aim = (minds.target[allies][:, None] == enemy_ids) & alive[enemies][None]
    ally_aim &= alive[allies][:, None] & ~arena.is_healer[allies][:, None]
    target = enemy.choose_targets(arena, distance2, alive[allies], ally_aim, minds.target[enemies])
    cap = jnp.broadcast_to(jnp.asarray(arena.stride), units.x.shape)
    if arena.is_healer[enemies].any():
        patient, enemy_cap = enemy.choose_patients(
            arena, units.x[enemies], units.y[enemies], units.hp[enemies], target >= 0,
            minds.target[enemies],
        )  # fmt: skip
        target = jnp.where(arena.is_healer[enemies], patient, target)
        cap = cap.at[enemies].set(enemy_cap)
    is_new = target != minds.target[enemies]
    minds = minds._replace(
        target=minds.target.at[enemies].set(target),
        windup=minds.windup.at[enemies].set(jnp.where(is_new, 0.0, minds.windup[enemies])),
    )
    ally_ids = np.arange(arena.num_allies)[:, None, None]
    enemy_aim = (target[None] == ally_ids) & alive[enemies][None]
    enemy_aim &= ~arena.is_healer[enemies][None]
    return _Aim(dx, dy, distance2, ally_aim, enemy_aim), minds, cap


class _Plan(NamedTuple):
    """What every unit is up to in one loop."""

    goal_x: Float[Array, "U B"]
    goal_y: Float[Array, "U B"]
    stands: Bool[Array, "U B"]
    attacks: Bool[Array, "U B"]
    takes_path: Bool[Array, "U B"]
    """Walks around walls; agents' move orders go straight."""


def _plan(
    arena: Arena, units: Units, minds: Minds, aim: _Aim, orders: Orders, march: Float[Array, "2 B"]
) -> _Plan:
    allies, enemies, alive = arena.allies, arena.enemies, units.alive
    ally_has = jnp.any(aim.ally, axis=1)
    ally_hits = jnp.any(aim.ally & (aim.distance2 <= arena.ally_reach2), axis=1)
    ally_x = units.x[allies] + jnp.sum(jnp.where(aim.ally, aim.dx, 0.0), axis=1)
    ally_y = units.y[allies] + jnp.sum(jnp.where(aim.ally, aim.dy, 0.0), axis=1)
    enemy_has = jnp.any(aim.enemy, axis=0)
    enemy_hits = jnp.any(aim.enemy & (aim.distance2 <= arena.enemy_reach2), axis=0)
    enemy_x = units.x[enemies] - jnp.sum(jnp.where(aim.enemy, aim.dx, 0.0), axis=0)
    enemy_y = units.y[enemies] - jnp.sum(jnp.where(aim.enemy, aim.dy, 0.0), axis=0)
    if arena.is_healer.any():
        ally_x, ally_y, ally_has, ally_hits = _follow_patients(
            arena.ally_healers, allies, units, minds, (ally_x, ally_y, ally_has, ally_hits)
        )
        enemy_x, enemy_y, enemy_has, enemy_hits = _follow_patients(
            arena.enemy_healers, enemies, units, minds, (enemy_x, enemy_y, enemy_has, enemy_hits)
        )
    goal_x = jnp.concatenate(
        [jnp.where(ally_has, ally_x, orders.goal_x), jnp.where(enemy_has, enemy_x, march[0][None])]
    )
    goal_y = jnp.concatenate(
        [jnp.where(ally_has, ally_y, orders.goal_y), jnp.where(enemy_has, enemy_y, march[1][None])]
    )
    walks = jnp.concatenate(
        [orders.walks | ally_has, enemy_has | (arena.enemy_marches & alive[enemies])]
    )
    in_reach = jnp.concatenate([ally_hits, enemy_hits])
    takes_path = jnp.concatenate([ally_has, jnp.ones(enemy_has.shape, bool)])
    stands = in_reach | ~walks | ~alive
    attacks = in_reach & alive & ~arena.is_healer
    return _Plan(goal_x, goal_y, stands, attacks, takes_path)


def _want(arena: Arena, units: Units, plan: _Plan, pace: Float[Array, "U B"]) -> motion.XY:
    """The step each unit would take in this loop if nobody were in its way."""
    goal = (plan.goal_x, plan.goal_y)
    off_x, off_y = motion.heading(arena, units.x, units.y, goal, plan.takes_path)
    distance2 = off_x * off_x + off_y * off_y
    scale = jnp.minimum(pace * jax.lax.rsqrt(jnp.maximum(distance2, 1e-12)), 1.0)
    scale = jnp.where(plan.stands | (distance2 < ARRIVED**2), 0.0, scale)
    return off_x * scale, off_y * scale


def _healing_sides(arena: Arena) -> tuple[tuple[slice, tuple[Healer, ...]], ...]:
    return (arena.allies, arena.ally_healers), (arena.enemies, arena.enemy_healers)


def _follow_patients(healers: tuple[Healer, ...], side: slice, units: Units, minds: Minds, errand):
    """Healers go to those they mend and stand once in reach."""
    goal_x, goal_y, has, hits = errand
    x, y, alive = units.x[side], units.y[side], units.alive[side]
    for healer in healers:
        row = healer.row
        is_patient = minds.target[side][row][None] == np.arange(x.shape[0])[:, None]
        is_patient &= alive
        to_x = jnp.sum(jnp.where(is_patient, x, 0.0), axis=0)
        to_y = jnp.sum(jnp.where(is_patient, y, 0.0), axis=0)
        reach2 = jnp.sum(jnp.where(is_patient, healer.reach2, 0.0), axis=0)
        within = (to_x - x[row]) ** 2 + (to_y - y[row]) ** 2 <= reach2
        found = jnp.any(is_patient, axis=0)
        goal_x, goal_y = goal_x.at[row].set(to_x), goal_y.at[row].set(to_y)
        has, hits = has.at[row].set(found), hits.at[row].set(found & within)
    return goal_x, goal_y, has, hits


def _pace(
    arena: Arena, stride: Float[Array, "U B"], stands: Bool[Array, "U B"], cap: Float[Array, "U B"]
) -> tuple[Float[Array, "U B"], Float[Array, "U B"]]:
    """Remembered speed and this loop's stride; only units that accelerate remember any."""
    if np.isinf(arena.stride_gain).all():
        return stride, cap
    faster = jnp.where(stands, 0.0, jnp.minimum(stride + arena.stride_gain, cap))
    return jnp.where(np.isinf(arena.stride_gain), stride, faster), faster


def _exchange(
    arena: Arena, hp: Float[Array, "U B"], shield: Float[Array, "U B"], shoots: Bool[Array, "U B"],
    aim: _Aim, stream: UInt32[Array, " B"],
) -> tuple[Float[Array, "U B"], Float[Array, "U B"], Bool[Array, "U B"]]:  # fmt: skip
    """Both sides shoot, one after the other, by lot."""
    is_ally = np.arange(arena.num_units)[:, None] < arena.num_allies
    allies_first = stream[None] >> 31 == 0
    goes_first = is_ally == allies_first
    first = shoots & goes_first
    hp, shield = _volley(arena, hp, shield, first, aim)
    second = shoots & ~goes_first & (hp > 0)
    hp, shield = _volley(arena, hp, shield, second, aim)
    return hp, shield, first | second


def _volley(
    arena: Arena, hp: Float[Array, "U B"], shield: Float[Array, "U B"], fires: Bool[Array, "U B"],
    aim: _Aim,
) -> combat.Health:  # fmt: skip
    allies, enemies = arena.allies, arena.enemies
    by_allies = combat.count_shots(
        arena, arena.ally_squads, fires[allies], aim.ally, (aim.dx, aim.dy), arena.radius[enemies]
    )
    flip = (1, 0, 2)
    by_enemies = combat.count_shots(
        arena, arena.enemy_squads, fires[enemies], aim.enemy.transpose(flip),
        (-aim.dx.transpose(flip), -aim.dy.transpose(flip)), arena.radius[allies],
    )  # fmt: skip
    ally_hp, ally_shield = combat.take_hits(arena, allies, (hp[allies], shield[allies]), by_enemies)
    enemy_hp, enemy_shield = combat.take_hits(
        arena, enemies, (hp[enemies], shield[enemies]), by_allies
    )
    return jnp.concatenate([ally_hp, enemy_hp]), jnp.concatenate([ally_shield, enemy_shield])


def _burst(
    arena: Arena, hp: Float[Array, "U B"], shield: Float[Array, "U B"],
    before_hp: Float[Array, "U B"], shot: Bool[Array, "U B"], fuse: Bool[Array, "U B"],
    distance2: Float[Array, "A E B"],
) -> tuple[Float[Array, "U B"], Float[Array, "U B"], Bool[Array, "U B"]]:  # fmt: skip
    """Blast units that attack or fall go off; those that fall to a blast do so in the next loop."""
    allies, enemies = arena.allies, arena.enemies
    hp = jnp.where(shot & arena.is_blast, 0.0, hp)
    bursts = ((before_hp > 0) & (hp <= 0) | fuse) & arena.is_blast
    by_allies = combat.count_blasts(
        arena, arena.ally_squads, bursts[allies], distance2, arena.radius[enemies]
    )
    by_enemies = combat.count_blasts(
        arena,
        arena.enemy_squads,
        bursts[enemies],
        distance2.transpose(1, 0, 2),
        arena.radius[allies],
    )
    ally = combat.take_hits(arena, allies, (hp[allies], shield[allies]), by_enemies)
    foe = combat.take_hits(arena, enemies, (hp[enemies], shield[enemies]), by_allies)
    after = jnp.concatenate([ally[0], foe[0]])
    fuse = (hp > 0) & (after <= 0) & arena.is_blast
    return after, jnp.concatenate([ally[1], foe[1]]), fuse


def _jitter(arena: Arena, stream: UInt32[Array, " B"]) -> Float[Array, "U B"]:
    low, high = arena.rules.weapon_jitter
    lanes = np.arange(1, arena.num_units + 1, dtype=np.uint32)[:, None]
    return low + (high - low) * uniform(stream, lanes)
