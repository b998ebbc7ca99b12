"""SPG: raise a lower bound of what was good, push down an upper bound of what was bad."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from dare_lightning.diffusion.blocks import draw_random_block, hide_context
from dare_lightning.diffusion.bounds import SANDWICHES, Sandwich, SandwichBounds, sandwich_bounds, sandwiched
from dare_lightning.diffusion.corruption import Masks, draw_counts, noisy_rows
from dare_lightning.diffusion.likelihood import row_sums
from dare_lightning.diffusion.losses import Aggregation
from dare_lightning.diffusion.rows import Rows
from dare_lightning.methods.base import LossOutput
from dare_lightning.methods.defined import Undefined
from dare_lightning.methods.sequence import SequenceMethod
from dare_lightning.replay.batch import SequenceBatch


class SPG(SequenceMethod):
    """A policy gradient without ratio, clip, old policy or reference.

    Args:
        samples: noisy rows a completion; with 1 the two bounds have the same gradient.
        upper: what completions without positive advantage are judged by: the upper bound "eubo", the lower "elbo", or
            "mix".
        mix: share of the upper bound under "mix".
        eubo_beta: exponent of the upper bound.
        forward_type: "block_random" works on one block of the response a row, what follows being hidden; "random"
            hides a random number of tokens of the whole completion.
        block_length: tokens a block under "block_random"; that of the rollout.
        min_t, max_t: range of the share of a block that is hidden.
        prompt_mask_probability: prompt tokens, and tokens of blocks already done, are hidden with this probability.
        advantage: reward minus the group's mean.
        aggregation: completions weigh by their length.
        sequence: as in `SequenceMethod`.

    Raises:
        ValueError: a setting is out of range, or the rows mean nothing to the policy.

    Source: Wang et al. 2025, arXiv:2510.09541.
    """

    uses_old_policy: ClassVar[bool] = False
    undefined: ClassVar[tuple[Undefined, ...]] = (
        Undefined(
            "block",
            "it hides what follows the block at work, and {family} never reads that",
            setting="forward_type",
            value="block_random",
            instead="random",
        ),
    )

    def __init__(
        self,
        *args: Any,
        samples: int = 2,
        upper: Sandwich = "mix",
        mix: float = 0.5,
        eubo_beta: float = 1.5,
        forward_type: Literal["block_random", "random"] = "block_random",
        block_length: int = 32,
        min_t: float = 0.0,
        max_t: float = 1.0,
        prompt_mask_probability: float = 0.15,
        advantage: str = "no_std",
        aggregation: Aggregation = "token_mean",
        **sequence: Any,
    ) -> None:
        super().__init__(*args, advantage=advantage, aggregation=aggregation, **sequence)
        self.samples = samples
        self.upper: Sandwich = upper
        self.mix, self.eubo_beta = mix, eubo_beta
        self.forward_type = forward_type
        self.block_length = block_length
        self.min_t, self.max_t = min_t, max_t
        self.prompt_mask_probability = prompt_mask_probability
        self._check_settings()

    def _check_settings(self) -> None:
        if self.kl_coef > 0:
            raise ValueError(f"method.kl_coef={self.kl_coef}: SPG has no reference to stay close to; leave it at 0")
        if self.samples < 1 or self.block_length < 1:
            raise ValueError(f"method.samples={self.samples} and method.block_length={self.block_length} start at 1")
        if self.upper not in SANDWICHES:
            raise ValueError(f"method.upper={self.upper!r}; choose one of {', '.join(SANDWICHES)}")
        if not 0 <= self.mix <= 1 or self.eubo_beta <= 0:
            raise ValueError(f"method.mix={self.mix} must be in [0, 1] and method.eubo_beta={self.eubo_beta} above 0")
        if not 0 <= self.min_t <= self.max_t <= 1:
            raise ValueError(f"method.min_t={self.min_t} and method.max_t={self.max_t} are not ordered inside [0, 1]")
        if not 0 <= self.prompt_mask_probability <= 1:
            raise ValueError(f"method.prompt_mask_probability={self.prompt_mask_probability} is outside [0, 1]")
        if self.forward_type not in ("block_random", "random"):
            raise ValueError(f"method.forward_type={self.forward_type!r}; use block_random or random")
        self.check_defined({"forward_type": self.forward_type})

    def corrupt(self, batch: SequenceBatch) -> Rows:
        """`samples` rows; what follows the first end token is hidden in all of them."""
        salt, counted = (batch.iteration,), self.counted(batch)
        if self.forward_type == "block_random":
            masks = draw_random_block(
                batch.response_mask,
                counted,
                batch.prompt_mask,
                batch.noise_seed,
                salt,
                rows=self.samples,
                block_length=self.block_length,
                low=self.min_t,
                high=self.max_t,
                context_probability=self.prompt_mask_probability,
            )
            return self.rows(masks, batch)
        drawn = draw_counts(counted, batch.noise_seed, salt, rows=self.samples, low=self.min_t, high=self.max_t)
        after = batch.response_mask & ~counted
        probability = self.prompt_mask_probability
        return self.rows(hide_context(drawn, after, batch.prompt_mask, batch.noise_seed, salt, probability), batch)

    def rows(self, masks: Masks, batch: SequenceBatch) -> Rows:
        """The rows of these masks; scored are the hidden tokens that count."""
        scored = masks.mask & self.counted(batch)[:, None]
        return noisy_rows(batch.ids, masks, self.policy.mask_token_id, masks.level.new_ones(()), scored)

    def log_likelihood(self, row_log_probs: Tensor, rows: Rows, batch: SequenceBatch) -> Tensor:
        """Log-prob of each hidden token of each row, float [B, N, L]; the bounds need them one by one."""
        return row_log_probs

    def draws(self, row_log_probs: Tensor, rows: Rows, batch: SequenceBatch) -> Tensor:
        """The mean log-prob of each row's hidden tokens, times the completion's tokens: float [B, n]."""
        means = row_sums(row_log_probs, rows.weight) / rows.weight.sum(-1).clamp(min=1)
        return means * self.counted(batch).sum(-1, keepdim=True)

    def bound(self, log_likelihood: Tensor, rows: Rows, batch: SequenceBatch) -> tuple[Tensor, SandwichBounds]:
        """What each completion is judged by, nats a token [B], and both bounds."""
        assert batch.advantage is not None  # the rollout fills it
        bounds = sandwich_bounds(log_likelihood, rows.weight, self.counted(batch), self.eubo_beta)
        return sandwiched(bounds, batch.advantage, self.upper, self.mix), bounds

    def policy_loss(
        self, log_likelihood: Tensor, old: Tensor, ref: Tensor | None, rows: Rows, batch: SequenceBatch
    ) -> LossOutput:
        """-A times the bound."""
        assert batch.advantage is not None
        value, bounds = self.bound(log_likelihood, rows, batch)
        advantage = batch.advantage.to(value)
        exists = self.counted(batch).any(-1) & (advantage != 0)
        gap = torch.where(exists, bounds.upper - bounds.lower, 0.0).detach()
        metrics = {"bound_gap": (gap.sum(), exists.sum().to(gap))}
        return LossOutput(self.total(-advantage * value, batch), metrics)
