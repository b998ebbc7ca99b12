"""Configuration -> objects -> Trainer. The only place that builds things."""

from __future__ import annotations

import itertools
import logging
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from hydra.utils import get_method, get_object, instantiate
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig, OmegaConf

from dare_lightning.callbacks.last_validation import LastValidation
from dare_lightning.callbacks.opencompass import OpenCompassEval
from dare_lightning.callbacks.progress import Progress
from dare_lightning.callbacks.rollout import RolloutCallback
from dare_lightning.callbacks.tracking import MLflowLogger
from dare_lightning.callbacks.validation import HeldOutValidation
from dare_lightning.cli.benchmarks import build_benchmarks, check_benchmarks
from dare_lightning.cli.devices import accelerator
from dare_lightning.cli.errors import UserError
from dare_lightning.datamodules.preference import PreferenceDataModule
from dare_lightning.datamodules.prompts import PromptDataModule
from dare_lightning.families.base import PolicyModel
from dare_lightning.families.kinds import announced
from dare_lightning.methods.base import DiffusionPolicyModule
from dare_lightning.methods.defined import check_defined

log = logging.getLogger(__name__)

# Lightning announces devices, tips and defaults; what matters of that, the progress lines say.
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated")
warnings.filterwarnings("ignore", message=".*does not have many workers.*")


@dataclass
class Objects:
    """Everything a run is made of."""

    policy: PolicyModel
    data: Any
    method: DiffusionPolicyModule
    trainer: L.Trainer


def build_policy(cfg: DictConfig) -> PolicyModel:
    """The policy, adapted where `peft` says so."""
    policy = cast(PolicyModel, instantiate(cfg.model))
    if cfg.get("peft"):
        report = instantiate(cfg.peft).apply(policy)
        log.info("%s", report)
    elif not any(p.requires_grad for p in cast(torch.nn.Module, policy).parameters()):
        raise UserError("no parameter of the model can be trained")
    return policy


def build(cfg: DictConfig, run_dir: Path) -> Objects:
    """All objects of a run, checked against each other before anything is generated or trained.

    Raises:
        UserError, ValueError: parts that do not fit each other.
    """
    L.seed_everything(cfg.seed, workers=True, verbose=False)  # dropout and third-party code; our draws have streams
    kind = _located(cfg, "method")
    if not isinstance(kind, type) or not issubclass(kind, DiffusionPolicyModule):
        raise UserError(f"method._target_={cfg.method._target_} is no subclass of DiffusionPolicyModule")
    _check_family(kind, cfg)
    source = _located(cfg, "data")
    if isinstance(source, type):  # what a function returns is known when it has
        _check_pair(kind, source, cfg)
    rollout = instantiate(cfg.rollout) if cfg.get("rollout") and kind.online else None
    if isinstance(rollout, RolloutCallback) and "group_size" in cfg.data:
        rollout.check(kind, cfg.data.group_size)
    check_benchmarks(cfg)
    policy = build_policy(cfg)
    if isinstance(rollout, RolloutCallback):
        rollout.backend.validate(policy)
    data = instantiate(cfg.data, policy=policy)
    _check_pair(kind, type(data), cfg)
    method = instantiate(cfg.method, policy=policy)
    callbacks = build_callbacks(cfg, rollout, run_dir)
    trainer: L.Trainer = instantiate(
        cfg.trainer,
        accelerator=accelerator(str(cfg.trainer.get("accelerator", "auto"))),
        callbacks=callbacks,
        logger=build_loggers(cfg, run_dir),
    )
    trainer.accumulate_grad_batches = data.micro_batches_per_step(trainer.world_size)
    return Objects(policy, data, method, trainer)


def _located(cfg: DictConfig, key: str) -> Any:
    """The class or function that a part of the configuration is built with.

    Raises:
        UserError: there is none of this name.
    """
    try:
        return get_object(cfg[key]._target_)
    except ImportError as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise UserError(f"{key}._target_={cfg[key]._target_} cannot be imported: {reason}") from error


def _check_family(method: type[DiffusionPolicyModule], cfg: DictConfig) -> None:
    """Refuse a method on a family on which it is not defined before the weights are read, where the family is known."""
    found = announced(get_method(cfg.model._target_), cfg.model.get("path"))
    if found is not None:
        check_defined(method.__name__, method.undefined, *found, settings=cfg.method)


def _check_pair(method: type[DiffusionPolicyModule], data: type, cfg: DictConfig) -> None:
    name = method.__name__
    if method.compares_pairs and not issubclass(data, PreferenceDataModule):
        raise UserError(f"{name} compares pairs of answers; choose data=preference or sudoku_preference")
    if not method.compares_pairs and issubclass(data, PreferenceDataModule):
        raise UserError(f"{name} would learn from both answers of a pair alike; choose method=vrpo, or other data")
    if method.online and not issubclass(data, PromptDataModule):
        raise UserError(f"{name} trains on rollouts and needs prompts; choose data=gsm8k, math, countdown or sudoku")
    if not method.online and issubclass(data, PromptDataModule):
        raise UserError(f"{name} trains on given answers; choose data=sft, gsm8k_sft or sudoku_sft")
    if method.online and not cfg.get("rollout"):
        raise UserError(f"{name} needs a rollout; choose rollout=builtin")
    if cfg.trainer.get("check_val_every_n_epoch", 1) == 0:
        raise UserError(
            "trainer.check_val_every_n_epoch=0 must be at least 1; trainer.limit_val_batches=0 validates nothing"
        )
    if cfg.trainer.get("accumulate_grad_batches", 1) != 1:
        raise UserError(
            "trainer.accumulate_grad_batches follows from the data's sizes; set data.micro_batch instead of it"
        )
    if method.online and cfg.trainer.get("limit_train_batches") not in (None, 1.0):
        raise UserError(
            f"trainer.limit_train_batches={cfg.trainer.limit_train_batches} would leave a rollout half used;"
            " make it smaller with data.prompts_per_rollout, or the run shorter with trainer.max_steps"
        )


def build_callbacks(cfg: DictConfig, rollout: L.Callback | None, run_dir: Path) -> list[L.Callback]:
    """The rollout early, so that it has collected before anything looks at an epoch; then what others may monitor."""
    # The budget before all: what others do at the end of a step or a rollout depends on whether it is the last one.
    callbacks: list[L.Callback] = [instantiate(cfg.budget)] if cfg.get("budget") else []
    callbacks.append(LastValidation())
    if rollout is not None:
        callbacks.append(rollout)
    callbacks += build_benchmarks(cfg, run_dir)
    callbacks += [instantiate(node) for node in (cfg.get("callbacks") or {}).values()]
    progress = next((c for c in callbacks if isinstance(c, Progress)), None)
    for callback in callbacks:
        if progress is None:
            break
        if isinstance(callback, RolloutCallback):
            callback.progress = progress.rollout_progress("rollout")
        elif isinstance(callback, HeldOutValidation):
            callback.progress = progress.rollout_progress("held-out")
        elif isinstance(callback, OpenCompassEval):
            callback.progress = progress.rollout_progress("benchmarks")
    return callbacks


def _keep_table(run_dir: Path) -> None:
    """Number an earlier run's table of metrics: Lightning's CSV logger deletes it when it starts in the same folder."""
    table = run_dir / "csv" / "metrics.csv"
    if table.exists():
        number = next(n for n in itertools.count(1) if not table.with_name(f"metrics.{n}.csv").exists())
        table.rename(table.with_name(f"metrics.{number}.csv"))


def build_loggers(cfg: DictConfig, run_dir: Path) -> list[Logger]:
    """The trackers, told the full configuration."""
    _keep_table(run_dir)
    loggers: list[Logger] = [instantiate(node) for node in (cfg.get("logger") or {}).values()]
    plain = OmegaConf.to_container(cfg, resolve=True)
    for logger in loggers:
        if isinstance(logger, MLflowLogger):
            logger.log_config(cast(dict[str, Any], plain))
        else:
            logger.log_hyperparams(cast(dict[str, Any], plain))
    return loggers
