"""Benchmarks on the live policy while it trains, and on its own in `eval`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy

from dare_lightning.callbacks.artifacts import run_folder
from dare_lightning.callbacks.rng_state import rng_state, set_rng_state
from dare_lightning.callbacks.rollout import completion_texts, precision_of_updates
from dare_lightning.callbacks.tracking import MLflowLogger
from dare_lightning.datamodules.chat import encode_dialogue, encode_prompt
from dare_lightning.datamodules.sft import Sample, supervised_batch
from dare_lightning.evaluation.adapter import Asked, Judged
from dare_lightning.evaluation.benchmark import Benchmark
from dare_lightning.evaluation.fingerprint import adapter_fingerprint, weights_fingerprint
from dare_lightning.evaluation.isolation import untouched_process
from dare_lightning.evaluation.likelihood import negative_elbo
from dare_lightning.evaluation.results import SUFFIX, Record, plain, sha256_of_json
from dare_lightning.evaluation.runner import LIKELIHOOD, OnError, Suite, checked_on_error
from dare_lightning.evaluation.service import PolicyService
from dare_lightning.families.base import PolicyModel
from dare_lightning.generation.base import GenerationBackend, Progress
from dare_lightning.methods.base import DiffusionPolicyModule
from dare_lightning.parallel.modes import frozen

log = logging.getLogger(__name__)

Unit = Literal["rollouts", "steps"]
FOLDER = "evaluations"
_NO_LIMIT = 1 << 20  # a given answer is scored whole


@runtime_checkable
class Described(Protocol):
    """A sampler that says what a completion depends on besides prompt, seed and weights."""

    @property
    def settings(self) -> dict[str, Any]:
        """Names and values."""
        ...


class OpenCompassEval(L.Callback):
    """Runs benchmarks every `every` rollouts or optimiser steps, and at the end; logs `eval/<benchmark>`.

    OpenCompass runs on rank 0; every rank generates. Random states, modes, signal handlers, paths and environment are
    afterwards what they were, so training goes on as if nothing had happened. Each evaluation leaves a result file in
    `evaluations/` of the run folder. Scores are percent.

    Args:
        benchmarks: name -> description.
        backend: called with a benchmark's decoding settings; what generates.
        decoding: settings of the sampler that win over every benchmark's.
        every: rollouts (offline: epochs) or steps between evaluations; None leaves them out.
        unit: what `every` counts.
        at_start: evaluate when validation runs alone: before training, and in `eval`.
        at_end: evaluate the last policy.
        on_error: "nan" logs NaN for a benchmark that failed and goes on; "raise" ends the run.
        data_dir, limit, batch_size, seed: see `Suite`.
        likelihood_rows: noisy rows of each given answer in likelihood mode.
        likelihood_batch: given answers in one forward pass.
        scoring_python: see `Suite`.

    Attributes:
        recipe: the composed configuration, which goes into the record.
        record, file: the last evaluation and its result file; on rank 0.

    Raises:
        ValueError: a setting out of range.
    """

    def __init__(
        self,
        benchmarks: Mapping[str, Benchmark],
        backend: Callable[..., GenerationBackend],
        decoding: Mapping[str, Any] | None = None,
        every: int | None = None,
        unit: Unit = "rollouts",
        at_start: bool = False,
        at_end: bool = True,
        on_error: OnError | float = "nan",
        data_dir: str | None = None,
        limit: int | None = None,
        batch_size: int = 64,
        seed: int = 42,
        likelihood_rows: int = 128,
        likelihood_batch: int = 8,
        scoring_python: str | None = None,
    ) -> None:
        # YAML and the command line read nan as a number.
        self.on_error = checked_on_error(str(on_error))
        if unit not in get_args(Unit):
            raise ValueError(f"eval.unit={unit!r}; choose one of {', '.join(get_args(Unit))}")
        for name, number in (("every", every), ("likelihood_rows", likelihood_rows)):
            if number is not None and number < 1:
                raise ValueError(f"eval.{name}={number} must be at least 1")
        self.suite = Suite(benchmarks, data_dir, limit, batch_size, seed, scoring_python)
        self.decoding = dict(decoding or {})
        self.backends = {name: _built(backend, name, b, self.decoding) for name, b in benchmarks.items()}
        self.every = every
        self.unit = unit
        self.at_start = at_start
        self.at_end = at_end
        self.likelihood_rows = likelihood_rows
        self.likelihood_batch = likelihood_batch
        self.recipe: dict[str, Any] | None = None
        self.progress: Progress | None = None
        self.record: Record | None = None
        self.file: Path | None = None
        self._service: PolicyService | None = None
        self._last_step = -1
        self._first_step = 0

    # When.

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse what cannot work: no policy, or a sharded one, samplers it cannot use, missing data or packages."""
        method = _method(pl_module)
        _check_whole(trainer)
        for backend in self.backends.values():
            backend.validate(method.policy)
        self.suite.check()
        if stage == "fit":
            self.check_monitors(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """What a checkpoint was saved after has been evaluated by the run that saved it."""
        self._first_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After every `every` optimiser steps."""
        # A short last window of an epoch makes a step as well, so the step itself says whether one was made.
        stepped = trainer.global_step > self._first_step and trainer.global_step != self._last_step
        if self.unit == "steps" and self.every is not None and stepped and trainer.global_step % self.every == 0:
            self._evaluate_and_log(trainer, pl_module)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """With the validation that closes an epoch, before callbacks that monitor its metrics look at them."""
        alone = trainer.state.fn != "fit"
        if not trainer.sanity_checking and (self.at_start if alone else self._due(trainer)):
            self._evaluate_and_log(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """At the end of an epoch without validation."""
        if self._due(trainer):
            self._evaluate_and_log(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The last policy, where the run ended at a point that could not be foreseen."""
        leaving = trainer.received_sigterm or trainer.interrupted
        if self.at_end and not leaving and self._last_step != trainer.global_step:
            self._evaluate_and_log(trainer, pl_module)

    def _due(self, trainer: L.Trainer) -> bool:
        done = trainer.current_epoch + 1
        last = done == trainer.max_epochs or trainer.global_step == trainer.max_steps or trainer.should_stop
        regular = self.unit == "rollouts" and self.every is not None and done % self.every == 0
        return (regular or (self.at_end and last)) and self._last_step != trainer.global_step

    def check_monitors(self, trainer: L.Trainer) -> None:
        """Callbacks that monitor a score need it from the first validation on.

        Raises:
            ValueError: one would not find it.
        """
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if not isinstance(callback, (ModelCheckpoint, EarlyStopping)):
                continue
            monitor = callback.monitor or ""
            if not monitor.startswith("eval/"):
                continue
            if monitor.split("/")[1] not in self.suite.benchmarks:
                known = ", ".join(f"eval/{name}" for name in self.suite.benchmarks)
                raise ValueError(
                    f"{type(callback).__name__} monitors {monitor}, which is not evaluated; there is {known}"
                )
            first = trainer.check_val_every_n_epoch or 1
            if self.unit == "rollouts" and (self.every is None or self.every > first):
                raise ValueError(
                    f"{type(callback).__name__} looks for {monitor} after each validation, from rollout {first} on, but"
                    f" eval.every={self.every}; set eval.every to {first} or fewer"
                )

    # What.

    def evaluate(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, float]:
        """Run every benchmark now; the metrics by name. Every rank must call it.

        Raises:
            RuntimeError: a benchmark failed, and failures end the run.
        """
        method = _method(pl_module)
        self._last_step = trainer.global_step
        service = self._service = self._service or PolicyService(self._operations(method))
        with _as_it_was(), frozen(method), precision_of_updates(trainer):
            hashes = {"weights": weights_fingerprint(method.policy), "adapter": adapter_fingerprint(method.policy)}
            for backend in self.backends.values():
                backend.update_weights(method.policy, version=trainer.global_step)
            metrics, failures = service.serve(lambda: self._drive(trainer, method, service, hashes))
        if failures and self.on_error == "raise":
            raise RuntimeError(f"{len(failures)} of {len(self.backends)} benchmarks FAILED: {'; '.join(failures)}")
        return metrics

    def _drive(
        self,
        trainer: L.Trainer,
        method: DiffusionPolicyModule,
        service: PolicyService,
        hashes: Mapping[str, str | None],
    ) -> tuple[dict[str, float], list[str]]:
        """On rank 0: evaluate and record; metrics and failures for every rank."""
        file = _free_file(run_folder(trainer) / FOLDER, trainer.global_step)
        log_file = file.with_name(file.name.removesuffix(SUFFIX) + ".log")
        policy = method.policy
        found = self.suite.run(service, policy.tokenizer, log_file)
        for name, result in found.items():
            result.settings |= plain(self._means(name))
        self.record = Record(
            step=trainer.global_step,
            rollout=trainer.current_epoch + int(trainer.state.fn == "fit"),
            policy={
                **hashes,
                "source": None if policy.source is None else str(policy.source),
                "class": type(policy).__name__,
                "config_sha256": sha256_of_json(policy.config),
                "tokenizer_sha256": sha256_of_json([policy.tokenizer.get_vocab(), policy.tokenizer.chat_template]),
                "chat_template_sha256": sha256_of_json(policy.tokenizer.chat_template),
            },
            settings=self.settings,
            benchmarks=found,
            recipe=self.recipe,
        )
        self._keep(trainer, self.record, file)
        results = self.record.benchmarks.values()
        metrics = {f"eval/{name}": value for result in results for name, value in result.logged.items()}
        return metrics, [f"{result.name}: {result.reason}" for result in self.record.failed]

    @property
    def settings(self) -> dict[str, Any]:
        """Of the evaluation as a whole, for the record."""
        return self.suite.settings | {
            "decoding": plain(self.decoding),
            "likelihood_rows": self.likelihood_rows,
        }

    def _means(self, name: str) -> dict[str, Any]:
        """How a benchmark's answers come about, all settings of the sampler in force."""
        if self.suite.benchmarks[name].mode == "likelihood":
            return {"likelihood_rows": self.likelihood_rows}
        backend = self.backends[name]
        said = backend.settings if isinstance(backend, Described) else {}
        return {"sampler": {"class": type(backend).__name__, **said}, "seed": self.suite.seed}

    def _keep(self, trainer: L.Trainer, record: Record, file: Path) -> None:
        try:
            self.file = record.save(file)
        except OSError as error:
            log.error("the result of the evaluation was not written to %s (%s); its scores are logged", file, error)
            return
        for logger in trainer.loggers:
            if isinstance(logger, MLflowLogger):
                logger.log_file(file, FOLDER)

    def _evaluate_and_log(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Evaluate, and show the scores to loggers and to callbacks that monitor them.

        Not through `pl_module.log`, which repeats a step's value at every later step of the epoch and which the end of
        a run does not allow.
        """
        metrics = self.evaluate(trainer, pl_module)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})

    def _operations(self, method: DiffusionPolicyModule) -> dict[str, Callable[[Sequence[Any]], list[Any]]]:
        """What every rank computes when rank 0 asks."""
        answering = {name: partial(self._answers, method.policy, backend) for name, backend in self.backends.items()}
        return {**answering, LIKELIHOOD: partial(self._losses, method)}

    def _answers(
        self, policy: PolicyModel, backend: GenerationBackend, asked: Sequence[Asked]
    ) -> list[tuple[str, int]]:
        prompts = [encode_prompt(policy.tokenizer, question.messages) for question in asked]
        batch = backend.generate(prompts, [question.seed for question in asked], self.progress)
        return list(zip(completion_texts(policy, batch), batch.completion_mask.sum(1).tolist(), strict=True))

    def _losses(self, method: DiffusionPolicyModule, judged: Sequence[Judged]) -> list[float]:
        losses: list[float] = []
        for start in range(0, len(judged), self.likelihood_batch):
            part = judged[start : start + self.likelihood_batch]
            samples = [Sample(_encoded(method.policy, answer), 0) for answer in part]
            batch = supervised_batch(method.policy, samples, [answer.seed for answer in part])
            losses += negative_elbo(method.policy, batch.to(method.device), self.likelihood_rows).tolist()
        return losses


def _encoded(policy: PolicyModel, judged: Judged) -> Any:
    dialogue = [*judged.messages, {"role": "assistant", "content": judged.answer}]
    encoded = encode_dialogue(policy.tokenizer, dialogue, _NO_LIMIT, context=len(judged.messages))
    if encoded.dropped is not None:
        raise ValueError(f"the given answer {judged.answer!r} cannot be scored: {encoded.dropped}")
    return encoded


def _built(
    backend: Callable[..., GenerationBackend], name: str, benchmark: Benchmark, common: Mapping[str, Any]
) -> GenerationBackend:
    settings = {**benchmark.decoding, **common}
    try:
        return backend(**settings)
    except (TypeError, ValueError) as error:
        said = ", ".join(f"{key}={value}" for key, value in settings.items())
        raise ValueError(f"eval.benchmarks.{name}.decoding with eval.decoding ({said}): {error}") from error


def _method(pl_module: L.LightningModule) -> DiffusionPolicyModule:
    if not isinstance(pl_module, DiffusionPolicyModule):
        raise ValueError(f"benchmarks need a DiffusionPolicyModule, found {type(pl_module).__name__}")
    return pl_module


def _check_whole(trainer: L.Trainer) -> None:
    """Ranks generate at their own pace, so each must hold every weight: gathering them on the way would block."""
    if isinstance(trainer.strategy, (DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy)):
        raise ValueError(
            f"benchmarks need the whole policy on every rank, {type(trainer.strategy).__name__} shards it: train"
            " without them (eval=[]) and score the checkpoint with the command eval, or use trainer=ddp"
        )


def _free_file(folder: Path, step: int) -> Path:
    """A result file of this step that does not exist yet: an evaluation never continues or replaces another."""
    stem, number = f"step-{step:08d}", 1
    while (file := folder / f"{stem}{'' if number == 1 else f'_{number}'}{SUFFIX}").exists():
        number += 1
    return file


@contextmanager
def _as_it_was() -> Iterator[None]:
    """Random states and the process as they were."""
    state = rng_state()
    try:
        with untouched_process():
            yield
    finally:
        set_rng_state(state)
