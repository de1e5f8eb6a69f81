"""The chapters of the algorithms that this package has, metric by metric.

docs/training.md says more about every metric, and what to look for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .catalogue import Chapter, Panel
from .numbers import Unit

HORIZONS = range(1, 6)
GROUPS = ("local", "joint", "actor", "critic")


def _one(title: str, name: str, meaning: str, unit: Unit = "number") -> Panel:
    return Panel(title, {name: title}, meaning, unit)


def _by_horizon(title: str, what: str, meaning: str, unit: Unit = "number") -> Panel:
    metrics = {f"rollout/{what}_{k}": f"k = {k}" for k in HORIZONS}
    return Panel(title, metrics, meaning, unit, is_ordered=True, name=f"rollout/{what}_k")


def _by_group(title: str, what: str, meaning: str, **options: bool) -> Panel:
    metrics = {f"{what}/{group}": group for group in GROUPS}
    unit: Unit = "percent" if options.get("is_share") else "number"
    return Panel(title, metrics, meaning, unit, name=f"{what}/*", **options)


STEP_REFUSALS = _one(
    "Refused updates in a row",
    "nonfinite_in_a_row",
    "Updates left out because something was not finite. Should be 0; too many end the run.",
)
SPEEDS = (
    _one("Collecting", "speed/collecting", "Transitions per second of collecting."),
    _one("Learning", "speed/learning", "Updates per second of learning."),
    _one("Evaluating", "speed/evaluating", "Episodes per second of evaluating."),
)
TRAINING_EPISODES = _one(
    "Episodes while collecting",
    "training/episodes",
    "How many ended since the line before.",
)

IMAGINED = Chapter(
    "Imagined against real",
    "From a recorded state the world model runs on its own predictions for k = 1 … 5 "
    "transitions and is compared with what happened. Errors should be small and grow gently "
    "with k.",
    (
        _by_horizon(
            "Reward error",
            "reward_error",
            "Mean absolute error of the team reward; judge it against the map's rewards.",
        ),
        _by_horizon(
            "Continuation error",
            "cont_error",
            "Mean absolute error of whether the episode goes on; peaks are missed ends.",
        ),
        _by_horizon(
            "Survival error",
            "alive_error",
            "Share of agents whose being able to act was foretold wrongly.",
            "percent",
        ),
        _by_horizon(
            "Illegal share",
            "illegal",
            "Probability put on actions that were illegal; high means imagined agents do "
            "what real ones cannot.",
            "percent",
        ),
        _by_horizon(
            "Embedding similarity",
            "similarity",
            "Cosine of predicted and target embedding; a steep fall with k means "
            "imagination cannot be trusted.",
        ),
        Panel(
            "Returns, imagined and real",
            {"imagined/return": "imagined", "value/replayed_return": "replayed"},
            "From the middle of episodes, discounted. Imagined returns that climb alone are "
            "believed by the model only.",
        ),
    ),
)
EMBEDDINGS = Chapter(
    "Embeddings and latents",
    "A joint-embedding model can collapse, that is, embed everything alike. These would show it.",
    (
        _one(
            "Effective rank",
            "embedding/rank",
            "Directions the embeddings use, between 1 and their size. Should be far above 1.",
        ),
        _one(
            "Spread",
            "embedding/spread",
            "Root mean square deviation of a coordinate. Near 1 is healthy, towards 0 is collapse.",
        ),
        _one(
            "KL of posterior and prior",
            "kl",
            "In nats, before the free-nats floor: what an observation adds to the forecast.",
        ),
    ),
)
LOSSES = Chapter(
    "World-model losses",
    "Before their coefficients, each a mean over the entries it applies to; the first is their "
    "weighted sum.",
    (
        _one("World model", "loss/model", "The whole objective. Falls fast, then slowly."),
        _one(
            "Posterior embedding",
            "loss/post",
            "Cosine distance from the state to its target embedding: 1 unrelated, 0 equal.",
        ),
        _one(
            "Prior embedding",
            "loss/dyn",
            "The same before the observation is seen; stays above the posterior's.",
        ),
        _one(
            "SIGReg",
            "loss/sigreg",
            "Distance of the embeddings from a standard Gaussian; about 1 for independent samples.",
        ),
        _one(
            "Local availability",
            "loss/legal",
            "Legal actions from the local state; about 0.7 is guessing.",
        ),
        _one(
            "KL, dynamics side",
            "loss/dyn_reg",
            "KL with the free-nats floor. Exactly 1 means below the floor everywhere.",
        ),
        _one(
            "KL, representation side",
            "loss/rep_reg",
            "The same number; its gradient goes the other way.",
        ),
        _one(
            "Joint embedding",
            "loss/emb",
            "Cosine distance of the next embedding the joint model predicts.",
        ),
        _one(
            "Interface",
            "loss/interface",
            "Smooth L1 to the online embedding; always predicting the mean gives about 0.43.",
        ),
        _one(
            "Posterior alignment",
            "loss/align",
            "KL of posteriors from real and predicted embeddings. High: imagined states differ.",
        ),
        _one("Reward", "loss/reward", "Cross entropy over the bins; starts at ln(bins)."),
        _one(
            "Continuation",
            "loss/cont",
            "Cross entropy of the discounted continuation; cannot go below 0.02.",
        ),
        _one(
            "Survival",
            "loss/alive",
            "Cross entropy of staying able to act; deaths that nobody can foresee remain.",
        ),
        _one(
            "Joint availability",
            "loss/joint_legal",
            "Legal actions after the transition; about 0.7 is guessing.",
        ),
        _one(
            "Several steps ahead",
            "loss/multi_step",
            "Cosine distances 1, 2, 4 and 8 steps ahead, weighted.",
        ),
        _one(
            "Action discrimination",
            "loss/discrimination",
            "By how much the margin between taken and other actions is missed; 0.1 is all of it.",
        ),
        _one(
            "Self-fed",
            "loss/self_fed",
            "Weighted losses after 2, 4 and 5 self-fed steps. Falls with the one-step losses.",
        ),
        Panel(
            "Self-fed, by part",
            {
                "self_fed/reward": "reward",
                "self_fed/cont": "continuation",
                "self_fed/alive": "alive",
                "self_fed/emb": "embedding",
                "self_fed/interface": "interface",
                "self_fed/joint_legal": "legal",
                "self_fed/trajectory": "trajectory",
            },
            "The same before its coefficients; trajectory is the KL of real and self-fed latents.",
            is_log=True,
            name="self_fed/*",
        ),
    ),
)
BEHAVIOUR = Chapter(
    "Behaviour",
    "Actor and critic, trained on imagined steps. Means are weighted by how probable it is that "
    "an imagined world goes on that far.",
    (
        _one(
            "Policy entropy",
            "policy/entropy",
            "In nats, over legal actions. Falls as agents decide; near 0 early means stuck.",
        ),
        _one(
            "Clipped decisions",
            "policy/clipped",
            "Outside the clipping range in the last epoch. A few per cent is normal.",
            "percent",
        ),
        _one(
            "Policy divergence",
            "policy/divergence",
            "KL of old and new policy in the last epoch. Small, below about 0.02.",
        ),
        Panel(
            "Value error",
            {"value/imagined_error": "imagined", "value/replayed_error": "replayed"},
            "Mean absolute difference of critic and return. Returns grow while agents learn, "
            "and errors with them.",
        ),
        Panel(
            "Values",
            {"value/imagined": "imagined", "value/replayed": "replayed"},
            "What the target critic expects on imagined and recorded states.",
        ),
        Panel(
            "Critic losses",
            {"loss/critic_imagined": "imagined", "loss/critic_replayed": "replayed"},
            "Cross entropy over the bins, first epoch; a rest remains because returns vary.",
        ),
        _one(
            "Actor loss",
            "loss/actor",
            "Of the first epoch, where only the entropy bonus is left in it.",
        ),
        _one("Imagined reward", "imagined/reward", "Mean over imagined steps."),
        _one("Imagined continuation", "imagined/cont", "Mean over imagined steps."),
        _one(
            "Imagined survival",
            "imagined/alive",
            "Slots able to act after an imagined step; stuck at 100 % means deaths are missed.",
            "percent",
        ),
        _one(
            "Imagined legal actions",
            "imagined/legal_actions",
            "Of a decision. Falling to 1: imagined agents can do nothing.",
        ),
    ),
)
STEPS = Chapter(
    "Steps of the optimizer",
    "For each group of parameters.",
    (
        _by_group(
            "Gradient norm",
            "gradient",
            "Before clipping. Steady within an order of magnitude.",
            is_log=True,
        ),
        _by_group(
            "Update ratio",
            "update_ratio",
            "Norm of the step over that of the parameters. A jump means trouble.",
            is_log=True,
        ),
        _by_group(
            "Finite steps",
            "finite",
            "Share of steps that were finite and taken. Should be 100 %.",
            is_share=True,
        ),
        STEP_REFUSALS,
    ),
)
VALID = Chapter(
    "Valid entries",
    "Which share of the entries each kind of loss could use.",
    (
        Panel(
            "World model",
            {
                "valid/present": "present",
                "valid/team": "team",
                "valid/sigreg": "sigreg",
                "valid/source": "source",
            },
            "Slots that are there, team losses, SIGReg, agent losses. Fall with deaths and starts.",
            "percent",
            is_share=True,
            name="valid/*",
        ),
        Panel(
            "Far predictions",
            {"valid/ahead": "ahead"},
            "Roots that the farthest direct prediction can be compared at.",
            "percent",
            is_share=True,
        ),
        Panel(
            "Self-fed roots",
            {"valid/self_fed": "self-fed"},
            "Drawn roots with enough steps after them. At 0 the errors above mean nothing.",
            "percent",
            is_share=True,
        ),
        Panel(
            "Decisions",
            {"valid/decisions": "decisions"},
            "Imagined slots and steps that are decisions. Falls with deaths and imagined ends.",
            "percent",
            is_share=True,
        ),
    ),
)
BOOKKEEPING = Chapter(
    "Bookkeeping",
    "Counters of the learner and of the episodes it collects.",
    (
        _one("Learner calls", "learner/calls", "So far."),
        _one("Replay rows", "learner/replay_rows", "Held for each environment."),
        TRAINING_EPISODES,
        *SPEEDS,
    ),
)
MAJEPA = (IMAGINED, EMBEDDINGS, LOSSES, BEHAVIOUR, STEPS, VALID, BOOKKEEPING)

POLICY = Chapter(
    "Policy",
    "Means over the living agents and over the epochs of an update.",
    (
        _one("Entropy", "actor/entropy", "In nats. Falls as agents decide."),
        _one(
            "Clipped decisions",
            "actor/clipped",
            "Outside the clipping range. A few per cent is normal.",
            "percent",
        ),
        _one("Policy divergence", "actor/kl", "KL of old and new policy. Small."),
        _one("Actor loss", "loss/actor", "Clipped objective with the entropy bonus."),
    ),
)
CRITIC = Chapter(
    "Critic",
    "The centralised value function.",
    (
        _one(
            "Explained variance",
            "critic/explained_variance",
            "1 is a perfect critic, 0 one that knows the mean alone.",
        ),
        _one(
            "Critic loss", "loss/critic", "Clipped Huber loss, in units of the return's statistics."
        ),
    ),
)
ROLLOUTS = Chapter(
    "Steps and rollouts",
    "What the optimizer met, and the experience it learned from.",
    (
        Panel(
            "Gradient norm",
            {
                "actor/gradient_norm": "actor",
                "critic/gradient_norm": "critic",
                "network/gradient_norm": "network",
            },
            "Before clipping. Steady within an order of magnitude.",
            is_log=True,
        ),
        _one("Reward", "rollout/reward", "Mean of a transition of the rollout."),
        Panel(
            "Decisions",
            {"rollout/valid": "decisions"},
            "Share of the rollout's slots that are decisions; falls with deaths.",
            "percent",
            is_share=True,
        ),
        STEP_REFUSALS,
        TRAINING_EPISODES,
        *SPEEDS,
    ),
)
ON_POLICY = (POLICY, CRITIC, ROLLOUTS)

VALUES = Chapter(
    "Values of the team",
    "Means over the transitions of a batch of episodes from the replay.",
    (
        _one("Loss", "loss/critic", "Half the squared distance of values to returns."),
        Panel(
            "Values and returns",
            {"critic/value": "values", "critic/target": "returns"},
            "They rise together; values far above the return of an episode are made up.",
        ),
        _one("Error", "critic/error", "Mean distance of values to returns."),
    ),
)
EPISODES = Chapter(
    "Steps and episodes",
    "What the optimizer met, and the experience it learned from.",
    (
        Panel(
            "Gradient norm",
            {"critic/gradient_norm": "agent and mixer"},
            "Before clipping. Steady within an order of magnitude.",
            is_log=True,
        ),
        _one(
            "Random actions", "rollout/epsilon", "Share of them in training; falls to its floor.",
            "percent",
        ),
        _one("Length", "rollout/length", "Mean of the latest episodes, in transitions."),
        STEP_REFUSALS,
        TRAINING_EPISODES,
        *SPEEDS,
    ),
)  # fmt: skip
CHAPTERS: Mapping[str, Sequence[Chapter]] = {
    "majepa": MAJEPA,
    "mappo": ON_POLICY,
    "mat": ON_POLICY,
    "qmix": (VALUES, EPISODES),
}
