"""The presets against the paper's tables, and configs that cannot be used."""

import dataclasses
import json
import operator

import pytest

from majepa.config import (
    MAPPO_MAPS,
    PRESETS,
    BinsConfig,
    CollectConfig,
    ConfigError,
    EvaluationConfig,
    ImaginationConfig,
    JointConfig,
    LocalConfig,
    LossConfig,
    MajepaConfig,
    MappoConfig,
    MatConfig,
    OptimizerConfig,
    PolicyConfig,
    QmixConfig,
    ReplayConfig,
    TrainConfig,
    from_json,
    preset,
    to_json,
)

PAPER = PRESETS["majepa"]["paper"]

TABLE = {
    "Observation encoder layers / width": {
        "local.encoder_layers": 3,
        "local.encoder_width": 1024,
    },
    "Deterministic state dimension": {"local.deterministic": 4096},
    "Categorical latent": {"local.latents": 32, "local.classes": 64},
    "Latent uniform mixture": {"local.unimix": 0.01},
    "Local Transformer layers / width / heads": {
        "local.layers": 2,
        "local.width": 512,
        "local.heads": 8,
    },
    "Local / joint context length": {"local.window": 64, "joint.window": 16},
    "Joint agent-interaction / temporal layers": {"joint.agent_layers": 2, "joint.layers": 12},
    "Joint Transformer width / heads": {"joint.width": 256, "joint.heads": 4},
    "Joint dropout": {"joint.dropout": 0.1},
    "World-model learning rate": {"optimizer.model_rate": 1e-4},
    "Adaptive gradient clipping": {"optimizer.clip": 0.3},
    "Target-encoder EMA rate": {"local.ema": 0.01},
    "SIGReg coefficient": {"loss.local.sigreg": 0.05},
    "Direct JEPA prediction horizons": {"joint.horizons": (1, 2, 4, 8)},
    "Action-margin / loss coefficient": {"loss.margin": 0.1, "loss.joint.discrimination": 0.1},
    "Self-fed horizons / BPTT length": {
        "loss.self_fed_horizons": (2, 4, 5),
        "loss.self_fed_chunk": 2,
    },
    "Outcome / factual JEPA input-gradient scales": {"routes.outcome": 1.0, "routes.jepa": 0.1},
    "Actor hidden layers / width": {"policy.actor_layers": 3, "policy.actor_width": 512},
    "Central critic layers / width": {"policy.critic_layers": 2, "policy.critic_width": 256},
    "Actor / critic learning rate": {"optimizer.actor_rate": 3e-5, "optimizer.critic_rate": 3e-5},
    "Actor / critic PPO epochs": {"policy.epochs": 5},
    "PPO clipping": {"policy.clip": 0.2},
    "Entropy coefficient": {"policy.entropy": 0.003},
    "Discount / return-trace": {"policy.discount": 1 - 1 / 333, "policy.trace": 0.95},
    "Imagination horizon": {"imagination.horizon": 5},
    "Auxiliary replay-value loss coefficient": {"policy.replay_value": 0.3},
    # Not a number: tests/test_imagine.py sees the local head drawn from.
    "Imagined action mask": {},
}
"""The table of the paper's hyperparameters, row by row."""

APPENDIX = {
    "loss.local.post": 2.0,
    "loss.local.dyn": 2.0,
    "loss.local.legal": 1.0,
    "loss.local.dyn_reg": 1.0,
    "loss.local.rep_reg": 0.1,
    "loss.joint.emb": 2.0,
    "loss.joint.interface": 1.0,
    "loss.joint.align": 0.05,
    "loss.joint.reward": 1.0,
    "loss.joint.cont": 1.0,
    "loss.joint.alive": 1.0,
    "loss.joint.joint_legal": 1.0,
    "loss.joint.multi_step": 2.0,
    "loss.joint.self_fed": 0.1,
    "loss.trajectory": 0.1,
    "loss.free_nats": 1.0,
    "loss.horizon_decay": 0.75,
    "loss.self_fed_roots": 8,
    "policy.replay_trace": 0.95,
    "optimizer.momentum": 0.9,
    "optimizer.rms": 0.999,
    "optimizer.eps": 1e-20,
    "replay.learning": 64,
    "replay.uniform": 0.5,
    "replay.decay": 0.9998,
    "collect.timeout_is_terminal": True,
    "loss.sigreg_projections": 256,
    "loss.sigreg_points": 17,
    "loss.sigreg_limit": 3.0,
}
"""What the appendix says outside its table."""

OURS = {
    "local.embedding": 1024,
    "local.hidden": 1024,
    "local.prior_layers": 2,
    "joint.hidden": 512,
    "bins.count": 255,
    "bins.limit": 5.0,
    "loss.sigreg_mask": "active",
    "loss.sigreg_samples": None,
    "replay.capacity": 500_000,
    "replay.batch": 16,
    "replay.write_back": "model",
    "replay.place": "auto",
    "imagination.dead_embedding": "predicted",
    "policy.critic_heads": 4,
    "optimizer.clip_floor": 1e-3,
    "optimizer.patience": 20,
    "collect.num_envs": 16,
    "collect.prefill": 5_000,
    "collect.train_ratio": 128.0,
    "collect.model_only_calls": 250,
    "precision": "bfloat16",
}
"""What the paper leaves open and we decided."""

SIZES = {
    *(f"local.{name}" for name in ("encoder_layers", "encoder_width", "embedding")),
    *(f"local.{name}" for name in ("deterministic", "latents", "classes", "layers", "width")),
    *(f"local.{name}" for name in ("heads", "window", "hidden", "prior_layers")),
    *(f"joint.{name}" for name in ("agent_layers", "layers", "width", "heads", "window", "hidden")),
    *(f"policy.{name}" for name in ("actor_layers", "actor_width")),
    *(f"policy.{name}" for name in ("critic_layers", "critic_width", "critic_heads")),
    "bins.count",
    "loss.sigreg_projections",
    "loss.self_fed_roots",
    "replay.capacity",
    "replay.batch",
    "replay.learning",
}
RATES = {f"optimizer.{name}" for name in ("model_rate", "actor_rate", "critic_rate")}
"""Narrow layers need larger ones."""
CADENCE = {f"collect.{name}" for name in ("num_envs", "prefill", "train_ratio", "model_only_calls")}


def flat(config, path: str = "") -> dict[str, object]:
    """Every setting by its path."""
    found = {}
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), path + field.name
        found |= flat(value, name + ".") if dataclasses.is_dataclass(value) else {name: value}
    return found


@pytest.mark.parametrize("row", TABLE)
def test_the_papers_table(row):
    for path, value in TABLE[row].items():
        assert operator.attrgetter(path)(PAPER) == value, path


def test_every_setting_of_the_paper_preset_has_a_source():
    sources = [*TABLE.values(), APPENDIX, OURS]
    known = {path: value for source in sources for path, value in source.items()}
    assert sum(map(len, sources)) == len(known)
    assert flat(PAPER) == known


def test_what_follows_from_the_papers_numbers():
    assert PAPER.context == 192
    # Two local layers of 64 records; twelve joint ones of 16 reach further.
    local_only = dataclasses.replace(PAPER, joint=dataclasses.replace(PAPER.joint, layers=4))
    assert local_only.context == 128
    # 128 records replayed for each transition, in calls of 16 times 64.
    assert PAPER.calls_per_transition == 1 / 8


@pytest.mark.parametrize("name", ["small", "debug"])
def test_smaller_presets_change_sizes_and_cadence_and_nothing_of_the_method(name):
    paper, other = flat(PAPER), flat(PRESETS["majepa"][name])
    changed = {path for path in paper if paper[path] != other[path]}
    assert changed <= SIZES | RATES | CADENCE | {"precision", "loss.sigreg_samples"}
    faster = {path: other[path] / paper[path] for path in RATES}
    assert max(faster.values()) == pytest.approx(min(faster.values()))
    assert {"local.width", "joint.width", "replay.batch", "collect.prefill"} <= changed
    assert other["precision"] == "float32"
    # The statistic grows with its samples; it is scaled to those of the paper's batch.
    assert other["loss.sigreg_samples"] == PAPER.replay.batch * PAPER.replay.learning


MAPPO_TABLE = {
    "Actor / critic learning rate": {"actor_rate": 5e-4, "critic_rate": 5e-4},
    "Rollout length per collector": {"rollout": 400},
    "Parallel collection environments": {"num_envs": 8},
    "Entropy coefficient": {"entropy": 0.01},
    "Discount": {"discount": 0.99},
    "GAE": {"trace": 0.95},
    "PPO epochs": {"epochs": 15},
    "PPO clipping": {"clip": 0.2},
    "Minibatches per PPO epoch": {"minibatches": 1},
    "Maximum gradient norm": {"max_gradient": 10.0},
    "MLP / recurrent hidden width": {"width": 64},
    "Policy": {"recurrent": True},
    # Settings of the implementation that the paper used.
    "on-policy": {
        "layers": 2,
        "frames": 1,
        "chunk": 10,
        "adam_eps": 1e-5,
        "huber": 10.0,
        "value_decay": 0.99999,
        "timeout_is_terminal": True,
    },
}


def test_the_papers_mappo_table():
    config = PRESETS["mappo"]["paper"]
    assert flat(config) == {
        path: value for row in MAPPO_TABLE.values() for path, value in row.items()
    }
    assert config.rollout * config.num_envs == 3200


def test_mappo_on_single_maps_takes_the_other_values_of_its_table():
    feed_forward = {"3s_vs_4z", "3s_vs_5z", "corridor", "6h_vs_8z"}
    five_epochs = {"2c_vs_64zg", "corridor", "6h_vs_8z"}
    for name in {*MAPPO_MAPS, "2s3z", "8m", "MMM"}:
        algo = preset("mappo", "paper", f"sim:{name}").algo
        expected = dataclasses.replace(
            MappoConfig(),
            recurrent=name not in feed_forward,
            frames=4 if name in ("3s_vs_4z", "3s_vs_5z") else 1,
            epochs=5 if name in five_epochs else 15,
            clip=0.05 if name == "3s_vs_5z" else 0.2,
        )
        assert algo == expected, name


@pytest.mark.parametrize(
    ("name", "env", "steps"),
    [
        ("paper", "sim:2s3z", 100_000),
        ("paper", "sim:3s_vs_5z", 200_000),
        ("paper", "2c_vs_64zg", 200_000),
        ("paper", "sim:corridor", 400_000),
        ("small", "sim:corridor", 10_000),
        ("debug", "sim:3m", 1_000),
    ],
)
def test_budgets(name, env, steps):
    run = preset("majepa", name, env)
    assert (run.steps, run.env, run.algorithm) == (steps, env, "majepa")
    assert 1 <= run.evaluation.every <= steps / 4


def test_the_default_is_the_small_preset():
    assert preset() == preset("majepa", "small")
    assert preset("mappo").algo == MappoConfig()
    assert preset("mat").algo == MatConfig()


@pytest.mark.parametrize("algorithm", ["mappo", "mat"])
def test_tuned_baselines_learn_more_often_at_the_papers_budget(algorithm):
    paper, tuned = (preset(algorithm, name, "sim:2s3z") for name in ("paper", "tuned"))
    assert tuned.steps == paper.steps == 100_000
    steps = [
        run.steps // (run.algo.num_envs * run.algo.rollout) * run.algo.epochs * run.algo.minibatches
        for run in (paper, tuned)
    ]
    assert steps == [465, 2500]


@pytest.mark.parametrize(
    ("algorithm", "name", "words"),
    [
        ("majeppa", None, ["unknown algorithm 'majeppa'", "majepa"]),
        ("majepa", "papers", ["unknown preset 'papers' of majepa", "paper"]),
    ],
)
def test_unknown_names_lead_to_known_ones(algorithm, name, words):
    with pytest.raises(ConfigError) as caught:
        preset(algorithm, name)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("algorithm", "name"),
    [(algorithm, name) for algorithm in PRESETS for name in PRESETS[algorithm]],
)
def test_a_config_survives_json(algorithm, name):
    run = dataclasses.replace(
        preset(algorithm, name, "sim:corridor"), seed=7, evaluation=EvaluationConfig(every=3)
    )
    text = json.dumps(to_json(run))
    again = from_json(json.loads(text))
    assert again == run
    assert hash(again) == hash(run)
    assert json.loads(text)["algo"]["algorithm"] == algorithm


def stored(**changes) -> dict:
    """A stored debug run, with `path__to__field` changed."""
    data = json.loads(json.dumps(to_json(preset("majepa", "debug"))))
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = data
        for parent in parents:
            place = place[parent]
        place[last] = value
    return data


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"algo__local__widht": 3}, ["widht", "local"]),
        ({"stepz": 3}, ["stepz"]),
        ({"algo__local__width": "wide"}, ["width"]),
        ({"algo__replay__write_back": "sometimes"}, ["write_back"]),
        ({"algo__algorithm": "nobody"}, ["must name its algorithm", "majepa", "'nobody'"]),
        ({"algo": None}, ["must name its algorithm"]),
        ({"algo__replay__learning": 2}, ["algo.replay.learning is 2", "farthest"]),
        ({"steps": 0}, ["steps is 0", "at least one"]),
    ],
)
def test_stored_configs_that_cannot_be_used(changes, words):
    with pytest.raises(ConfigError) as caught:
        from_json(stored(**changes))
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("make", "what", "seen", "fix"),
    [
        (lambda: MajepaConfig(local=LocalConfig(width=500)), "algo.local width", "500", "8 heads"),
        (lambda: MajepaConfig(joint=JointConfig(heads=0)), "algo.joint.heads", "0", "one or more"),
        (lambda: MajepaConfig(local=LocalConfig(layers=0)), "algo.local.layers", "0", "one or"),
        (lambda: MajepaConfig(joint=JointConfig(horizons=())), "algo.joint.horizons", "()", "one"),
        (
            lambda: MajepaConfig(loss=LossConfig(self_fed_horizons=(2, 0))),
            "algo.loss.self_fed_horizons", "(2, 0)", "above zero",
        ),
        (
            lambda: MajepaConfig(joint=JointConfig(dropout=1.0)),
            "algo.joint.dropout", "1.0", "below 1",
        ),
        (
            lambda: MajepaConfig(policy=PolicyConfig(discount=1.5)),
            "algo.policy.discount", "1.5", "between 0 and 1",
        ),
        (
            lambda: MajepaConfig(collect=CollectConfig(train_ratio=-1.0)),
            "algo.collect.train_ratio", "-1.0", "zero or more",
        ),
        (
            lambda: MajepaConfig(optimizer=OptimizerConfig(model_rate=float("nan"))),
            "algo.optimizer.model_rate", "nan", "finite",
        ),
        (lambda: MappoConfig(chunk=0), "algo.chunk", "0", "one or more"),
        (lambda: MappoConfig(epochs=0), "algo.epochs", "0", "one or more"),
        (lambda: MatConfig(heads=0), "algo.heads", "0", "one or more"),
        (lambda: MatConfig(heads=3), "algo.heads", "3", "a divisor of the width, 64"),
        (lambda: MatConfig(minibatches=3201), "algo.minibatches", "3201", "from 1 to 3200"),
        (
            lambda: MajepaConfig(policy=PolicyConfig(critic_width=100)),
            "algo.policy.critic width", "100", "4 heads",
        ),
        (
            lambda: MajepaConfig(replay=ReplayConfig(learning=8)),
            "algo.replay.learning", "8", "more than the farthest prediction horizon, 8",
        ),
        (
            lambda: MajepaConfig(
                joint=JointConfig(horizons=(1,)), replay=ReplayConfig(learning=5)
            ),
            "algo.replay.learning", "5", "more than the farthest prediction horizon, 5",
        ),
        (
            lambda: MajepaConfig(replay=ReplayConfig(batch=0)),
            "algo.replay.batch", "0", "one or more",
        ),
        (
            lambda: MajepaConfig(imagination=ImaginationConfig(horizon=0)),
            "algo.imagination.horizon", "0", "one or more",
        ),
        (
            lambda: MajepaConfig(policy=PolicyConfig(epochs=0)),
            "algo.policy.epochs", "0", "one or more",
        ),
        (
            lambda: MajepaConfig(collect=CollectConfig(num_envs=0)),
            "algo.collect.num_envs", "0", "one or more",
        ),
        (
            lambda: MajepaConfig(loss=LossConfig(self_fed_chunk=0)),
            "algo.loss.self_fed_chunk", "0", "one or more",
        ),
        (lambda: MajepaConfig(bins=BinsConfig(count=254)), "algo.bins.count", "254", "odd"),
        (
            lambda: MajepaConfig(replay=ReplayConfig(capacity=4_000)),
            "algo.replay.capacity", "4000", "at least 4112 rows",
        ),
        (
            lambda: MajepaConfig(optimizer=OptimizerConfig(clip_floor=0.0)),
            "algo.optimizer.clip_floor", "0.0", "above zero",
        ),
        (lambda: MappoConfig(adam_eps=0.0), "algo.adam_eps", "0.0", "above zero"),
        (lambda: QmixConfig(max_gradient=0.0), "algo.max_gradient", "0.0", "above zero"),
        (lambda: TrainConfig(MappoConfig(), steps=0), "steps", "0", "at least one"),
        (lambda: TrainConfig(MappoConfig(), seed=-1), "seed", "-1", "from 0 to 4294967295"),
        (
            lambda: TrainConfig(MappoConfig(), seed=2**32),
            "seed", "4294967296", "from 0 to 4294967295",
        ),
        (lambda: TrainConfig(MappoConfig(), save_every=0), "save_every", "0", "one or more"),
        (
            lambda: TrainConfig(MappoConfig(), evaluation=EvaluationConfig(episodes=0)),
            "evaluation.episodes", "0", "one or more",
        ),
    ],
)  # fmt: skip
def test_bad_values_are_refused_with_what_was_seen_and_what_would_do(make, what, seen, fix):
    with pytest.raises(ConfigError) as caught:
        make()
    message = str(caught.value)
    assert message.startswith(f"{what} is {seen}; it must be ")
    assert fix in message


def test_configs_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PAPER.local.width = 3
