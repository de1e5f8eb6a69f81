"""Every hyperparameter, once. The defaults are the paper's; presets change sizes and cadence.

All classes are frozen. A text under a field is its help on the command line. What follows from
other numbers is a property, and facts of an environment live in its `EnvSpec`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import cattrs
from cattrs.v import format_exception

from .envs.make import LARGEST_SEED, nearest_names

MOST_STEPS = 10**12
"""No machine gets there; more are rather a slip of the hand."""
MOST_SEEDS = 64
"""That a number may stand for; more are rather a seed that was taken for a number."""


class ConfigError(ValueError):
    """A setting cannot be used; the message says which, what was seen and what would do."""


@dataclasses.dataclass(frozen=True)
class LocalConfig:
    """The local world model: encoder, history Transformer, categorical latent."""

    encoder_layers: int = 3
    encoder_width: int = 1024
    embedding: int = 1024
    """Size of an observation embedding."""
    deterministic: int = 4096
    """Size of the history state h."""
    latents: int = 32
    """Categorical variables of the stochastic state z."""
    classes: int = 64
    """Classes of each of them."""
    unimix: float = 0.01
    """Share of the uniform distribution in posterior and prior."""
    layers: int = 2
    width: int = 512
    heads: int = 8
    window: int = 64
    """Records one layer of the history Transformer looks back on, itself included."""
    hidden: int = 1024
    """Width of posterior, prior, predictors and availability head."""
    prior_layers: int = 2
    ema: float = 0.01
    """Rate at which the target encoder follows the encoder."""

    @property
    def feature(self) -> int:
        """Size of the local state s = [h; vec z]."""
        return self.deterministic + self.latents * self.classes


@dataclasses.dataclass(frozen=True)
class JointConfig:
    """The joint world model, used in training only."""

    agent_layers: int = 2
    """Layers of attention over agents."""
    layers: int = 12
    """Layers of the temporal Transformer."""
    width: int = 256
    heads: int = 4
    window: int = 16
    """Records one temporal layer looks back on, itself included."""
    dropout: float = 0.1
    hidden: int = 512
    """Width of the heads."""
    horizons: tuple[int, ...] = (1, 2, 4, 8)
    """Steps ahead of the direct prediction heads."""


@dataclasses.dataclass(frozen=True)
class BinsConfig:
    """Two-hot distributions of rewards and values, equally spaced in symlog."""

    count: int = 255
    limit: float = 5.0
    """Largest magnitude, in symlog."""


@dataclasses.dataclass(frozen=True)
class LocalWeights:
    """Coefficients of the local objective."""

    post: float = 2.0
    dyn: float = 2.0
    sigreg: float = 0.05
    legal: float = 1.0
    dyn_reg: float = 1.0
    rep_reg: float = 0.1


@dataclasses.dataclass(frozen=True)
class JointWeights:
    """Coefficients of the one-step joint objective and of the auxiliaries."""

    emb: float = 2.0
    interface: float = 1.0
    align: float = 0.05
    reward: float = 1.0
    cont: float = 1.0
    alive: float = 1.0
    joint_legal: float = 1.0
    multi_step: float = 2.0
    discrimination: float = 0.1
    self_fed: float = 0.1
    """Of the mean over endpoints of the self-fed losses."""


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """The objective of the world model."""

    local: LocalWeights = LocalWeights()
    joint: JointWeights = JointWeights()
    free_nats: float = 1.0
    horizon_decay: float = 0.75
    """Ratio of the weights of successive prediction horizons."""
    margin: float = 0.1
    """Of action discrimination, in cosine similarity."""
    sigreg_projections: int = 256
    sigreg_points: int = 17
    sigreg_limit: float = 3.0
    """Largest frequency of the characteristic functions."""
    sigreg_mask: Literal["active", "present"] = "active"
    """`active` leaves out slots dead for more than one record, which all look the same."""
    sigreg_samples: int | None = None
    """Scale the statistic as if a slot had this many samples; none keeps the count."""
    self_fed_roots: int = 8
    self_fed_horizons: tuple[int, ...] = (2, 4, 5)
    self_fed_chunk: int = 2
    """Transitions between two cuts of the gradient in self-fed rollouts."""
    trajectory: float = 0.1
    """Of the alignment of self-fed posteriors, inside the self-fed loss."""


@dataclasses.dataclass(frozen=True)
class Routes:
    """Scales of the gradients that joint losses send into the local features; 0 cuts a route."""

    outcome: float = 1.0
    """Of reward, continuation and alive losses."""
    jepa: float = 0.1
    """Of the one-step embedding loss, after its own coefficient."""


@dataclasses.dataclass(frozen=True)
class ReplayConfig:
    """The replay buffer and its two views."""

    capacity: int = 500_000
    """Rows over all environments; the oldest go first."""
    batch: int = 16
    """Sequences in each view."""
    learning: int = 64
    """Records of a sequence that losses are computed on."""
    uniform: float = 0.5
    """Share of the uniform distribution over starts; the rest prefers recent ones."""
    decay: float = 0.9998
    """Of the recency distribution, per start."""
    write_back: Literal["none", "model", "behaviour"] = "model"
    """Which view's freshly inferred latents replace the stored ones."""
    place: Literal["auto", "device", "host"] = "auto"
    """Whose memory holds it; `auto` is the host's if it does not fit beside what learning takes on
    the device. Random keys do not depend on it, but the host draws with its CPU, which may round
    the ages of recent starts differently from an accelerator."""


@dataclasses.dataclass(frozen=True)
class ImaginationConfig:
    horizon: int = 5
    dead_embedding: Literal["predicted", "observed"] = "predicted"
    """Embedding of a dead slot: the joint model's, or the encoding of the dead observation."""


@dataclasses.dataclass(frozen=True)
class PolicyConfig:
    """Actor, critic and PPO in imagination."""

    actor_layers: int = 3
    actor_width: int = 512
    critic_layers: int = 2
    critic_width: int = 256
    critic_heads: int = 4
    epochs: int = 5
    """Actor steps and critic steps on one imagined batch."""
    clip: float = 0.2
    entropy: float = 0.003
    discount: float = 1 - 1 / 333
    trace: float = 0.95
    """The λ of imagined returns."""
    replay_trace: float = 0.95
    replay_value: float = 0.3
    """Coefficient of the value loss on replayed rewards."""


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Adaptive gradient clipping, then RMS, then momentum; the same chain for four groups."""

    model_rate: float = 1e-4
    actor_rate: float = 3e-5
    critic_rate: float = 3e-5
    clip: float = 0.3
    """Largest ratio of a tensor's gradient norm to its own norm."""
    clip_floor: float = 1e-3
    """Norm that a tensor has at least, for that ratio."""
    momentum: float = 0.9
    rms: float = 0.999
    eps: float = 1e-20
    patience: int = 20
    """Non-finite updates in a row after which training stops with an error."""


@dataclasses.dataclass(frozen=True)
class CollectConfig:
    """How experience is gathered and how often the learner is called."""

    num_envs: int = 16
    prefill: int = 5_000
    """Transitions before the first learner call."""
    train_ratio: float = 128.0
    """Learning records replayed for each transition."""
    model_only_calls: int = 250
    """First learner calls that train the world model alone."""
    timeout_is_terminal: bool = True
    """Whether a time limit ends the world, as in SMAC's own interface."""


@dataclasses.dataclass(frozen=True)
class MajepaConfig:
    """Settings of MA-JEPA."""

    local: LocalConfig = LocalConfig()
    joint: JointConfig = JointConfig()
    bins: BinsConfig = BinsConfig()
    loss: LossConfig = LossConfig()
    routes: Routes = Routes()
    replay: ReplayConfig = ReplayConfig()
    imagination: ImaginationConfig = ImaginationConfig()
    policy: PolicyConfig = PolicyConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    collect: CollectConfig = CollectConfig()
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """Of matrix products; parameters, norms, softmaxes and losses stay in float32."""

    def __post_init__(self) -> None:
        _check_majepa(self)

    @property
    def context(self) -> int:
        """Records before the learning ones: what the stacked windows can look back on."""
        return max(self.local.layers * self.local.window, self.joint.layers * self.joint.window)

    @property
    def calls_per_transition(self) -> float:
        return self.collect.train_ratio / (self.replay.batch * self.replay.learning)


@dataclasses.dataclass(frozen=True)
class MappoConfig:
    """Settings of MAPPO. Some maps have values of their own: `MAPPO_MAPS`."""

    recurrent: bool = True
    """A GRU in actor and critic; otherwise feed-forward."""
    width: int = 64
    layers: int = 2
    frames: int = 1
    """Observations and states stacked, newest last."""
    num_envs: int = 8
    rollout: int = 400
    """Rows from each environment between updates."""
    chunk: int = 10
    """Length of the sequences that gradients flow through in the GRU."""
    epochs: int = 15
    minibatches: int = 1
    clip: float = 0.2
    entropy: float = 0.01
    discount: float = 0.99
    trace: float = 0.95
    actor_rate: float = 5e-4
    critic_rate: float = 5e-4
    adam_eps: float = 1e-5
    max_gradient: float = 10.0
    """Largest global norm of a network's gradient."""
    huber: float = 10.0
    value_decay: float = 0.99999
    """Of the running statistics of returns."""
    timeout_is_terminal: bool = True

    def __post_init__(self) -> None:
        _check_numbers(self)


@dataclasses.dataclass(frozen=True)
class QmixConfig:
    """Settings of QMIX, as PyMARL2 has it."""

    width: int = 64
    """Of the agents' layers."""
    mixer_width: int = 32
    hyper_width: int = 64
    """Of the networks that make the mixer's weights from the state."""
    num_envs: int = 8
    """Episodes between two updates."""
    capacity: int = 5_000
    """Episodes in the replay."""
    batch: int = 128
    """Episodes of an update; there is none before the replay holds that many."""
    updates: int = 1
    """Steps of the optimizer after each round of episodes."""
    target_every: int = 200
    """Episodes between two copies of the networks into their targets."""
    discount: float = 0.99
    trace: float = 0.6
    """The λ of the returns."""
    rate: float = 1e-3
    adam_eps: float = 1e-8
    max_gradient: float = 10.0
    """Largest global norm of the gradient of agent and mixer together."""
    epsilon_start: float = 1.0
    epsilon_end: float = 0.05
    epsilon_steps: int = 100_000
    """Transitions over which the share of random actions falls, linearly."""
    timeout_is_terminal: bool = True

    def __post_init__(self) -> None:
        _check_numbers(self)
        least = max(self.batch, self.num_envs)
        wanted = f"at least {least} episodes, a batch and a round of all environments"
        _require(self.capacity >= least, "algo.capacity", self.capacity, wanted)


@dataclasses.dataclass(frozen=True)
class MatConfig:
    """Settings of MAT."""

    width: int = 64
    blocks: int = 1
    """Of the encoder, and of the decoder."""
    heads: int = 1
    num_envs: int = 32
    rollout: int = 100
    """Rows from each environment between updates."""
    epochs: int = 15
    minibatches: int = 1
    """Parts of a rollout with a step each in an epoch; agents of a joint step stay together."""
    clip: float = 0.05
    entropy: float = 0.01
    discount: float = 0.99
    trace: float = 0.95
    rate: float = 5e-4
    adam_eps: float = 1e-5
    max_gradient: float = 10.0
    """Largest global norm of the gradient."""
    huber: float = 10.0
    value_decay: float = 0.99999
    """Of the running statistics of returns."""
    timeout_is_terminal: bool = True

    def __post_init__(self) -> None:
        _check_numbers(self)
        wanted = f"a divisor of the width, {self.width}"
        _require(self.width % self.heads == 0, "algo.heads", self.heads, wanted)
        steps = self.num_envs * self.rollout
        wanted = f"from 1 to {steps}, the joint steps of a rollout"
        _require(self.minibatches <= steps, "algo.minibatches", self.minibatches, wanted)


AlgorithmConfig = MajepaConfig | MappoConfig | QmixConfig | MatConfig

MAPPO_MAPS: Mapping[str, Mapping[str, Any]] = {
    "3s_vs_4z": {"recurrent": False, "frames": 4},
    "3s_vs_5z": {"recurrent": False, "frames": 4, "clip": 0.05},
    "2c_vs_64zg": {"epochs": 5},
    "corridor": {"recurrent": False, "epochs": 5},
    "6h_vs_8z": {"recurrent": False, "epochs": 5},
}
"""Settings of MAPPO that its authors chose for single maps of SMAC."""


def _require(good: bool, name: str, seen: object, wanted: str) -> None:
    if not good:
        raise ConfigError(f"{name} is {seen!r}; it must be {wanted}")


def require_seed(seed: int) -> None:
    """Refuse a seed that would not be one of its own: keys take 32 bits of it."""
    _require(0 <= seed <= LARGEST_SEED, "seed", seed, f"from 0 to {LARGEST_SEED}")


MAY_BE_ZERO = {"prefill", "model_only_calls"}
ABOVE_ZERO = {"clip", "clip_floor", "eps", "adam_eps", "max_gradient"}
"""What an optimizer divides by, or bounds its steps with: with zero, a finite gradient makes a step
that is no number."""
SHARES = {
    "unimix", "ema", "horizon_decay", "uniform", "decay", "discount", "trace", "replay_trace",
    "epsilon_start", "epsilon_end",
}  # fmt: skip
BELOW_ONE = {"dropout", "momentum", "rms", "value_decay"}


def _check_numbers(config: Any, place: str = "algo") -> None:
    """Counts are one or more, scales zero or more, shares at most one, bounds above zero."""
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), f"{place}.{field.name}"
        if dataclasses.is_dataclass(value):
            _check_numbers(value, name)
        elif isinstance(value, tuple):
            good = len(value) > 0 and all(item >= 1 for item in value)
            _require(good, name, value, "one or more whole numbers above zero")
        elif isinstance(value, bool):
            continue
        elif isinstance(value, int) and field.name in MAY_BE_ZERO:
            _require(value >= 0, name, value, "zero or more")
        elif isinstance(value, int):
            _require(value >= 1, name, value, "one or more")
        elif isinstance(value, float) and field.name in ABOVE_ZERO:
            _require(0 < value < math.inf, name, value, "above zero, and finite")
        elif isinstance(value, float) and field.name in BELOW_ONE:
            _require(0 <= value < 1, name, value, "zero or more and below 1")
        elif isinstance(value, float) and field.name in SHARES:
            _require(0 <= value <= 1, name, value, "between 0 and 1")
        elif isinstance(value, float):
            _require(0 <= value < math.inf, name, value, "zero or more, and finite")


def _check_majepa(config: MajepaConfig) -> None:
    _check_numbers(config)
    local, joint, replay = config.local, config.joint, config.replay
    for name, width, heads in (
        ("local", local.width, local.heads),
        ("joint", joint.width, joint.heads),
        ("policy.critic", config.policy.critic_width, config.policy.critic_heads),
    ):
        _require(
            heads >= 1 and width % (2 * heads) == 0,
            f"algo.{name} width",
            width,
            f"a multiple of twice its {heads} heads",
        )
    farthest = max((*joint.horizons, *config.loss.self_fed_horizons))
    _require(
        replay.learning > farthest,
        "algo.replay.learning",
        replay.learning,
        f"more than the farthest prediction horizon, {farthest}",
    )
    bins, roots = config.bins.count, config.loss.self_fed_roots
    odd = bins >= 3 and bins % 2 == 1
    _require(odd, "algo.bins.count", bins, "odd and three or more, so that one bin is zero")
    _require(
        1 <= roots <= replay.batch * replay.learning,
        "algo.loss.self_fed_roots",
        roots,
        f"between 1 and the {replay.batch * replay.learning} learning records of a batch",
    )
    _require(replay.decay > 0, "algo.replay.decay", replay.decay, "above 0 and at most 1")
    rows = replay.capacity // config.collect.num_envs
    _require(
        rows > config.context + replay.learning,
        "algo.replay.capacity",
        replay.capacity,
        f"at least {(config.context + replay.learning + 1) * config.collect.num_envs} rows: "
        f"one sequence and the row before it for each of {config.collect.num_envs} environments",
    )


SMALL = MajepaConfig(
    local=LocalConfig(
        encoder_layers=2, encoder_width=128, embedding=64, deterministic=128, latents=16,
        classes=8, layers=2, width=64, heads=4, window=16, hidden=96, prior_layers=1,
    ),
    joint=JointConfig(agent_layers=1, layers=2, width=64, heads=4, window=8, hidden=96),
    bins=BinsConfig(count=63),
    loss=LossConfig(sigreg_projections=32, sigreg_samples=1024),
    replay=ReplayConfig(capacity=200_000, batch=8, learning=24),
    policy=PolicyConfig(actor_layers=2, actor_width=96, critic_layers=1, critic_width=64),
    optimizer=OptimizerConfig(model_rate=1e-3, actor_rate=3e-4, critic_rate=3e-4),
    collect=CollectConfig(prefill=1_000, train_ratio=32, model_only_calls=100),
    precision="float32",
)  # fmt: skip
"""MA-JEPA for a laptop: other sizes, batch, context and cadence, the same method. Layers are about
ten times narrower than the paper's, and rates are ten times higher, in the same proportion."""

DEBUG = MajepaConfig(
    local=LocalConfig(
        encoder_layers=1, encoder_width=16, embedding=16, deterministic=24, latents=4, classes=4,
        layers=2, width=16, heads=2, window=4, hidden=16, prior_layers=1,
    ),
    joint=JointConfig(agent_layers=1, layers=2, width=16, heads=2, window=4, hidden=16),
    bins=BinsConfig(count=15),
    loss=LossConfig(sigreg_projections=16, sigreg_samples=1024, self_fed_roots=4),
    replay=ReplayConfig(capacity=4_000, batch=3, learning=14),
    policy=PolicyConfig(actor_layers=1, actor_width=16, critic_width=16, critic_heads=2),
    collect=CollectConfig(num_envs=4, prefill=100, train_ratio=8, model_only_calls=2),
    precision="float32",
)  # fmt: skip
"""MA-JEPA at its smallest: everything happens, nothing is learned."""

# A budget of 100,000 transitions is 31 of the paper's rollouts and 465 steps of the optimizer: too
# few to show what these methods can do. Rollouts a quarter as large, in two parts, give 2,500.
MAPPO_TUNED = MappoConfig(rollout=100, epochs=10, minibatches=2)
MAPPO_DEBUG = MappoConfig(width=16, rollout=20, num_envs=4, epochs=2)
MAT_TUNED = MatConfig(num_envs=16, rollout=50, epochs=10, minibatches=2)
MAT_DEBUG = MatConfig(width=16, heads=2, rollout=20, num_envs=4, epochs=2)

QMIX_TUNED = QmixConfig(num_envs=4, capacity=2_500, batch=64, trace=0.5)
"""PyMARL2's own settings for few samples: twice as many updates for each transition."""
QMIX_DEBUG = QmixConfig(
    width=16, mixer_width=8, hyper_width=8, num_envs=4, capacity=40, batch=8, target_every=16,
    epsilon_steps=500,
)  # fmt: skip

PRESETS: Mapping[str, Mapping[str, AlgorithmConfig]] = {
    "majepa": {"small": SMALL, "paper": MajepaConfig(), "debug": DEBUG},
    "mappo": {"paper": MappoConfig(), "tuned": MAPPO_TUNED, "debug": MAPPO_DEBUG},
    "qmix": {"paper": QmixConfig(), "tuned": QMIX_TUNED, "debug": QMIX_DEBUG},
    "mat": {"paper": MatConfig(), "tuned": MAT_TUNED, "debug": MAT_DEBUG},
}
"""Presets by algorithm; the first is what plain `majepa train` takes."""

BUDGETS: Mapping[str, int] = {"3s_vs_5z": 200_000, "2c_vs_64zg": 200_000, "corridor": 400_000}
"""Transitions the paper trains for on single maps; `BUDGET` on all others."""
BUDGET = 100_000
PRESET_BUDGETS: Mapping[str, int] = {"small": 10_000, "debug": 1_000}


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    every: int = 5_000
    """Transitions between two evaluations."""
    episodes: int = 32
    """Episodes of an evaluation while training."""
    final_episodes: int = 100
    """Episodes of the evaluation at the end, whose argmax win rate is the result."""


@dataclasses.dataclass(frozen=True)
class LogConfig:
    """Where metrics go besides the console and metrics.jsonl."""

    tensorboard: bool = False
    wandb: bool = False
    """Offline, unless the environment variable WANDB_MODE says otherwise."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One training run."""

    algo: AlgorithmConfig
    env: str = "sim:3m"
    """`family:map`; `majepa maps` lists the maps."""
    steps: int = BUDGET
    """Budget: real transitions over all environments."""
    seed: int = 0
    evaluation: EvaluationConfig = EvaluationConfig()
    save_every: int = 10_000
    """Transitions between two checkpoints."""
    log: LogConfig = LogConfig()

    def __post_init__(self) -> None:
        _require(self.steps >= 1, "steps", self.steps, "at least one transition, such as 30000")
        _require(self.steps <= MOST_STEPS, "steps", self.steps, f"at most {MOST_STEPS:,}")
        require_seed(self.seed)
        for name in ("every", "episodes", "final_episodes"):
            value = getattr(self.evaluation, name)
            _require(value >= 1, f"evaluation.{name}", value, "one or more")
        _require(self.save_every >= 1, "save_every", self.save_every, "one or more")

    @property
    def algorithm(self) -> str:
        return algorithm_of(self.algo)


def algorithm_of(config: AlgorithmConfig) -> str:
    """Name of the algorithm that a config belongs to."""
    names = {MajepaConfig: "majepa", MappoConfig: "mappo", QmixConfig: "qmix", MatConfig: "mat"}
    return names[type(config)]


def preset(algorithm: str = "majepa", name: str | None = None, env: str = "sim:3m") -> TrainConfig:
    """The run that an algorithm, a preset and an environment stand for, before any override."""
    if algorithm not in PRESETS:
        raise ConfigError(f"unknown algorithm {algorithm!r}; {nearest_names(algorithm, PRESETS)}")
    presets = PRESETS[algorithm]
    name = next(iter(presets)) if name is None else name
    if name not in presets:
        raise ConfigError(f"unknown preset {name!r} of {algorithm}; {nearest_names(name, presets)}")
    map_name = env.rpartition(":")[2]
    algo = presets[name]
    if isinstance(algo, MappoConfig):
        algo = dataclasses.replace(algo, **MAPPO_MAPS.get(map_name, {}))
    steps = PRESET_BUDGETS.get(name, BUDGETS.get(map_name, BUDGET))
    every = max(1, min(EvaluationConfig().every, steps // 4))
    return TrainConfig(algo=algo, env=env, steps=steps, evaluation=EvaluationConfig(every=every))


def with_seeds(config: TrainConfig, seeds: int | Sequence[int]) -> list[TrainConfig]:
    """The same run once for each seed: for those listed, or for so many from the config's own."""
    if isinstance(seeds, int):
        _require(seeds >= 1, "seeds", seeds, "one or more runs, or a list of two seeds or more")
        if seeds > MOST_SEEDS:
            raise ConfigError(
                f"seeds is {seeds}, and one number is how many runs to train together, "
                f"{MOST_SEEDS} at most; did you mean --seed {seeds}?"
            )
        seeds = range(config.seed, config.seed + seeds)
    if not seeds:
        raise ConfigError("seeds are none; name at least one")
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"seeds are {', '.join(map(str, seeds))}; each must be there once")
    return [dataclasses.replace(config, seed=seed) for seed in seeds]


def to_json(config: TrainConfig) -> dict[str, Any]:
    """A config as plain data; the algorithm's part says whose it is."""
    data = _CONVERTER.unstructure(config)
    return {**data, "algo": {"algorithm": config.algorithm, **data["algo"]}}


def from_json(data: Mapping[str, Any]) -> TrainConfig:
    """The config that `to_json` stored; unknown fields are errors."""
    algo = dict(data.get("algo") or {})
    algorithm = algo.pop("algorithm", None)
    if algorithm not in PRESETS:
        raise ConfigError(
            f"a stored config must name its algorithm ({', '.join(PRESETS)}), got {algorithm!r}"
        )
    kind = type(next(iter(PRESETS[algorithm].values())))
    rest = {name: value for name, value in data.items() if name != "algo"}
    try:
        made = _CONVERTER.structure(algo, kind)
        return _CONVERTER.structure({**rest, "algo": made}, TrainConfig)
    except (cattrs.BaseValidationError, cattrs.errors.ForbiddenExtraKeysError) as error:
        reasons = "; ".join(cattrs.transform_error(error, "config", _reason))
        raise ConfigError(f"the stored config cannot be used: {reasons}") from error


def with_overrides(config: TrainConfig, overrides: Mapping[str, Any]) -> TrainConfig:
    """A config in which single settings, named with dots, have other values."""
    data = to_json(config)
    for name, value in overrides.items():
        *groups, field = name.split(".")
        part = data
        for group in groups:
            part = part.get(group) if isinstance(part, dict) else None
        if not isinstance(part, dict) or field not in part:
            raise ConfigError(f"there is no setting {name!r}; `majepa train --help` lists them")
        part[field] = list(value) if isinstance(value, tuple) else value
    return from_json(data)


def _reason(error: BaseException, kind: Any) -> str:
    """Our own words where we have some."""
    return str(error) if isinstance(error, ConfigError) else format_exception(error, kind)


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True)
    converter.register_structure_hook(AlgorithmConfig, lambda made, _: made)
    return converter


_CONVERTER = _converter()
