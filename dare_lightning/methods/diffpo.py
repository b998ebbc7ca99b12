"""DiFFPO (experimental): two states stand for a whole trace, and a weight makes up for the difference."""

from __future__ import annotations

import logging
import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from dare_lightning.diffusion.losses import clipped_policy_loss, kl_estimate
from dare_lightning.diffusion.rows import Rows
from dare_lightning.diffusion.shares import StepAggregation
from dare_lightning.diffusion.trajectory import dense_steps, draw_steps, states_from_steps
from dare_lightning.methods.base import LossOutput
from dare_lightning.methods.committed import CommittedTokenMethod, token_advantage, written_steps
from dare_lightning.methods.defined import Undefined
from dare_lightning.replay.batch import SequenceBatch

log = logging.getLogger(__name__)


class DiFFPO(CommittedTokenMethod):
    """Score what the steps up to a random one wrote from the prompt alone, and the rest from the state after that step.

    Experimental: written from a description of the method, without the authors' code, and never compared with it.

    Args:
        weight_cap: C, bound of the weight min(C, p_rollout / p_old) by which each token counts: the probability at
            which the rollout wrote it, over what these two states make of it under the same policy.
        advantage, aggregation: as d1 has them, which the paper generalises.
        committed: as in `CommittedTokenMethod`.

    Raises:
        ValueError: a setting is out of range, or the policy is a block-diffusion one.

    Source: arXiv:2510.02212, the training of the policy; its sampler is not trained here.
    """

    needs: ClassVar[tuple[str, ...]] = ("commit_steps", "log_probs")
    undefined: ClassVar[tuple[Undefined, ...]] = (
        Undefined(
            "block",
            "it scores the tokens of early steps from the prompt alone, and {family} reads a block only after finished"
            " ones; use method=tracerl or dipo",
        ),
    )

    def __init__(
        self,
        *args: Any,
        weight_cap: float = 2.0,
        advantage: str = "no_std",
        aggregation: StepAggregation = "token_mean",
        **committed: Any,
    ) -> None:
        super().__init__(*args, advantage=advantage, aggregation=aggregation, **committed)
        if not 0 < weight_cap < math.inf:
            raise ValueError(f"method.weight_cap={weight_cap} must be a finite number above 0")
        self.weight_cap = weight_cap

    def setup(self, stage: str) -> None:
        """Say that this is experimental."""
        super().setup(stage)
        if stage == "fit":
            log.warning("DiFFPO is experimental: no code of its authors was there to compare with")

    def steps(self, batch: SequenceBatch) -> Tensor:
        """0 for what the steps up to the drawn one wrote, 1 for the rest: int64 [B, L], -1 where no step wrote."""
        written = dense_steps(written_steps(batch))
        drawn = draw_steps(written, self.counted(batch), batch.noise_seed, (batch.iteration,), most=1)
        return torch.where(written >= 0, (written > drawn.at).long(), -1)

    def corrupt(self, batch: SequenceBatch) -> Rows:
        """Two rows, also where the drawn step was the last, so that all inner epochs have as many."""
        at = torch.arange(2, device=batch.ids.device).expand(len(batch), -1)
        mask_id = self.policy.mask_token_id
        return states_from_steps(batch.ids, batch.response_mask, self.steps(batch), self.counted(batch), mask_id, at)

    def policy_loss(
        self, log_likelihood: Tensor, old: Tensor, ref: Tensor | None, rows: Rows, batch: SequenceBatch
    ) -> LossOutput:
        """Token-level clipped surrogate, weighted; plus kl_coef times k3."""
        assert batch.commit_log_probs is not None  # the rollout fills it
        assert batch.denominator is not None  # the loader does
        scored = rows.score_mask.any(1) & self.learned(batch)
        loss, metrics = clipped_policy_loss(log_likelihood, old, None, token_advantage(batch), scored, self.clip)
        apart = torch.where(scored, batch.commit_log_probs.to(old) - old.detach(), 0.0)
        weight, count = apart.clamp(max=math.log(self.weight_cap)).exp(), scored.sum().to(loss)
        loss = loss * weight
        metrics["off_policy_weight"] = (torch.where(scored, weight, 0.0).sum(), count)
        metrics["off_policy_capped_fraction"] = ((apart > math.log(self.weight_cap)).sum().to(loss), count)
        if ref is not None:
            divergence = torch.where(scored, kl_estimate("k3", log_likelihood, ref.detach()), 0.0)
            loss = loss + self.kl_coef * divergence
            metrics["kl"] = (divergence.detach().sum(), count)
        return LossOutput(self.shares(batch).total(loss, batch.denominator), metrics)
