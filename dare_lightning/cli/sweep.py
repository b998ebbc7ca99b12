"""`--multirun`: plan the jobs, check them all, run them, report."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from omegaconf import DictConfig, open_dict

from dare_lightning.cli.arguments import Arguments
from dare_lightning.cli.checks import check
from dare_lightning.cli.compose import compose, expand_sweep, multirun_with_plugins
from dare_lightning.cli.contents import check_contents
from dare_lightning.cli.errors import UserError
from dare_lightning.cli.jobs import STATUS_FILE, SWEEP_FILE, Job, Runner, Sweep, main_module, report
from dare_lightning.cli.run_folder import new_folder
from dare_lightning.cli.tracked import mlflow_settings, store

_OUTPUT_KEYS = ("run_dir=", "hydra.sweep.dir=")


def sweep(arguments: Arguments) -> int:
    """Run every job of a sweep, or those of an earlier one that did not finish; returns the exit status.

    Raises:
        UserError: a job's configuration is wrong; nothing has been started.
    """
    if arguments.rerun_failed is not None:
        return _rerun(arguments, arguments.rerun_failed)
    command = str(arguments.command)
    words = [word for word in arguments.overrides if not word.startswith(_OUTPUT_KEYS)]
    plugins = any(word.startswith(("hydra/launcher=", "hydra/sweeper=")) for word in words)
    planned = [] if plugins else expand_sweep(words)
    # A plugin decides itself which values come; the first of each must be right at least.
    first = _checked(arguments, planned or [_first_values(words)])
    folder = _folder(arguments, command, first)
    flags = _flags(arguments)
    jobs = tuple(Job(n, tuple(job), folder / str(n)) for n, job in enumerate(planned))
    plan = Sweep(folder, main_module(), command, flags, Path.cwd(), jobs)
    if not plugins:
        plan.save()
    with _parent_run(first, folder) as parent:
        if plugins:
            code = _run_with_plugins(plan, words, arguments.config_dirs)
        else:
            runner = Runner(plan, arguments.jobs, arguments.stop_on_failure)
            runner.run(jobs)
            code = report(plan, runner.interrupted)
        parent["status"] = {0: "FINISHED", 130: "KILLED"}.get(code, "FAILED")
    return code


def _rerun(arguments: Arguments, folder: Path) -> int:
    if not (folder / SWEEP_FILE).is_file():
        raise UserError(f"--rerun-failed {folder}: not the folder of a sweep (it has no {SWEEP_FILE})")
    plan = Sweep.load(folder)
    if arguments.command not in (None, plan.command):
        raise UserError(f"--rerun-failed {folder}: that was a sweep of {plan.command}, not of {arguments.command}")
    if arguments.words:
        raise UserError(f"--rerun-failed takes no overrides (found {arguments.words[0]}): the jobs run as they were")
    jobs = [job for job in plan.jobs if job.status()["status"] != "finished"]
    for job in jobs:
        if job.folder.exists():
            attempt = sum(1 for _ in folder.glob(f"{job.number}.failed*")) + 1
            job.folder.rename(folder / f"{job.number}.failed{attempt}")
    runner = Runner(plan, arguments.jobs, arguments.stop_on_failure)
    runner.run(jobs)
    return report(plan, runner.interrupted)


def _checked(arguments: Arguments, planned: Sequence[Sequence[str]]) -> DictConfig:
    """The first job's configuration, after every job's has been checked."""
    problems: dict[str, None] = {}
    first: DictConfig | None = None
    for job in planned:
        try:
            cfg = compose(str(arguments.command), job, arguments.config_dirs)
            with open_dict(cfg):
                cfg.pop("hydra")
            check(str(arguments.command), cfg, arguments.config_dirs)
            check_contents(cfg)
        except UserError as error:
            problems |= dict.fromkeys(error.problems)
        else:
            first = cfg if first is None else first
    if problems or first is None:
        raise UserError(*problems)
    return first


def _first_values(words: Sequence[str]) -> list[str]:
    """The overrides with the first value of each sweep, without those that speak to Hydra."""
    own = [word for word in words if not word.lstrip("+~").startswith(("hydra/", "hydra."))]
    discrete = [word for word in own if "interval(" not in word]
    return expand_sweep(discrete)[0] if discrete else []


def _folder(arguments: Arguments, command: str, first: DictConfig) -> Path:
    named = [word.split("=", 1)[1].strip("'\"") for word in arguments.overrides if word.startswith(_OUTPUT_KEYS)]
    if not named:
        return new_folder(Path(first.run_root), command, prefix="multirun-")
    folder = Path(named[-1])
    if (folder / SWEEP_FILE).exists():
        raise UserError(f"{folder} holds a sweep already; name another folder, or use --rerun-failed {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _flags(arguments: Arguments) -> tuple[str, ...]:
    flags = [f"--config-dir={folder.resolve()}" for folder in arguments.config_dirs]
    return (*flags, "--traceback") if arguments.traceback else tuple(flags)


@contextlib.contextmanager
def _parent_run(cfg: DictConfig, folder: Path) -> Iterator[dict[str, str]]:
    """A tracked run above those of the jobs, where the jobs are tracked in MLflow; set `status` before it ends."""
    outcome = {"status": "FAILED"}
    settings = mlflow_settings(cfg)
    if settings is None:
        yield outcome
        return
    from dare_lightning.callbacks.tracking_store import (
        PARENT_FILE,
        PARENT_VARIABLE,
        finish_parent_run,
        start_parent_run,
    )

    uri, artifacts = store(settings)
    experiment = settings.get("experiment_name") or "dare"
    parent = start_parent_run(uri, artifacts, experiment, folder.name)
    if parent is None:
        yield outcome
        return
    (folder / PARENT_FILE).write_text(parent, encoding="utf-8")
    os.environ[PARENT_VARIABLE] = parent
    try:
        yield outcome
    finally:
        finish_parent_run(uri, parent, outcome["status"])


def _run_with_plugins(plan: Sweep, words: Sequence[str], config_dirs: Sequence[Path]) -> int:
    """Let a launcher or sweeper plugin of Hydra decide where and when; a job still is a process of its own."""
    task = partial(run_as_task, plan)
    interrupted = False
    error = ""
    try:
        error = multirun_with_plugins(plan.command, words, config_dirs, plan.folder, task)
    except KeyboardInterrupt:
        interrupted = True
    jobs = []
    for status in sorted(plan.folder.glob(f"*/{STATUS_FILE}"), key=lambda file: file.parent.name.zfill(9)):
        overrides = json.loads(status.read_text(encoding="utf-8"))["overrides"]
        own = tuple(word for word in overrides if not word.startswith("run_dir="))
        jobs.append(Job(int(status.parent.name), own, status.parent))
    done = replace(plan, jobs=tuple(jobs))
    done.save()
    code = report(done, interrupted)
    if error and code == 0:
        raise UserError(error)
    return code


class JobFailed(RuntimeError):
    """A job's process ended badly; its folder says why."""


def run_as_task(plan: Sweep, cfg: DictConfig) -> float | None:
    """What a launcher plugin calls, maybe on another machine: run one job in its own process.

    Returns:
        the metric that `optimized_metric` names, from the job's `result.json`; None where it names none.

    Raises:
        JobFailed: the job failed, or did not write the metric.
    """
    from hydra.core.hydra_config import HydraConfig

    settings = HydraConfig.get()
    job = Job(int(settings.job.num), tuple(settings.overrides.task), plan.folder / str(settings.job.num))
    runner = Runner(plan)
    runner.run([job])
    status = job.status()
    if status["status"] != "finished":
        raise JobFailed(f"job {job.number} ({job.label}): {status['error']}")
    metric = cfg.get("optimized_metric")
    if metric is None:
        return None
    file = job.folder / "result.json"
    result = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if metric not in result:
        raise JobFailed(f"optimized_metric={metric} is not in {file}; it has {', '.join(result) or 'nothing'}")
    if str(result[metric]).startswith("FAILED"):
        raise JobFailed(f"optimized_metric={metric}: {result[metric]}")
    return float(result[metric])
