"""The one loop body under every post-training method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self, cast

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from dare_lightning.diffusion.advantages import group_advantages
from dare_lightning.diffusion.diagnostics import EntropySum
from dare_lightning.diffusion.rows import Rows
from dare_lightning.families.adapters import has_adapter, trained_part, with_frozen_part
from dare_lightning.families.base import PolicyModel
from dare_lightning.families.cost import Cost
from dare_lightning.families.experts import RouterBalance
from dare_lightning.families.kinds import kind_of
from dare_lightning.methods.defined import Undefined, check_defined
from dare_lightning.methods.plans import GradientPlan, accumulated, check_accumulation, check_plan, chunks, recomputed
from dare_lightning.methods.reference import Reference
from dare_lightning.methods.resolution import check_resolution
from dare_lightning.methods.scoring import join_rows, score_rows, stored_rows
from dare_lightning.methods.step_metrics import MicroBatchMetrics, StepMetrics
from dare_lightning.replay.batch import SequenceBatch


@dataclass(frozen=True)
class LossOutput:
    """What a method says about a micro-batch.

    Attributes:
        total: float [D], sums over samples or tokens, not yet divided; D matches what `denominator` returns.
        metrics: name -> (sum, weight); the logged value is their quotient over the whole optimiser step.
    """

    total: Tensor
    metrics: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


class DiffusionPolicyModule(L.LightningModule):
    """A post-training method is its hooks: corrupt, log_likelihood, advantages, policy_loss and denominator.

    Every method builds N noisy rows a sequence (`corrupt`), scores them under the policy, the old policy and the
    reference (row log-probs, float [B, N, L]), reduces those to its own level (`log_likelihood`) and compares
    (`policy_loss`). Model families appear only in the scoring, algorithms only in the hooks.

    Args:
        policy: the model being trained.
        optimizer: parameters, or groups of them -> optimiser.
        scheduler: optimiser -> learning-rate scheduler, stepped once an optimiser step.
        kl_coef: weight of the divergence from the reference; 0 means no reference is kept or run.
        temperature: divides the logits wherever log-probs are taken.
        gradient_plan: "single" keeps one graph over all rows; "replay" keeps the graph of one chunk of rows at a time
            and recomputes it in the backward pass (exact, one more forward a row); "accumulate" differentiates chunk
            after chunk (exact where the loss is a sum over rows, no extra forward, one more copy of the gradient).
        rows_per_forward: rows of each sequence in one chunk; None puts all N in one.
        router_aux_coef: weight of the load-balancing loss of a mixture of experts; 0 switches it off.

    Raises:
        ValueError: a setting is out of range, the plan does not fit the method, or the method not the policy.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    """Names of the generation `Capabilities` without which the method is undefined."""
    online: ClassVar[bool] = True
    """Whether the data are the policy's own rollouts."""
    compares_pairs: ClassVar[bool] = False
    """Whether the data are pairs of answers, of which one is preferred."""
    additive_rows: ClassVar[bool] = False
    """Whether the loss is a sum over rows, so that rows can be differentiated one after another."""
    uses_old_policy: ClassVar[bool] = True
    """Whether the loss compares with the policy that wrote the rollout; where not, it is never scored."""
    scores_once: ClassVar[bool] = False
    """Whether no two rows score the same token, so that a rollout keeps the log-probs of all of them as one row."""
    scores_steps: ClassVar[bool] = False
    """Whether the proposals of every forward pass are verified as an answer (`SequenceBatch.step_rewards`)."""
    undefined: ClassVar[tuple[Undefined, ...]] = ()
    """The policies on which the method means nothing; refused before they are read, where the configuration says."""

    def __init__(
        self,
        policy: PolicyModel,
        optimizer: Callable[[Iterable[Any]], Optimizer],
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        kl_coef: float = 0.0,
        temperature: float = 1.0,
        gradient_plan: GradientPlan = "single",
        rows_per_forward: int | None = None,
        router_aux_coef: float = 0.0,
    ) -> None:
        super().__init__()
        if kl_coef < 0:
            raise ValueError(f"method.kl_coef={kl_coef} is negative; use 0 to switch the reference off")
        if temperature <= 0:
            raise ValueError(f"method.temperature={temperature} must be above 0: log-probs are taken at it")
        check_plan(gradient_plan, rows_per_forward, self.additive_rows, type(self).__name__)
        self.policy: PolicyModel = policy
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.kl_coef = kl_coef
        self.temperature = temperature
        self.gradient_plan: GradientPlan = gradient_plan
        self.rows_per_forward = rows_per_forward
        self.router = RouterBalance(policy, router_aux_coef)
        self._reference = Reference()
        self._step_metrics = StepMetrics()
        self.cost = Cost()
        self.check_defined({})

    def check_defined(self, settings: Mapping[str, Any]) -> None:
        """Raise ValueError where the method, or one of these settings of it, is not defined on the policy."""
        check_defined(type(self).__name__, self.undefined, kind_of(self.policy), type(self.policy).__name__, settings)

    # The hooks.

    def corrupt(self, batch: SequenceBatch) -> Rows:
        """The noisy rows of each sequence, drawn from `batch.noise_seed` and `batch.iteration` alone."""
        raise NotImplementedError

    def log_likelihood(self, row_log_probs: Tensor, rows: Rows, batch: SequenceBatch) -> Tensor:
        """Row log-probs [B, N, L] -> the method's estimate, at its level.

        Returns:
            [B, L] by token, [B, N, L] by token of a row, [B, N] by row, or [B] by sequence.
        """
        raise NotImplementedError

    def advantages(self, rewards: Tensor) -> Tensor:
        """Rewards [prompts, group] -> advantages of the same shape."""
        raise NotImplementedError

    def credit(self, batch: SequenceBatch) -> SequenceBatch:
        """The rewarded batch of a rollout with its advantages; whole groups, in any order.

        By default each completion gets one, from `advantages` of its group. A method whose unit is not the completion
        fills another column (`step_advantage`) here.
        """
        assert batch.reward is not None  # the rollout fills both
        assert batch.group_index is not None
        found = group_advantages(batch.reward, batch.group_index, self.advantages)
        return replace(batch, advantage=found.advantage)

    def leaves_out(self, batch: SequenceBatch) -> Tensor | None:
        """bool [B], the samples of a rewarded rollout that are not trained on, in whole groups; None for none."""
        return None

    def policy_loss(
        self, log_likelihood: Tensor, old: Tensor, ref: Tensor | None, rows: Rows, batch: SequenceBatch
    ) -> LossOutput:
        """The summed loss; `old` and `ref` carry no gradient, `ref` is None where kl_coef is 0."""
        raise NotImplementedError

    def denominator(self, rows: Rows, batch: SequenceBatch) -> Tensor:
        """Float [D]: what this micro-batch adds to the numbers that the summed loss is divided by."""
        raise NotImplementedError

    @property
    def needs_reference(self) -> bool:
        """Whether a reference policy is kept and scored; by default where a divergence from it is paid for."""
        return self.kl_coef > 0

    def teaches(self, batch: SequenceBatch) -> Tensor | None:
        """bool [B], the samples whose loss can have a gradient; None for all. The others are never run.

        By default a completion without advantage teaches nothing, unless it is compared with a reference.
        """
        if not self.online or self.needs_reference or batch.advantage is None:
            return None
        return batch.advantage != 0

    def further_loss(self, rows: Rows, batch: SequenceBatch) -> LossOutput | None:
        """What else these rows are paid for, divided as the policy's loss is; None for nothing."""
        return None

    def trained_modules(self) -> list[nn.Module]:
        """What the optimiser changes: the policy, and whatever a method trains beside it."""
        return [cast(nn.Module, self.policy)]

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Trained parameters as an optimiser takes them; a group may have a learning rate of its own."""
        return [{"params": [p for p in self.policy.parameters() if p.requires_grad]}]

    def draws(self, row_log_probs: Tensor, rows: Rows, batch: SequenceBatch) -> Tensor | None:
        """The Monte Carlo draws of each sample's log-likelihood in these rows, nats [B, n]; None for no draws."""
        return None

    def counted(self, batch: SequenceBatch) -> Tensor:
        """The tokens that count in the loss, bool [B, L]."""
        return batch.completion_mask

    def lengths(self, batch: SequenceBatch) -> Tensor:
        """The tokens that count of each sample, int64 [B]; 0 for samples that teach nothing."""
        taught, length = self.teaches(batch), self.counted(batch).sum(-1)
        return length if taught is None else length * taught

    # Scoring.

    def row_log_probs(
        self, policy: PolicyModel, rows: Rows, batch: SequenceBatch, entropy: EntropySum | None = None
    ) -> Tensor:
        """log-probs of the scored positions of every row under `policy`, float [B, N, L]; 0 elsewhere.

        Samples that teach nothing (see `teaches`) are left out: their log-probs are 0 under every policy.
        """
        return score_rows(policy, rows, batch, self.teaches(batch), self.temperature, entropy)

    @torch.no_grad()
    def frozen_log_probs(self, policy: PolicyModel, rows: Rows, batch: SequenceBatch, merge: bool = False) -> Tensor:
        """`row_log_probs` without gradient, chunk by chunk; with `merge` all rows as one, see `join_rows`."""
        parts = chunks(rows.count, self.rows_per_forward)
        return join_rows((self.row_log_probs(policy, rows.select(part), batch) for part in parts), merge)

    def freeze_policies(self, batch: SequenceBatch, inner_epochs: int, keep_old: bool) -> SequenceBatch:
        """Add the old policy's and the reference's row log-probs for every inner epoch of a fresh rollout.

        Args:
            keep_old: False where the rollout serves a single update; the old policy is then the policy itself at the
                moment of the update, and its log-probs are the update's own, detached (ratio exactly 1).
        """
        old, ref = [], []
        for iteration in range(inner_epochs):
            view = replace(batch, iteration=iteration)
            rows = self.corrupt(view)
            if keep_old and self.uses_old_policy:
                with self.cost.spent_on("old_policy"):
                    old.append(self.frozen_log_probs(self.policy, rows, view, self.scores_once))
            if self.needs_reference:
                with self.reference() as reference, self.cost.spent_on("reference"):
                    ref.append(self.frozen_log_probs(reference, rows, view, self.scores_once))
        return replace(
            batch,
            old_log_probs=torch.stack(old, dim=1) if old else None,
            ref_log_probs=torch.stack(ref, dim=1) if ref else None,
        )

    def reference(self) -> AbstractContextManager[PolicyModel]:
        """The reference policy in a context, see `Reference.of`."""
        return self._reference.of(self.policy)

    def keep_reference(self) -> None:
        """Freeze a copy of the policy as it is now, where one is needed."""
        if self.needs_reference:
            self._reference.keep(self.policy)

    # The loop body.

    def training_step(self, batch: SequenceBatch, batch_idx: int) -> Tensor:
        """The micro-batch's share of the optimiser step's loss, in the scale Lightning expects."""
        rows = self.corrupt(batch)
        micro_batches = self.trainer.world_size * self.trainer.accumulate_grad_batches
        loss, metrics = self.loss_and_metrics(rows, batch, micro_batches)
        share = torch.full_like(loss.detach(), 1 / self.trainer.world_size)
        self._step_metrics.note({"loss": (loss.detach(), share)}, add=True)
        self._step_metrics.note(metrics)
        # Lightning divides by the accumulation count and averages over ranks; the denominators already cover both.
        return loss * micro_batches

    def loss_and_metrics(
        self, rows: Rows, batch: SequenceBatch, micro_batches: int = 1
    ) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """The normalised loss of a micro-batch (a scalar with gradient) under the configured gradient plan.

        `micro_batches` make the optimiser step; of what is a mean over forward passes, this one has that share.
        """
        seen, parts = MicroBatchMetrics(), chunks(rows.count, self.rows_per_forward)

        def update_log_probs(policy: PolicyModel, rows: Rows, batch: SequenceBatch) -> tuple[Tensor, list[Tensor]]:
            # Here, because the backward pass may call it again.
            with self.cost.spent_on("update"), self.router.recording() as passes:
                return self.row_log_probs(policy, rows, batch, seen.entropy), passes

        def loss_of(row_log_probs: Tensor, part: slice) -> Tensor:
            chosen = rows.select(part)
            output, further = self._compare(row_log_probs, chosen, batch, part), self.further_loss(chosen, batch)
            seen.note(output.metrics, self.draws(row_log_probs.detach(), chosen, batch))
            total = output.total.reshape(-1)
            if further is not None:
                seen.note(further.metrics)
                total = total + further.total.reshape(-1)
            return (total / self._denominator(batch).to(total.dtype)).sum()

        def balanced(loss: Tensor, passes: list[Tensor], parts: int) -> Tensor:
            loss, metrics = self.router.added(loss, passes, parts * micro_batches)
            seen.note(metrics)
            return loss

        def part_loss(part: slice) -> Tensor:
            scored, passes = update_log_probs(self.policy, rows.select(part), batch)
            return balanced(loss_of(scored, part), passes, len(parts))

        if self.gradient_plan == "accumulate" and torch.is_grad_enabled():
            trained = [p for module in self.trained_modules() for p in module.parameters() if p.requires_grad]
            return accumulated(part_loss, parts, trained), seen.sums(self.lengths(batch))
        score = update_log_probs if self.gradient_plan == "single" else recomputed(update_log_probs)
        results = [score(self.policy, rows.select(part), batch) for part in parts]
        loss = loss_of(torch.cat([scored for scored, _ in results], dim=1), slice(0, rows.count))
        return balanced(loss, [p for _, passes in results for p in passes], 1), seen.sums(self.lengths(batch))

    def _denominator(self, batch: SequenceBatch) -> Tensor:
        if batch.denominator is None:
            raise ValueError("the batch carries no loss denominator; it must come from a MicroBatchLoader")
        # A step in which nothing counts has total 0, and then loss 0.
        return batch.denominator.clamp_min(torch.finfo(torch.float32).tiny)

    def _compare(self, row_log_probs: Tensor, rows: Rows, batch: SequenceBatch, part: slice) -> LossOutput:
        def estimate(stored: Tensor) -> Tensor:
            kept = stored_rows(stored[:, batch.iteration], rows, part, self.scores_once)
            return self.log_likelihood(kept.to(row_log_probs), rows, batch)

        current = self.log_likelihood(row_log_probs, rows, batch)
        old = current.detach() if batch.old_log_probs is None else estimate(batch.old_log_probs)
        ref = None
        if batch.ref_log_probs is not None:
            ref = estimate(batch.ref_log_probs)
        elif self.needs_reference:  # fixed data: no rollout has scored them
            with self.reference() as reference, self.cost.spent_on("reference"):
                ref = self.log_likelihood(self.frozen_log_probs(reference, rows, batch), rows, batch)
        return self.policy_loss(current, old, ref, rows, batch)

    @torch.no_grad()
    def count(self, batch: SequenceBatch) -> Tensor:
        """`denominator` of a micro-batch whose rows are not drawn yet; the loader sums it over the step."""
        return self.denominator(self.corrupt(batch), batch).to(torch.float64).reshape(-1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Held-out loss of an offline data set; held-out prompts are scored by a callback."""
        if isinstance(batch, SequenceBatch):
            rows = self.corrupt(batch)
            denominator = self.count(batch)
            with self.cost.spent_on("validation"):
                loss, _ = self.loss_and_metrics(rows, replace(batch, denominator=denominator.to(batch.ids.device)))
            # Weighed by what they were divided by, the batches' means are the mean over all of them.
            weight = round(float(denominator)) if denominator.numel() == 1 else len(batch)
            self.log("val/loss", loss, batch_size=weight, prog_bar=True, sync_dist=True)

    # Lightning.

    def setup(self, stage: str) -> None:
        """Keep the reference of a training run, and Lightning from converting batches to the weights' precision.

        A policy reads ids; denominators and old log-probs that travel with them must not be rounded.

        Raises:
            ValueError: the gradient plan does not work under the strategy or the precision.
        """
        self.keep_reference()  # before a checkpoint is read, and before a validation that comes first
        if stage == "fit" and self.gradient_plan == "accumulate":
            check_accumulation(self.trainer)
        self.trainer.precision_plugin.convert_input = _unchanged  # type: ignore[method-assign]

    def train(self, mode: bool = True) -> Self:
        """Training mode, but for the policy of an online method: dropout would make its first ratio differ from 1."""
        super().train(mode)
        if self.online:
            self.policy.eval()
        return self

    def configure_optimizers(self) -> Any:
        """The optimiser over the trained parameters, and its scheduler.

        Raises:
            ValueError: the weights are stored too coarsely for steps of this learning rate to change them.
        """
        groups = self.parameter_groups()
        optimizer = self.optimizer(groups if len(groups) > 1 else groups[0]["params"])
        check_resolution(optimizer)
        if self.scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.scheduler(optimizer), "interval": "step"}}

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Log the step's metrics: quotients of sums over all its micro-batches and all ranks."""
        gradients = [p.grad for p in self.policy.parameters() if p.grad is not None]
        self.log("train/grad_norm", torch.nn.utils.get_total_norm(gradients))
        self.log("train/learning_rate", optimizer.param_groups[0]["lr"])
        for name, value in self._step_metrics.values().items():
            self.log(f"train/{name}", value, prog_bar=name == "loss")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """With an adapter, save the adapter alone: the base is read from its own folder again."""
        if has_adapter(self.policy):
            checkpoint["state_dict"] = trained_part(self, checkpoint["state_dict"])

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Fill in the frozen weights that an adapter checkpoint leaves out."""
        if has_adapter(self.policy):
            checkpoint["state_dict"] = with_frozen_part(self, checkpoint["state_dict"])


def _unchanged(data: Any) -> Any:
    return data
