"""Held-out prompts, scored with the verifier that pays the reward."""

from __future__ import annotations

import logging
from typing import Any

import lightning as L

from dare_lightning.callbacks.rollout import mean_over_ranks, precision_of_updates, scored, verdict_metrics
from dare_lightning.callbacks.samples import log_samples
from dare_lightning.datamodules.chat import encode_dialogue
from dare_lightning.datamodules.prompts import Prompts
from dare_lightning.datamodules.sft import Sample, supervised_batch
from dare_lightning.evaluation.likelihood import negative_elbo
from dare_lightning.generation.base import GenerationBackend, Progress
from dare_lightning.methods.base import DiffusionPolicyModule
from dare_lightning.parallel.collectives import gather_objects
from dare_lightning.parallel.modes import frozen
from dare_lightning.rewards.base import Reward

log = logging.getLogger(__name__)


class HeldOutValidation(L.Callback):
    """Scores the held-out prompts whenever Lightning validates (`trainer.check_val_every_n_epoch` rollouts).

    Args:
        backend: what generates; usually the rollout's with temperature 0.
        table_rows: how many samples go into the samples table.
        likelihood_rows: noisy rows for each reference answer, whose likelihood bound is then measured; 0 is off.
        block_backend: generates in its place where the policy is a block-diffusion one.
    """

    def __init__(
        self,
        backend: GenerationBackend,
        table_rows: int = 8,
        likelihood_rows: int = 0,
        block_backend: GenerationBackend | None = None,
    ) -> None:
        self.backend = backend
        self.block_backend = block_backend
        self.table_rows = table_rows
        self.likelihood_rows = likelihood_rows
        self.progress: Progress | None = None
        self.results: list[dict[str, Any]] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse what cannot work."""
        if not isinstance(pl_module, DiffusionPolicyModule):
            raise ValueError(f"held-out validation needs a DiffusionPolicyModule, found {type(pl_module).__name__}")
        if pl_module.policy.block_length is not None and self.block_backend is not None:
            self.backend = self.block_backend
        self.backend.validate(pl_module.policy)

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Answer and score this rank's held-out prompts."""
        if not isinstance(batch, Prompts) or not isinstance(pl_module, DiffusionPolicyModule):
            return
        values: dict[str, list[float]] = {}
        rows: list[tuple[int, dict[str, Any]]] = []
        if batch.ids:  # more ranks than held-out prompts leave some ranks without
            data: Any = trainer.datamodule  # type: ignore[attr-defined]
            values, rows = self._answered(trainer, pl_module, data.reward, batch)
        for name, value in mean_over_ranks(values).items():
            pl_module.log(f"val/{name}", value, batch_size=1, prog_bar=name == "solve_rate", rank_zero_only=False)
        # Prompts are dealt to the ranks in turn: sorted, the table is the same for any number of ranks.
        together = [row for part in gather_objects(rows) for row in part]
        self.results = [row for _, row in sorted(together, key=lambda pair: pair[0])]
        if trainer.is_global_zero:
            log_samples(trainer, "val", trainer.global_step, self.results[: self.table_rows])

    def _answered(
        self, trainer: L.Trainer, method: DiffusionPolicyModule, reward: Reward, prompts: Prompts
    ) -> tuple[dict[str, list[float]], list[tuple[int, dict[str, Any]]]]:
        """Values behind the metrics, and rows of the samples table with their places."""
        with frozen(method), precision_of_updates(trainer):
            self.backend.update_weights(method.policy, version=trainer.global_step)
            answers = self.backend.generate(prompts.ids, prompts.seeds, self.progress)
        texts, verdicts = scored(method.policy, reward, answers, prompts.examples)
        values = verdict_metrics(verdicts) | {"length": answers.completion_mask.sum(1).tolist()}
        if self.likelihood_rows:
            with frozen(method), precision_of_updates(trainer):
                values["answer_nelbo"] = self._negative_elbos(method, prompts)
        rows = [
            {
                "prompt": example.messages[-1]["content"],
                "completion": text,
                "answer": verdict.answer,
                "ground_truth": example.ground_truth,
                "reward": verdict.reward,
                "status": verdict.status,
                "index": example.index,
            }
            for example, text, verdict in zip(prompts.examples, texts, verdicts, strict=True)
        ]
        return values, list(zip(prompts.sample_index, rows, strict=True))

    def _negative_elbos(self, method: DiffusionPolicyModule, prompts: Prompts) -> list[float]:
        """NELBO in nats a token of each reference answer; examples without `answer` are left out."""
        samples, seeds = [], []
        for place, (example, seed) in enumerate(zip(prompts.examples, prompts.seeds, strict=True)):
            if "answer" in example.extra:
                messages = [*example.messages, {"role": "assistant", "content": str(example.extra["answer"])}]
                samples.append(Sample(encode_dialogue(method.policy.tokenizer, messages, _NO_LIMIT), place))
                seeds.append(seed)
        bounds: list[float] = []
        for start in range(0, len(samples), _BATCH):
            part = slice(start, start + _BATCH)
            answers = supervised_batch(method.policy, samples[part], seeds[part]).to(method.device)
            bounds += negative_elbo(method.policy, answers, self.likelihood_rows).tolist()
        return bounds


# A reference answer is measured whole.
_NO_LIMIT = 1 << 20
_BATCH = 8
