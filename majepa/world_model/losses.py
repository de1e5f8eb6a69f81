"""The objective of the world model: one function for each group of equations.

Every term is a mean over its own valid entries, zero where there are none. Terms meet their
coefficients by name. The joint model learns from stopped features; two routes, outcome and JEPA,
add a gradient to the features alone, which moves no joint parameter and no logged value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from ..config import JointWeights, LocalWeights, MajepaConfig
from ..nn.dists import balanced_cross_entropy, kl
from ..nn.layers import as_rows, cast
from ..nn.means import masked_mean
from ..nn.transformer import apart
from ..replay import Record, Sequence
from . import masks
from .condense import Basis, condense_joint, condense_local, pays
from .discrimination import Asked, discriminate
from .joint import JointModel
from .local import Encoder, LocalModel
from .self_fed import SelfFed, self_fed
from .sigreg import sigreg
from .targets import Target, arrivals, cosine, outcome_losses, outcome_masks, sg
from .tokens import tokens_of
from .unroll import Past, States, infer, rebuild_context, run_joint

Terms = Mapping[str, Float[Array, ""]]
Given = TypeVar("Given")


class ModelLoss(NamedTuple):
    """What one evaluation of the objective leaves behind."""

    terms: Terms
    """Every term before weighting."""
    latent: Int[Array, "B L N S"]
    """Fresh latents of the learning records."""
    e: Float[Array, "B L N E"]
    gaussian: Bool[Array, "B L N"]
    """Embeddings that SIGReg looks at."""
    kl: Float[Array, ""]
    """Between posterior and prior, before any threshold."""
    entries: Mapping[str, Float[Array, ""]]
    """Share of entries each mask keeps."""
    self_fed: SelfFed


def model_loss(
    groups: tuple[LocalModel, JointModel],
    target_encoder: Encoder,
    sequence: Sequence,
    config: MajepaConfig,
    key: Key[Array, ""],
    past: Past | None = None,
) -> tuple[Float[Array, ""], ModelLoss]:
    """L_WM = L_local + L_joint + 2 L_MS + 0.1 L_AD + L_SF, with both routes.

    `past`: what `rebuild_context` makes of these very parameters, if it is there already.
    """
    dtype = jnp.dtype(config.precision)
    local, joint = apart(cast(groups, dtype))
    key_infer, key_sigreg, key_dropout, key_self_fed = jax.random.split(key, 4)
    context = config.context
    tokens = tokens_of(sequence, sequence.record.latent)
    record: Record = jax.tree.map(lambda leaf: leaf[:, context:], sequence.record)
    alive_before = sequence.record.alive[:, context - 1]

    if past is None:
        past = rebuild_context(local, joint, sequence, tokens, context)
    suffix = tokens.between(context, None)
    basis = Basis(local.dynamics) if pays(local.dynamics) else None
    local = condense_local(local, basis)
    states = infer(local, record, suffix, past, key_infer)
    e_bar = sg(cast(target_encoder, dtype)(record.observation))

    local_terms, sigreg_valid = local_losses(
        local, states, e_bar, record, alive_before, config, key_sigreg
    )
    joint_terms, routed = joint_losses(
        local, joint, basis, states, e_bar, record, suffix.episode, past, config, key_dropout
    )
    # No gradient enters the states of rollouts, nor what makes them.
    reader = condense_joint(joint, sg(basis))
    fed = self_fed(local, reader, states, e_bar, record, suffix, past, config, key_self_fed)
    joint_terms = {**joint_terms, "self_fed": fed.loss}
    farthest = max(config.joint.horizons)
    total = weigh(local_terms, config.loss.local) + weigh(joint_terms, config.loss.joint)
    entries = {
        "present": jnp.mean(record.present, dtype=jnp.float32),
        "sigreg": jnp.mean(sigreg_valid, dtype=jnp.float32),
        "source": jnp.mean(masks.sources(record), dtype=jnp.float32),
        "team": jnp.mean(masks.team(record), dtype=jnp.float32),
        "ahead": jnp.mean(masks.ahead(record, farthest, farthest), dtype=jnp.float32),
        "self_fed": fed.valid_roots,
    }
    divergence = masked_mean(sg(kl(states.q, local.prior(states.h))), record.present)
    loss = ModelLoss(
        terms={**local_terms, **joint_terms},
        latent=states.latent,
        e=states.e,
        gaussian=sigreg_valid,
        kl=divergence,
        entries=entries,
        self_fed=fed,
    )
    return total + (routed - sg(routed)), loss


@jax.named_scope("local_losses")
def local_losses(
    local: LocalModel,
    states: States,
    e_bar: Float[Array, "B T N E"],
    record: Record,
    alive_before: Bool[Array, "B N"],
    config: MajepaConfig,
    key: Key[Array, ""],
) -> tuple[Terms, Bool[Array, "B T N"]]:
    """Eq. local-full-objective, before weighting, and the entries of SIGReg."""
    loss, valid, s = config.loss, record.present, states.s
    q, p = states.q, local.prior(states.h)
    gaussian = masks.sigreg_entries(record, alive_before, loss.sigreg_mask)
    samples = record.reward.size if loss.sigreg_samples is None else loss.sigreg_samples
    statistic = sigreg(
        states.e,
        gaussian,
        key,
        projections=loss.sigreg_projections,
        points=loss.sigreg_points,
        limit=loss.sigreg_limit,
    )
    terms = {
        "post": masked_mean(1 - cosine(local.predict_post(s), e_bar), valid),
        "dyn": masked_mean(1 - cosine(local.predict_dyn(states.h), e_bar), valid),
        "sigreg": statistic * (samples / record.reward.size),
        "legal": masked_mean(balanced_cross_entropy(local.legal(s), record.legal), valid),
        "dyn_reg": masked_mean(jnp.maximum(loss.free_nats, kl(sg(q), p)), valid),
        "rep_reg": masked_mean(jnp.maximum(loss.free_nats, kl(q, sg(p))), valid),
    }
    return terms, gaussian


@jax.named_scope("joint_losses")
def joint_losses(
    local: LocalModel,
    joint: JointModel,
    basis: Basis | None,
    states: States,
    e_bar: Float[Array, "B T N E"],
    record: Record,
    episode: Int[Array, "B T"],
    past: Past,
    config: MajepaConfig,
    key: Key[Array, ""],
) -> tuple[Terms, Float[Array, ""]]:
    """Eq. joint-full-objective and the direct auxiliaries, before weighting; and the routes.

    `basis`: that of condensed states; what it is made of belongs to the states, not to what reads
    them.
    """
    target = arrivals(states, e_bar, record)
    valid = outcome_masks(record)
    posterior, h = sg(local.posterior), sg(states.h[:, 1:])

    def predict(joint: JointModel, given: tuple[Array, Basis | None]) -> Array:
        s, basis = given
        return run_joint(condense_joint(joint, basis), s, record, episode, past.joint, key=key)[0]

    u, u_routed = part_gradients(predict)(joint, (states.s, basis))
    outcome = joint.read(u[:, :-1])
    terms = reduce(outcome_losses(outcome, target, config), valid)
    align = kl(sg(states.q[:, 1:]), posterior(h, outcome.e_hat))
    multi_step, discrimination = ahead_losses(joint, u, e_bar, record, config)
    terms |= {
        "align": masked_mean(align, valid["emb"]),
        "multi_step": multi_step,
        "discrimination": discrimination,
    }
    return terms, _routes(sg(joint), u_routed[:, :-1], target, valid, config)


@jax.named_scope("ahead_losses")
def ahead_losses(
    joint: JointModel,
    u: Float[Array, "B T N U"],
    e_bar: Float[Array, "B T N E"],
    record: Record,
    config: MajepaConfig,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """L_MS (Eq. direct-multistep) and L_AD (Eq. all-legal-margin)."""
    horizons = config.joint.horizons
    farthest = max(horizons)
    roots = u.shape[1] - farthest
    share = horizon_weights(len(horizons), config.loss.horizon_decay)
    later = [rank for rank, horizon in enumerate(horizons) if horizon > 1]
    multi_step, asked, weights = jnp.zeros(()), [], []
    for rank, (horizon, head) in enumerate(zip(horizons, joint.ahead, strict=True)):
        e_future = e_bar[:, horizon : horizon + roots]
        valid = masks.ahead(record, horizon, farthest)
        tail = [record.action[:, k : k + roots] for k in range(1, horizon)]
        tail = jnp.stack(tail, axis=-1) if tail else jnp.zeros((*valid.shape, 0), jnp.int32)
        similar = cosine(head(u[:, :roots], tail), e_future)
        multi_step += share[rank] * masked_mean(1 - similar, valid)
        if horizon > 1:
            legal = record.legal[:, horizon - 1 : horizon - 1 + roots]
            others = masks.alternatives(legal, tail[..., -1]) & valid[..., None]
            # Matrices, lest XLA lays out more axes as no product wants them.
            matrices = Asked(
                head, as_rows(u[:, :roots]), as_rows(tail), as_rows(e_future),
                similar.reshape(-1), as_rows(others),
            )  # fmt: skip
            asked.append(matrices)
            weights.append(share[rank] / sum(share[other] for other in later))
    hinges = discriminate(asked, jnp.asarray(config.loss.margin)) if asked else []
    terms = (weight * hinge for weight, hinge in zip(weights, hinges, strict=True))
    return multi_step, sum(terms, jnp.zeros(()))


def horizon_weights(count: int, decay: float) -> list[float]:
    """α: geometric, summing to one."""
    raw = [decay**rank for rank in range(count)]
    return [weight / sum(raw) for weight in raw]


def weigh(terms: Terms, weights: LocalWeights | JointWeights) -> Float[Array, ""]:
    """The weighted sum; terms and weights must have the same names."""
    coefficients = dataclasses.asdict(weights)
    assert terms.keys() == coefficients.keys(), terms.keys() ^ coefficients.keys()
    return sum((coefficients[name] * term for name, term in terms.items()), jnp.zeros(()))


def reduce(
    losses: Mapping[str, Float[Array, "*b N"]], valid: Mapping[str, Bool[Array, "*b N"]]
) -> dict[str, Float[Array, ""]]:
    return {name: masked_mean(loss, valid[name]) for name, loss in losses.items()}


def part_gradients(
    predict: Callable[[JointModel, Given], Array],
) -> Callable[[JointModel, Given], tuple[Array, Array]]:
    """One forward pass, two equal results: gradients of the first reach the model alone, those of
    the second the given states alone."""

    @jax.custom_vjp
    def parted(joint: JointModel, given: Given) -> tuple[Array, Array]:
        u = predict(joint, given)
        return u, u

    def forward(joint: JointModel, given: Given) -> tuple[tuple[Array, Array], Callable]:
        u, pull_back = jax.vjp(predict, joint, given)
        return (u, u), pull_back

    def backward(pull_back: Callable, cotangents: tuple[Array, Array]) -> tuple:
        to_model, to_states = cotangents
        return pull_back(to_model)[0], pull_back(to_states)[1]

    parted.defvjp(forward, backward)
    return parted


def _routes(
    frozen: JointModel,
    u: Float[Array, "B M N U"],
    target: Target,
    valid: Mapping[str, Bool[Array, "*b N"]],
    config: MajepaConfig,
) -> Float[Array, ""]:
    """What factual outcomes and embeddings send into the local states, through frozen heads."""
    routes, weights = config.routes, config.loss.joint
    terms = reduce(outcome_losses(frozen.read(u), target, config), valid)
    outcome = sum(getattr(weights, name) * terms[name] for name in ("reward", "cont", "alive"))
    return routes.outcome * outcome + routes.jepa * weights.emb * terms["emb"]
