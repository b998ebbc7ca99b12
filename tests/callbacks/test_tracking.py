"""Tracking never stops a run and never changes what was recorded: real MLflow in a local database."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dare_lightning.callbacks.artifacts import log_figure, log_table, log_text
from dare_lightning.callbacks.samples import log_samples
from dare_lightning.callbacks.tracking import UNSENT_FILE, MLflowLogger, find_run_id
from dare_lightning.callbacks.tracking_store import (
    PARENT_FILE,
    PARENT_VARIABLE,
    finish_parent_run,
    local_store,
    start_parent_run,
)
from tests.callbacks.fake_server import TrackingServer
from tests.callbacks.toy import Toy, loader, trainer
from tests.processes import Process
from tests.shared import ROOT

Fit = Callable[..., MLflowLogger]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One store for the whole file: creating a database takes seconds."""
    return tmp_path_factory.mktemp("work") / "runs"


@pytest.fixture
def fit(root: Path, request: pytest.FixtureRequest) -> Fit:
    """Train the toy in this test's run folder, tracked."""

    def run(on_step: Callable[[int], None] = lambda step: None, config: Any = None, **settings: Any) -> MLflowLogger:
        folder = root / request.node.name
        logger = MLflowLogger(**({"save_dir": root, "run_dir": folder} | settings))
        if config is not None:
            logger.log_config(config)
        trainer(folder, logger=logger).fit(Toy(on_step), loader(), loader())
        return logger

    return run


@pytest.fixture
def kept_signals() -> Iterator[None]:
    """Lightning ignores Ctrl-C from the first one on."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def server() -> Iterator[TrackingServer]:
    server = TrackingServer()
    yield server
    server.stop()


def stored(logger: MLflowLogger) -> Any:
    assert logger.flush()
    return logger.client.get_run(logger.run_id)


def artifact(logger: MLflowLogger, path: str) -> str:
    return Path(logger.client.download_artifacts(logger.run_id, path)).read_text()


def history(logger: MLflowLogger, name: str) -> list[tuple[int, float]]:
    return [(m.step, m.value) for m in logger.client.get_metric_history(logger.run_id, name)]


def test_without_settings_a_run_is_tracked_in_a_local_database(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root.parent)
    logger = MLflowLogger()
    trainer(root, logger=logger).fit(Toy(), loader(), loader())
    run = stored(logger)
    assert run.info.status == "FINISHED"
    assert [step for step, _ in history(logger, "train/loss")] == list(range(8))
    assert (root / "mlflow.db").is_file()
    assert (root / "mlflow_run_id.txt").read_text().strip() == logger.run_id
    assert run.info.artifact_uri.startswith(str(root / "mlartifacts"))


def test_training_does_not_wait_for_the_store(fit: Fit, server: TrackingServer) -> None:
    server.may_answer.clear()
    fit(lambda step: server.may_answer.set() if step == 7 else None, tracking_uri=server.address).close()
    assert server.status == "FINISHED"


def test_a_validation_before_training_does_not_wait_either(root: Path, server: TrackingServer) -> None:
    server.may_answer.clear()
    logger = MLflowLogger(save_dir=root, run_dir=root / "validated", tracking_uri=server.address)
    runner = trainer(root / "validated", logger=logger)
    runner.validate(Toy(), loader(), verbose=False)
    statuses = server.statuses
    runner.fit(Toy(lambda step: server.may_answer.set() if step == 7 else None), loader(), loader())
    logger.close()
    assert statuses == ["FINISHED", "RUNNING", "FINISHED"]


def test_a_run_says_where_it_comes_from(fit: Fit) -> None:
    run = stored(fit(tags={"team": "sudoku"}))
    assert {"command", "overrides", "run_dir", "team"} <= set(run.data.tags)
    assert len(run.data.tags["mlflow.source.git.commit"]) == 40 or not (ROOT / ".git").exists()
    assert run.data.metrics["system/process_memory_usage_megabytes"] > 10


def test_a_large_configuration_can_be_read_back_unshortened(fit: Fit) -> None:
    config = {"data": {f"p{n}": n for n in range(350)}, "prompt": "x" * 7000, "a@b,c": [1, {"d": None}]}
    logger = fit(config=config)
    run = stored(logger)
    assert yaml.safe_load(artifact(logger, "config.yaml")) == config
    assert run.data.params["data/p349"] == "349"
    assert len(run.data.params) == 353
    assert run.data.params["a_x40_b_x2c_c/1/d"] == "None"
    assert run.data.params["prompt"].endswith("whole in config.yaml]")


def test_a_resume_keeps_the_old_value_and_records_the_new_one_beside_it(fit: Fit) -> None:
    first = fit(config={"learning_rate": 0.1, "seed": 1})
    first.close()
    second = fit(config={"learning_rate": 0.2, "seed": 1})
    second.close()
    third = fit(config={"learning_rate": 0.1, "seed": 1})
    third.close()
    assert first.run_id == second.run_id == third.run_id == find_run_id(third.run_dir / "checkpoints" / "x.ckpt")
    run = stored(third)
    assert run.info.status == "FINISHED"
    assert run.data.params == {
        "learning_rate": "0.1",
        "seed": "1",
        "learning_rate:v2": "0.2",
        "learning_rate:v3": "0.1",
    }
    assert yaml.safe_load(artifact(third, "config.yaml"))["learning_rate"] == 0.1
    assert yaml.safe_load(artifact(third, "config.v2.yaml"))["learning_rate"] == 0.2
    assert run.data.tags["resumes"] == "2"


def test_infinite_and_missing_values_are_visible_as_such(fit: Fit) -> None:
    logger = fit()
    for step, value in enumerate([1.0, math.inf, -math.inf, math.nan, math.nan]):
        logger.log_metrics({"reward/gsm8k@1": value}, step)
    run = stored(logger)
    values = [value for _, value in sorted(history(logger, "reward/gsm8k_x40_1"))]
    assert values[0] == 1.0
    assert all(math.isnan(value) for value in values[1:])
    assert (
        run.data.tags["nonfinite:reward/gsm8k_x40_1"] == "inf at step 1 first; 1 times -inf, 1 times inf, 2 times nan"
    )


def stop_at(step: int, error: BaseException) -> Callable[[int], None]:
    def on_step(now: int) -> None:
        if now == step:
            raise error

    return on_step


def only_run(root: Path, folder: str) -> Any:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(local_store(root)[0])
    return client.get_run((root / folder / "mlflow_run_id.txt").read_text().strip())


def test_an_exception_leaves_a_failed_run(fit: Fit, root: Path, request: pytest.FixtureRequest) -> None:
    with pytest.raises(ValueError, match="broken"):
        fit(stop_at(3, ValueError("broken")))
    run = only_run(root, request.node.name)
    assert run.info.status == "FAILED"
    assert run.data.tags["error"] == "ValueError: broken"


@pytest.mark.usefixtures("kept_signals")
def test_ctrl_c_leaves_a_killed_run(fit: Fit, root: Path, request: pytest.FixtureRequest) -> None:
    with pytest.raises(SystemExit):
        fit(stop_at(3, KeyboardInterrupt()))
    assert only_run(root, request.node.name).info.status == "KILLED"


def test_sigterm_leaves_a_killed_run(fit: Fit, root: Path, request: pytest.FixtureRequest) -> None:
    def terminate(step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        fit(terminate)
    assert only_run(root, request.node.name).info.status == "KILLED"


def test_a_server_that_goes_away_and_comes_back_gets_every_metric(fit: Fit, server: TrackingServer) -> None:
    def flicker(step: int) -> None:
        if step == 3:
            server.answers = False
        if step == 6:
            # The outage must have been noticed, or nothing was tested.
            assert server.refused.wait(60)
            server.answers = True

    fit(flicker, tracking_uri=server.address, system_seconds=0).close()
    assert server.status == "FINISHED"
    losses = [metric for metric in server.metrics if metric["key"] == "train/loss"]
    assert [metric["step"] for metric in losses] == list(range(8))


def test_a_server_that_stays_away_is_reported_once_and_a_resume_sends_the_rest(
    fit: Fit, server: TrackingServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.answers = False
    with caplog.at_level(logging.WARNING):
        logger = fit(tracking_uri=server.address, system_seconds=0, patience=0.5)
        logger.close()
        logger.close()
    reports = [line for line in caplog.messages if "were not stored" in line]
    assert len(reports) == 1
    kept = [json.loads(line) for line in (logger.run_dir / UNSENT_FILE).read_text().splitlines()]
    assert [point["step"] for point in kept if point["name"] == "train/loss"] == list(range(8))
    server.answers = True
    fit(tracking_uri=server.address, system_seconds=0).close()
    losses = [metric["step"] for metric in server.metrics if metric["key"] == "train/loss"]
    # Each point arrives at least once: a batch that the server took but answered too late is sent again.
    assert all(losses.count(step) >= 2 for step in range(8))
    assert set(losses) == set(range(8))
    assert not (logger.run_dir / UNSENT_FILE).exists()


def test_a_locked_database_does_not_stop_training(fit: Fit, root: Path) -> None:
    start_parent_run(*local_store(root), "dare", "so that there is a database")
    blocker = sqlite3.connect(root / "mlflow.db", timeout=60, isolation_level=None)
    steps: list[int] = []

    def lock(step: int) -> None:
        steps.append(step)
        if step == 2:
            blocker.execute("BEGIN EXCLUSIVE")
        if step == 7:
            blocker.execute("COMMIT")

    logger = fit(lock)
    logger.close()
    blocker.close()
    assert steps == list(range(8))
    assert [step for step, _ in history(logger, "train/loss")] == list(range(8))


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two processes that start together where there is no database yet; one dies before it trains."""
    folder = tmp_path_factory.mktemp("together")
    started = []
    for name in ("ends", "dies"):
        with (folder / f"{name}.txt").open("w") as output:
            started.append(Process("tests.callbacks.tracking_job", str(folder), name, cwd=folder, output=output))
    statuses = [job.wait() for job in started]
    assert statuses == [0, 1], "".join((folder / f"{name}.txt").read_text() for name in ("ends", "dies"))
    return folder


@pytest.mark.slow
def test_jobs_that_start_together_share_one_new_database(jobs: Path) -> None:
    for name in ("ends", "dies"):
        run = only_run(jobs, name)
        assert (run.data.metrics["loss"], run.data.params) == (1.0, {"job": name})
    assert only_run(jobs, "ends").info.status == "FINISHED"


@pytest.mark.slow
def test_a_process_that_dies_before_training_leaves_a_failed_run(jobs: Path) -> None:
    assert only_run(jobs, "dies").info.status == "FAILED"


@pytest.mark.parametrize("way", ["environment", "file"])
def test_a_job_hangs_under_its_sweep(root: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    parent = start_parent_run(*local_store(root), "dare", "sweep")
    assert parent is not None
    sweep = root / f"sweep_{way}"
    sweep.mkdir(parents=True)
    if way == "file":
        (sweep / PARENT_FILE).write_text(parent)
    else:
        monkeypatch.setenv(PARENT_VARIABLE, parent)
    logger = MLflowLogger(save_dir=root, run_dir=sweep / "0")
    logger.log_metrics({"loss": 1.0}, 0)
    logger.finalize("success")
    logger.close()
    finish_parent_run(local_store(root)[0], parent)
    found = logger.client.search_runs(
        [stored(logger).info.experiment_id], filter_string=f"tags.`mlflow.parentRunId` = '{parent}'"
    )
    assert [run.info.run_id for run in found] == [logger.run_id]
    assert logger.client.get_run(parent).info.status == "FINISHED"


def test_a_sweep_without_a_store_has_no_parent_and_goes_on(server: TrackingServer) -> None:
    server.answers = False
    assert start_parent_run(server.address, None, "dare", "sweep") is None


def test_tables_figures_and_texts_lie_in_the_run_folder_and_in_the_store(fit: Fit) -> None:
    from matplotlib.figure import Figure

    logger = fit()
    runner = trainer(logger.run_dir, logger=logger)
    rows = [{"prompt": "1+1", "reward": 1.0, "where": Path("a")}, {"prompt": "é", "answer": "2"}]
    table = log_samples(runner, "val", 4, rows)
    assert table == logger.run_dir / "samples/val-00000004.jsonl"
    assert json.loads(table.read_text().splitlines()[0]) == {"step": 4, "prompt": "1+1", "reward": 1.0, "where": "a"}
    log_figure(runner, Figure(), "curve.png")
    log_text(runner, "hello", "notes/hello.txt")
    run = stored(logger)
    assert artifact(logger, "notes/hello.txt") == "hello"
    assert artifact(logger, "samples/val-00000004.jsonl") == table.read_text()
    shown = json.loads(artifact(logger, "samples/val-00000004.json"))
    assert shown["columns"] == ["step", "prompt", "reward", "where", "answer"]
    assert shown["data"][1] == [4, "é", None, None, "2"]
    assert json.loads(run.data.tags["mlflow.loggedArtifacts"])[0]["path"] == "samples/val-00000004.json"
    assert "curve.png" in [item.path for item in logger.client.list_artifacts(logger.run_id)]


def test_without_tracking_the_files_are_written_all_the_same(tmp_path: Path) -> None:
    table = log_table(trainer(tmp_path), [{"a": 1}], "t/x.jsonl")
    assert table is not None
    assert table.read_text() == '{"a": 1}\n'


def test_a_file_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "taken").write_text("")
    assert log_text(trainer(tmp_path), "x", "taken/x.txt") is None
    assert "cannot write" in caplog.text
