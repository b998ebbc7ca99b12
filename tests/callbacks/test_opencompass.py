"""Benchmarks on a policy that trains: OpenCompass itself, real items, tiny policies."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from dare_lightning.callbacks.opencompass import OpenCompassEval
from dare_lightning.callbacks.rollout import completion_texts
from dare_lightning.cli import app
from dare_lightning.datamodules.chat import encode_prompt
from dare_lightning.evaluation.benchmark import Benchmark
from dare_lightning.evaluation.benchmarks.arc_c import ARCChallenge
from dare_lightning.evaluation.benchmarks.countdown import CountdownBenchmark, CountdownTask
from dare_lightning.evaluation.benchmarks.gsm8k import GSM8K
from dare_lightning.evaluation.benchmarks.humaneval import HumanEval
from dare_lightning.evaluation.benchmarks.mbpp import MBPP
from dare_lightning.evaluation.benchmarks.mmlu import MMLU
from dare_lightning.evaluation.benchmarks.sudoku import SudokuBenchmark, SudokuTask
from dare_lightning.evaluation.results import Record, find_record
from dare_lightning.families.tiny import new_tiny_llada
from dare_lightning.generation.builtin import BuiltinBackend
from dare_lightning.rewards.sudoku import SudokuReward
from tests.equalities.conftest import Online, trainer, weights
from tests.equalities.conftest import Record as Logged
from tests.evaluation.benchmark_files import SUBJECTS, arc, gsm8k, humaneval, mbpp, mmlu

pytest.importorskip("opencompass", reason="needs OpenCompass: pip install 'dare-lightning[eval]'")

SHORT = {"max_new_tokens": 17, "steps": 2, "block_length": 17, "temperature": 1.0}


def sudoku(**settings: Any) -> SudokuBenchmark:
    return SudokuBenchmark(SudokuTask(form="compact", empty=2), count=6, **settings)


def ranks_benchmarks(folder: Path) -> OpenCompassEval:
    """What the ranks evaluate together."""
    return callback(
        {"sudoku": sudoku(limit=5), "arc_c": ARCChallenge(mode="likelihood", limit=3)}, folder, at_start=True
    )


def callback(benchmarks: Mapping[str, Benchmark], folder: Path, **settings: Any) -> OpenCompassEval:
    defaults = {"decoding": SHORT, "data_dir": str(folder), "likelihood_rows": 2, "limit": 2}
    return OpenCompassEval(benchmarks, BuiltinBackend, **(defaults | settings))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    arc(folder / "data/ARC/ARC-c")
    for write in (gsm8k, humaneval, mbpp, mmlu):
        write(folder / "data" / write.__name__)
    return folder


class Draws(L.Callback):
    """What the global generators would draw next, and the state of the process, after each step and epoch."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.alarm = signal.getsignal(signal.SIGALRM)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *rest: Any) -> None:
        self.seen.append(
            {
                "torch": torch.get_rng_state().tolist(),
                "python": random.getstate(),
                "numpy": np.random.get_state()[1].tolist(),  # type: ignore[union-attr,index]
                "alarm": signal.getsignal(signal.SIGALRM) is self.alarm,
                "path": list(sys.path),
                "environment": {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
                "folder": os.getcwd(),
                "modes": [module.training for module in pl_module.modules()],
            }
        )

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.on_train_batch_end(trainer, pl_module)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Draws]:
    """A run without benchmarks."""
    run, draws = Online(), Draws()
    L.seed_everything(1, verbose=False)
    run.fit(draws, default_root_dir=tmp_path_factory.mktemp("plain"))
    return weights(run), draws


@pytest.fixture(scope="module")
def trained(
    data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Online, OpenCompassEval, Logged, Draws, Path]:
    """Two rollouts with benchmarks after each."""
    folder = tmp_path_factory.mktemp("trained")
    benchmarks = {
        "gsm8k": GSM8K(),
        "humaneval": HumanEval(limit=1),
        "mbpp": MBPP(limit=1),
        "mmlu": MMLU(subsets=SUBJECTS[:1], limit=1),
        "countdown": CountdownBenchmark(CountdownTask(form="compact"), count=2),
        "sudoku": sudoku(limit=6),
        "arc_c": ARCChallenge(mode="likelihood"),
    }
    run, logged, draws = Online(), Logged(), Draws()
    evaluation = callback(benchmarks, data, every=1)
    best = ModelCheckpoint(folder / "best", monitor="eval/arc_c", mode="max", save_top_k=-1)
    stopping = EarlyStopping("eval/sudoku", mode="max", patience=9)
    L.seed_everything(1, verbose=False)
    run.fit(evaluation, draws, best, stopping, logger=logged, enable_checkpointing=True, default_root_dir=folder)
    return run, evaluation, logged, draws, folder


def test_benchmarks_are_logged_after_every_rollout(trained: Any) -> None:
    _, _, logged, _, folder = trained
    for name in ("gsm8k", "humaneval", "mbpp", "mmlu", "countdown", "sudoku", "arc_c"):
        values = logged.series(f"eval/{name}")
        assert len(values) == 2, name
        assert all(0 <= value <= 100 for value in values)
    assert sorted(path.name for path in (folder / "evaluations").glob("*.json")) == [
        "step-00000004.eval.json",
        "step-00000008.eval.json",
    ]
    assert len(list((folder / "best").glob("*.ckpt"))) == 2  # one for each evaluation that was monitored


def test_training_goes_on_as_if_nothing_had_happened(trained: Any, plain: tuple[Any, Draws]) -> None:
    run, _, _, draws, _ = trained
    torch.testing.assert_close(weights(run), plain[0], rtol=0, atol=0)
    for now, then in zip(draws.seen, plain[1].seen, strict=True):
        assert [name for name in now if now[name] != then[name]] == []


def test_the_record_has_everything_that_a_score_depends_on(trained: Any) -> None:
    run, evaluation, _, _, folder = trained
    record = Record.load(find_record(folder))
    assert (record.step, record.rollout) == (8, 2)
    assert record == evaluation.record
    assert {"opencompass", "torch", "python"} <= record.versions.keys()
    assert record.policy["class"] == "LLaDA"
    assert record.policy["adapter"] is None
    assert len(record.policy["chat_template_sha256"]) == 64
    result = record.benchmarks["gsm8k"]
    assert result.settings["limit"] == 2
    assert result.settings["sampler"] == {"class": "BuiltinBackend", **BuiltinBackend(**SHORT).settings}
    assert record.benchmarks["arc_c"].settings["likelihood_rows"] == 2
    assert [file["file"] for file in result.data] == ["data/gsm8k/test.jsonl", "data/gsm8k/train.jsonl"]
    assert len(result.items) == 2
    assert (result.settings["shots"], record.benchmarks["mbpp"].settings["shots"]) == (4, 3)
    spent, tokens = result.metrics["seconds/generate"], sum(entry.tokens or 0 for entry in result.items)
    assert result.metrics["tokens_per_second"] == pytest.approx(tokens / spent, rel=0.05)
    assert all(entry.prompt_sha256 and entry.gold and entry.tokens for entry in result.items)
    assert set(record.benchmarks["arc_c"].items[0].losses or {}) == set("ABCD")


def test_benchmark_and_reward_judge_a_policys_answers_alike(trained: Any, tmp_path: Path) -> None:
    """The policy's answers to the same prompts with the same seeds, scored as training scores them."""
    run, evaluation, _, _, _ = trained
    result = evaluation.record.benchmarks["sudoku"]
    examples = sudoku().task.examples("heldout", 6, 42)
    verdicts = SudokuReward(form="compact")([entry.prediction for entry in result.items], examples)
    assert [entry.right for entry in result.items] == [verdict.status == "right" for verdict in verdicts]
    assert [entry.answer for entry in result.items] == [verdict.answer for verdict in verdicts]
    # And they are what the sampler says outside of OpenCompass.
    backend = BuiltinBackend(**SHORT)
    backend.update_weights(run.policy, 0)
    asked: list[int] = []
    answers = evaluation._answers

    def seeing(policy: Any, backend: Any, questions: Any) -> Any:
        asked.extend(question.seed for question in questions)
        return answers(policy, backend, questions)

    fresh = callback({"sudoku": sudoku(limit=6)}, tmp_path, at_start=True)
    fresh._answers = seeing  # type: ignore[method-assign]
    trainer([fresh], default_root_dir=tmp_path).validate(run.method, datamodule=run.data, verbose=False)
    prompts = [encode_prompt(run.policy.tokenizer, example.messages) for example in examples]
    assert completion_texts(run.policy, backend.generate(prompts, asked)) == [
        entry.prediction for entry in result.items
    ]


def test_evaluations_by_steps_and_at_the_end(plain: tuple[Any, Draws], data: Path, tmp_path: Path) -> None:
    run, logged = Online(), Logged()
    evaluation = callback({"arc_c": ARCChallenge()}, data, every=3, unit="steps")
    L.seed_everything(1, verbose=False)
    run.fit(evaluation, logger=logged, default_root_dir=tmp_path)
    steps = [Record.load(file).step for file in sorted((tmp_path / "evaluations").glob("*.json"))]
    assert steps == [3, 6, 8]
    assert len(logged.series("eval/arc_c")) == 3
    torch.testing.assert_close(weights(run), plain[0], rtol=0, atol=0)


@pytest.mark.parametrize("on_error", ["nan", "raise"])
def test_a_failure_is_no_number_or_the_end(on_error: str, data: Path, tmp_path: Path) -> None:
    run = Online()
    benchmarks = {"gsm8k": GSM8K(config="gsm8k/missing"), "arc_c": ARCChallenge()}
    runner = trainer([callback(benchmarks, data, at_start=True, on_error=on_error)], default_root_dir=tmp_path)
    if on_error == "raise":
        with pytest.raises(RuntimeError, match="1 of 2 benchmarks FAILED: gsm8k: FileNotFoundError: OpenCompass"):
            runner.validate(run.method, datamodule=run.data, verbose=False)
    else:
        runner.validate(run.method, datamodule=run.data, verbose=False)
        assert runner.callback_metrics["eval/gsm8k"].isnan()
        assert runner.callback_metrics["eval/arc_c"].isfinite()
    saved = Record.load(find_record(tmp_path)).benchmarks["gsm8k"]
    assert (saved.status, saved.score) == ("FAILED", None)
    assert "no configuration gsm8k/missing" in str(saved.reason)


def test_what_cannot_work_is_refused_before_anything_is_trained(data: Path, tmp_path: Path) -> None:
    run = Online()
    with pytest.raises(FileNotFoundError, match="no data/gsm8k/test.jsonl and 1 more files in"):
        run.fit(callback({"gsm8k": GSM8K()}, tmp_path))
    evaluation = partial(callback, {"arc_c": ARCChallenge()}, data)
    with pytest.raises(ValueError, match="monitors eval/gsm8k, which is not evaluated; there is eval/arc_c"):
        run.fit(evaluation(every=1), EarlyStopping("eval/gsm8k"))
    with pytest.raises(ValueError, match="set eval.every to 1 or fewer"):
        run.fit(evaluation(every=2), EarlyStopping("eval/arc_c"))
    with pytest.raises(ValueError, match=r"benchmarks.arc_c.decoding .*steps=3.*not a multiple"):
        evaluation(decoding={"max_new_tokens": 8, "block_length": 4, "steps": 3})
    with pytest.raises(ValueError, match="choose one of nan, raise"):
        evaluation(on_error="ignore")
    sharding = L.Trainer(accelerator="cpu", strategy=ModelParallelStrategy(), logger=False, enable_checkpointing=False)
    with pytest.raises(ValueError, match="the whole policy on every rank, ModelParallelStrategy shards it"):
        evaluation().setup(sharding, run.method, "fit")


# The command line.

EVAL = [
    *("eval=[sudoku,arc_c]", "eval.limit=3", "eval.decoding={max_new_tokens: 17, block_length: 17, steps: 2}"),
    *("eval.benchmarks.arc_c.mode=likelihood", "eval.likelihood_rows=2", "eval.benchmarks.sudoku.task.form=compact"),
]
FIT = [
    *("fit", "model=llada", "model.path=base", "method=d1", "peft=lora", "method.optimizer.lr=0.01", "logger=none"),
    *("trainer=cpu", "trainer.max_epochs=1", "data=sudoku_compact", "data.train_prompts=8", "data.val_prompts=2"),
    *("data.group_size=4", "data.prompts_per_rollout=2", "data.micro_batch=4", "callbacks=[checkpoint]"),
    *("validate_first=false", *EVAL),
]


class Commands:
    """Runs commands in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, *words: str, status: int = 0) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            patch.delenv("DARE_RUN_DIR", raising=False)
            assert app.main(words) == status

    def evaluated(self, name: str, *words: str) -> Record:
        """The record of an evaluation."""
        self.run("eval", "trainer=cpu", f"run_dir={name}", *words)
        return self.record(name)

    def record(self, name: str) -> Record:
        return Record.load(find_record(self.folder / name))


@pytest.fixture(scope="module")
def commands(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Commands:
    """A folder with a base model, and a run with an adapter that evaluated at its end."""
    commands = Commands(tmp_path_factory.mktemp("commands"))
    new_tiny_llada().save_pretrained(commands.folder / "base")
    commands.run(*FIT, f"eval.data_dir={data}", "run_dir=run")
    return commands


def answers_of(record: Record) -> dict[str, list[Any]]:
    assert [result.status for result in record.benchmarks.values()] == ["DONE", "DONE"]
    return {
        name: [(item.id, item.prediction, item.right, item.prompt_sha256) for item in result.items]
        for name, result in record.benchmarks.items()
    }


def test_every_form_of_a_policy_scores_the_same_item_by_item(commands: Commands, data: Path) -> None:
    measured = commands.record("run")
    checkpoint = commands.evaluated("checkpoint", "ckpt_path=run/checkpoints")
    assert answers_of(checkpoint) == answers_of(measured)
    assert checkpoint.policy == measured.policy
    assert checkpoint.policy["adapter"] not in (None, checkpoint.policy["weights"])
    losses = [[item.losses for item in record.benchmarks["arc_c"].items] for record in (checkpoint, measured)]
    assert losses[0] == losses[1]
    commands.run("export", "ckpt_path=run/checkpoints", "output_folder=merged", "run_dir=export")
    for folder in ("run/model", "merged"):  # base and adapter, and both in one
        same = commands.evaluated(
            f"scores_of_{Path(folder).name}", "model=folder", f"model.path={folder}", *EVAL, f"eval.data_dir={data}"
        )
        assert answers_of(same) == answers_of(measured)
    base = commands.evaluated("base_scores", "model=folder", "model.path=base", *EVAL, f"eval.data_dir={data}")
    assert answers_of(base) != answers_of(measured)


def test_an_evaluation_is_run_again_from_its_file_alone(
    commands: Commands, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = commands.evaluated("again", "rerun_path=run")
    assert answers_of(again) == answers_of(commands.record("run"))
    assert "+0.00" in capsys.readouterr().out
    commands.run("eval", "rerun_path=run", "ckpt_path=null", "trainer=cpu", "run_dir=other", status=2)
    assert "was measured on other weights" in capsys.readouterr().err


def test_results_are_compared_question_by_question(commands: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    record = commands.record("run")
    items = record.benchmarks["arc_c"].items
    items[0] = replace(items[0], right=not items[0].right)
    record.benchmarks["elsewhere"] = record.benchmarks.pop("sudoku")
    record.save(commands.folder / "flipped.eval.json")
    commands.run("eval", "--compare", "run", "flipped.eval.json")
    said = capsys.readouterr().out
    assert {"sudoku: only in a", "elsewhere: only in b"} <= set(said.splitlines())
    assert f"{items[0].id}\n" in said.partition("arc_c, ")[2]


def test_a_failed_benchmark_fails_the_command_and_says_so(
    commands: Commands, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["model=folder", "model.path=base", "eval=gsm8k", "eval.benchmarks.gsm8k.config=none", "trainer=cpu"]
    commands.run("eval", *words, f"eval.data_dir={data}", "run_dir=failed", status=1)
    assert "FAILED" in capsys.readouterr().out
    written = json.loads((commands.folder / "failed" / "result.json").read_text())["eval/gsm8k"]
    assert written.startswith("FAILED: FileNotFoundError: OpenCompass")


def evaluate_as(environment: Mapping[str, str], data: Path, folder: Path) -> None:
    """One of two ranks: evaluates, once more with an operation that fails on rank 1, and leaves what it was told."""
    os.environ.update(environment)
    os.chdir(folder)
    run, evaluation = Online(), ranks_benchmarks(data)
    strategy = DDPStrategy(process_group_backend="gloo")
    runner = trainer([evaluation], devices=2, strategy=strategy, default_root_dir=folder)
    runner.validate(run.method, datamodule=run.data, verbose=False)
    found = {name: float(value) for name, value in runner.callback_metrics.items() if name.startswith("eval/")}
    rank = environment["RANK"]

    def failing(asked: Any) -> list[Any]:
        if rank == "1":
            raise ValueError("only here")
        return [("1", 1) for _ in asked]

    assert evaluation._service is not None
    evaluation._service.operations["sudoku"] = failing
    evaluation.on_error, evaluation.suite.benchmarks = "raise", {"sudoku": evaluation.suite.benchmarks["sudoku"]}
    with pytest.raises(RuntimeError) as failure:
        evaluation.evaluate(runner, run.method)
    (folder / f"rank{rank}.json").write_text(json.dumps({"metrics": found, "failure": str(failure.value)}))


@pytest.mark.slow
def test_two_ranks_share_the_questions_and_find_the_same(data: Path, tmp_path: Path) -> None:
    shared = {"WORLD_SIZE": "2", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "test"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_network_port())}
    # Copies of this process, which has imported OpenCompass already.
    fork = multiprocessing.get_context("fork")
    environments = [shared | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    ranks = [fork.Process(target=evaluate_as, args=(own, data, tmp_path)) for own in environments]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
        process.kill()
    assert [process.exitcode for process in ranks] == [0, 0]
    two = Record.load(tmp_path / "evaluations" / "step-00000000.eval.json")
    run, alone = Online(), tmp_path / "alone"
    trainer([ranks_benchmarks(data)], default_root_dir=alone).validate(run.method, datamodule=run.data, verbose=False)
    one = Record.load(find_record(alone))
    assert answers_of(two) == answers_of(one)
    assert len(two.benchmarks["sudoku"].items) == 5  # not a multiple of the ranks
    # Every rank was told the same, and knows what failed on one of them.
    told = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in "01"]
    assert told[0]["metrics"] == told[1]["metrics"]
    assert told[0]["failure"] == told[1]["failure"]
    assert "rank 1: ValueError: only here" in told[0]["failure"]
