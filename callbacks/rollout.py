"""Rollout: generate, score, freeze the old policy's log-probs."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace

import lightning as L
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from dare_lightning.datamodules.prompts import PromptDataModule, Prompts
from dare_lightning.families.base import PolicyModel, distinct_rows
from dare_lightning.generation.agreement import log_prob_gaps
from dare_lightning.generation.base import WAYS, GenerationBackend, Progress
from dare_lightning.methods.base import DiffusionPolicyModule
from dare_lightning.parallel.collectives import gather_objects, rank_and_world
from dare_lightning.parallel.modes import frozen
from dare_lightning.replay.batch import SequenceBatch, concatenate
from dare_lightning.rewards.base import Example, Reward, Verdict, sample_name

log = logging.getLogger(__name__)

_ANSWERS_AT_ONCE = 1024
"""Proposals of single steps that are verified in one call."""


def precision_of_updates(trainer: L.Trainer) -> AbstractContextManager[None]:
    """Autocast where updates run under it. True half precision needs no context: the weights say it."""
    plugin = trainer.precision_plugin
    return plugin.forward_context() if isinstance(plugin, MixedPrecision) else nullcontext()


def completion_texts(policy: PolicyModel, batch: SequenceBatch) -> list[str]:
    """The text of what counts of each completion, up to its first end token, special tokens left out."""
    ends = set(policy.stop_token_ids)
    texts = []
    counted = batch.response_mask & batch.completion_mask
    for ids, written in zip(batch.ids.tolist(), counted.tolist(), strict=True):
        answer = [token for token, own in zip(ids, written, strict=True) if own]
        stop = next((place for place, token in enumerate(answer) if token in ends), len(answer))
        texts.append(policy.tokenizer.decode(answer[:stop], skip_special_tokens=True))
    return texts


def scored(
    policy: PolicyModel, reward: Reward, batch: SequenceBatch, examples: Sequence[Example]
) -> tuple[list[str], list[Verdict]]:
    """Texts and verdicts of a generated batch.

    Raises:
        ValueError: completions or verdicts are not one for each example, or a reward is not finite.
    """
    if len(batch) != len(examples):
        raise ValueError(
            f"the backend returned {len(batch)} completions for {len(examples)} prompts; it must be one each"
        )
    texts = completion_texts(policy, batch)
    verdicts = reward(texts, examples)
    if len(verdicts) != len(texts):
        raise ValueError(
            f"the reward returned {len(verdicts)} verdicts for {len(texts)} completions; it must be one each"
        )
    for example, verdict in zip(examples, verdicts, strict=True):
        if not math.isfinite(verdict.reward):
            raise ValueError(f"the reward of {sample_name(example)} is {verdict.reward}; it must be a finite number")
    return texts, verdicts


def step_rewards(
    policy: PolicyModel, reward: Reward, batch: SequenceBatch, examples: Sequence[Example]
) -> torch.Tensor:
    """The reward of each forward pass's proposals taken as the answer, float32 [B, T]; 0 after a row's last pass.

    Equal proposals of a row are verified once.

    Raises:
        ValueError: the backend recorded no proposals, or a reward is not finite.
    """
    if batch.proposals is None or batch.forward_passes is None:
        raise ValueError("every step is to be rewarded, but the rollout recorded no proposals")
    count, passes, _ = batch.proposals.shape
    made = torch.arange(passes, device=batch.ids.device) < batch.forward_passes[:, None]
    row, step = made.nonzero(as_tuple=True)
    read = torch.cat([row[:, None], batch.proposals[row, step]], 1)
    place, first = distinct_rows(read)
    # Proposals may be longer than the answer that came of them; the columns of all passes would be copied for each.
    lean = replace(batch, states=None, proposals=None, confidence=None, completion_mask=batch.response_mask)
    rewards = []
    for part in first.split(_ANSWERS_AT_ONCE):
        answers = replace(lean.select(row[part]), ids=batch.proposals[row[part], step[part]])
        _, verdicts = scored(policy, reward, answers, [examples[i] for i in row[part].tolist()])
        rewards += [verdict.reward for verdict in verdicts]
    found = torch.tensor(rewards, dtype=torch.float32, device=place.device)
    return torch.zeros(count, passes, device=place.device).masked_scatter(made, found[place])


def verdict_metrics(verdicts: Sequence[Verdict]) -> dict[str, list[float]]:
    """Per-completion values behind the logged means: reward, its parts, and one share for each status."""
    values: dict[str, list[float]] = {"reward": [v.reward for v in verdicts]}
    values["solve_rate"] = [float(v.status == "right") for v in verdicts]
    for status in ("unparsed", "timeout", "excluded"):
        values[status] = [float(v.status == status) for v in verdicts]
    for name in sorted({part for v in verdicts for part in v.parts}):
        values[f"reward/{name}"] = [v.parts.get(name, 0.0) for v in verdicts]
    return values


def mean_over_ranks(values: dict[str, list[float]]) -> dict[str, float]:
    """Mean of each list over all ranks together; ranks may hold different numbers of values."""
    gathered = gather_objects(values)
    joined: dict[str, list[float]] = {}
    for part in gathered:
        for name, numbers in part.items():
            joined.setdefault(name, []).extend(numbers)
    return {name: sum(numbers) / len(numbers) for name, numbers in joined.items() if numbers}


class RolloutCallback(L.Callback):
    """One Lightning epoch is one rollout. The datamodule owns the buffer and asks at most once an epoch.

    Args:
        backend: what generates.
        score_batch: sequences in one forward of the old and reference policies; None takes the micro-batch size.
        gap_samples: completions of a rollout and rank whose reported log-probs are compared with the policy's own, see
            `log_prob_gaps`; 0 is off. Their passes are not counted as cost.

    Raises:
        ValueError: a size out of range.
    """

    def __init__(self, backend: GenerationBackend, score_batch: int | None = None, gap_samples: int = 4) -> None:
        if gap_samples < 0:
            raise ValueError(f"rollout.gap_samples={gap_samples} must be at least 0, which is off")
        self.backend = backend
        self.score_batch = score_batch
        self.gap_samples = gap_samples
        self.progress: Progress | None = None
        self._trainer: L.Trainer | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse what cannot work, before anything is generated."""
        data, method = _parts(trainer)
        self.check(type(method), data.group_size)
        self.backend.validate(method.policy)
        data.check_ranks(trainer.world_size)
        data.collector = self
        self._trainer = trainer

    def check(self, method: type[DiffusionPolicyModule], group_size: int) -> None:
        """Refuse a method and a size of groups that the backend cannot serve as it is set; no policy is needed.

        Raises:
            ValueError: naming what is missing and what gives it.
        """
        offered = asdict(self.backend.capabilities)
        if lacking := [need for need in method.needs if not offered[need]]:
            raise ValueError(
                f"{method.__name__} needs {', '.join(lacking)} from the rollout,"
                f" which {type(self.backend).__name__} does not give as it is set: "
                + "; ".join(WAYS[need] for need in lacking)
            )
        if self.backend.temperature == 0:
            raise ValueError(
                "rollout.backend.temperature=0 makes the answers of a group equal and every advantage zero;"
                " use one above 0"
            )
        if not self.backend.capabilities.stochastic:
            raise ValueError(
                f"{type(self.backend).__name__} ignores the temperature: the answers of a group would be equal and"
                " every advantage zero; choose another rollout"
            )
        size = self.backend.capabilities.group_size
        if size is not None and size != group_size:
            raise ValueError(
                f"this rollout makes {size} completions of each prompt, data.group_size={group_size}: set"
                f" data.group_size={size}, or choose another rollout"
            )

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Collect before the first micro-batch is asked for."""
        data, _ = _parts(trainer)
        data.ensure_rollout(trainer.current_epoch)

    def collect(self, rollout: int) -> tuple[SequenceBatch, dict[str, float]]:
        """Generate this rank's share of a rollout and make it ready for training."""
        assert self._trainer is not None
        data, method = _parts(self._trainer)
        prompts = data.prompts_for(rollout, *rank_and_world())
        started = time.perf_counter()
        # The precision of the update: at another one, the first ratio would not be 1.
        with frozen(method), precision_of_updates(self._trainer):
            self.backend.update_weights(method.policy, version=self._trainer.global_step)
            with method.cost.spent_on("rollout"):
                batch = self.backend.generate(
                    prompts.ids, prompts.seeds, self.progress, record_states="states" in method.needs
                )
            generated = time.perf_counter()
            texts, verdicts = scored(method.policy, data.reward, batch, prompts.examples)
            batch = self._with_advantages(data, method, batch, prompts, verdicts)
            judged = time.perf_counter()
            batch = self._frozen(data, method, batch)
            gaps = log_prob_gaps(method.policy, batch, self.backend.capabilities, self.gap_samples)
        values = verdict_metrics(verdicts) | _shape_metrics(batch, texts, data.group_size)
        lengths = sum(values["length"])
        values["log_prob_gap"] = gaps.tolist()
        values["tokens_per_second"] = [lengths / max(generated - started, 1e-9)]
        values["seconds/generate"] = [generated - started]
        values["seconds/reward"] = [judged - generated]
        values["seconds/score"] = [time.perf_counter() - judged]
        counts = Counter(v.status for v in verdicts)
        log.info("rollout %d: %s", rollout, ", ".join(f"{n} {status}" for status, n in sorted(counts.items())))
        if batch.left_out is not None:
            left = batch.left_out.view(-1, data.group_size).any(1)
            values["left_out_groups"] = left.float().tolist()
            log.info("rollout %d: %d of %d groups are left out of training", rollout, int(left.sum()), len(left))
        metrics = mean_over_ranks(values)
        if largest := [part for part in gather_objects(float(gaps.max()) if len(gaps) else None) if part is not None]:
            metrics["log_prob_gap_max"] = max(largest)
        return batch.to("cpu"), metrics

    def _with_advantages(
        self,
        data: PromptDataModule,
        method: DiffusionPolicyModule,
        batch: SequenceBatch,
        prompts: Prompts,
        verdicts: Sequence[Verdict],
    ) -> SequenceBatch:
        rewards = torch.tensor([verdict.reward for verdict in verdicts], dtype=torch.float32)
        device = batch.ids.device
        rewarded = replace(
            batch,
            sample_index=torch.tensor(prompts.sample_index).to(device),
            group_index=torch.tensor(prompts.group_index).to(device),
            reward=rewards.to(device),
            solved=torch.tensor([verdict.status == "right" for verdict in verdicts], device=device),
        )
        rewarded = replace(rewarded, left_out=method.leaves_out(rewarded))
        if method.scores_steps:
            steps = step_rewards(method.policy, data.reward, batch, prompts.examples)
            rewarded = replace(rewarded, step_rewards=steps.to(device))
        return method.credit(rewarded)

    def _frozen(self, data: PromptDataModule, method: DiffusionPolicyModule, batch: SequenceBatch) -> SequenceBatch:
        size = self.score_batch or data.micro_batch
        rows = torch.arange(len(batch), device=batch.ids.device)
        if batch.left_out is not None and not bool(batch.left_out.all()):
            rows = rows[~batch.left_out]
        keep_old = not data.single_update
        parts = [
            method.freeze_policies(batch.select(part).to(method.device), data.inner_epochs, keep_old)
            for part in rows.split(size)
        ]
        found = concatenate(parts)
        return found if len(rows) == len(batch) else batch.to(found.ids.device).filled(found, rows)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log what the rollout measured."""
        data, _ = _parts(trainer)
        for name, value in data.buffer.metrics.items():
            pl_module.log(f"rollout/{name}", value, rank_zero_only=False, prog_bar=name == "reward")


def _shape_metrics(batch: SequenceBatch, texts: Sequence[str], group_size: int) -> dict[str, list[float]]:
    assert batch.reward is not None
    rewards = batch.reward.view(-1, group_size)
    groups = [texts[start : start + group_size] for start in range(0, len(texts), group_size)]
    values = {
        "length": batch.completion_mask.sum(1).tolist(),
        "zero_variance_groups": (rewards.amax(1) == rewards.amin(1)).float().tolist(),
        "distinct_in_group": [len(set(group)) / len(group) for group in groups],
        "max_reward_in_group": rewards.amax(1).tolist(),
    }
    if batch.forward_passes is not None:
        values["forward_passes"] = batch.forward_passes.float().tolist()
    return values


def _parts(trainer: L.Trainer) -> tuple[PromptDataModule, DiffusionPolicyModule]:
    data, method = trainer.datamodule, trainer.lightning_module  # type: ignore[attr-defined]
    if not isinstance(data, PromptDataModule):
        raise ValueError(
            f"a rollout needs prompts to ask; data is {type(data).__name__}, use one with a reward (data=gsm8k)"
        )
    if not isinstance(method, DiffusionPolicyModule):
        raise ValueError(f"a rollout needs a DiffusionPolicyModule, found {type(method).__name__}")
    return data, method
