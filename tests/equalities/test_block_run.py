"""Training by reinforcement of a block policy, its blocks counted from the response: resumed and on-policy."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import lightning as L
import torch

from dare_lightning.callbacks.rng_state import RngState
from dare_lightning.callbacks.rollout import RolloutCallback
from dare_lightning.datamodules.prompts import PromptDataModule
from dare_lightning.evaluation.benchmarks.sudoku import SudokuTask
from dare_lightning.families.tiny import new_tiny_sdar
from dare_lightning.generation.block import BlockBackend
from dare_lightning.generation.block_steps import AboveThreshold
from dare_lightning.methods.cj_grpo import CJGRPO
from tests.equalities.conftest import Keep, Record, trainer, variety, weights


class Blocks:
    """Two rollouts of 2 prompts × 4 answers; 2 updates each: 4 optimiser steps."""

    def __init__(self) -> None:
        self.policy = new_tiny_sdar(layers=1, width=16, heads=2, block_length=8).double()
        sizes = {"group_size": 4, "prompts_per_rollout": 2, "updates_per_rollout": 2, "micro_batch": 4}
        task = SudokuTask(form="compact")
        self.data = PromptDataModule(self.policy, variety, task=task, train_prompts=8, val_prompts=2, **sizes)
        self.method = CJGRPO(self.policy, partial(torch.optim.AdamW, lr=1e-2))
        backend = BlockBackend(
            17, steps=AboveThreshold(0.05), temperature=1.0, block_origin="response", early_stop="never"
        )
        self.rollout = RolloutCallback(backend)

    def fit(self, *callbacks: L.Callback, ckpt_path: Path | None = None, **options: object) -> L.Trainer:
        run = trainer([self.rollout, RngState(), *callbacks], precision="64-true", **options)
        run.accumulate_grad_batches = self.data.micro_batches_per_step(1)
        run.fit(self.method, datamodule=self.data, ckpt_path=ckpt_path)
        return run


def test_a_run_resumed_inside_a_rollout_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = Blocks()
    whole.fit(Keep(tmp_path, at=[1]))
    resumed = Blocks()
    assert resumed.fit(ckpt_path=tmp_path / "inside-1.ckpt").global_step == 4
    assert resumed.data.buffer.batch is not None
    assert resumed.data.buffer.batch.block_origin == "response"
    torch.testing.assert_close(weights(resumed), weights(whole), rtol=0, atol=0)


def test_the_first_update_of_a_rollout_has_ratios_of_one_and_the_rollouts_log_probs(tmp_path: Path) -> None:
    run, record = Blocks(), Record()
    run.fit(logger=record, max_epochs=1)
    first, later = record.series("train/ratio_mean")[:2]
    assert abs(first - 1) < 1e-9
    assert later != 1
    batch = run.data.buffer.batch
    assert batch is not None
    assert batch.old_log_probs is not None
    assert batch.commit_log_probs is not None
    taught = batch.advantage != 0
    counted = batch.completion_mask & taught[:, None]
    torch.testing.assert_close(batch.old_log_probs[:, 0].sum(1)[counted].float(), batch.commit_log_probs[counted])
