"""The commands on a run that was really trained, for one rollout."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from safetensors.torch import load_file

from dare_lightning.cli import app
from dare_lightning.cli.inherit import compose_for_checkpoint
from tests import processes

FIT = [
    *("model=new_tiny_llada", "method=d1", "peft=lora", "logger=csv", "seed=5", "trainer=cpu", "budget.max_passes=1"),
    *("trainer.check_val_every_n_epoch=5", "data.train_prompts=8", "data.val_prompts=4", "data.group_size=4"),
    *("data.prompts_per_rollout=2", "data.micro_batch=4"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which `fit` has run as a process."""
    folder = tmp_path_factory.mktemp("trained")
    done = processes.run("dare_lightning", "fit", *FIT, "run_dir=first=run 1", cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "output.txt").write_text(done.stdout)
    (folder / "errors.txt").write_text(done.stderr)
    return folder


@pytest.fixture
def checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The newest checkpoint, as a path from the folder the test runs in."""
    monkeypatch.chdir(folder)
    monkeypatch.delenv("DARE_RUN_DIR", raising=False)
    return str(sorted(Path("first=run 1/checkpoints").glob("*.ckpt"))[-1])


def test_a_checkpoint_brings_its_runs_configuration(checkpoint: str) -> None:
    cfg = compose_for_checkpoint("eval", [f"ckpt_path='{checkpoint}'", "completion.steps=2"])
    assert cfg.method._target_.endswith("D1")
    assert cfg.peft.rank == 32
    assert cfg.seed == 5
    assert cfg.rollout.backend.steps == 2
    assert not compose_for_checkpoint("eval", [f"ckpt_path='{checkpoint}'", "peft=null"]).get("peft")


def test_a_run_that_its_budget_ends_says_so_and_ends_as_any_other(checkpoint: str, folder: Path) -> None:
    result = json.loads((folder / "first=run 1" / "result.json").read_text())
    made = int(result["cost/passes"])
    assert f"budget.max_passes=1 ({made} made) is spent: training ends here" in (folder / "errors.txt").read_text()
    assert "Done: 1 rollouts" in (folder / "output.txt").read_text()
    assert result["cost/rollout_passes"] + result["cost/training_passes"] == made > 0
    assert (folder / "first=run 1" / "model" / "adapter_config.json").is_file()


def test_eval_scores_the_held_out_prompts(checkpoint: str, folder: Path) -> None:
    assert app.main(["eval", f"ckpt_path={checkpoint}", "trainer=cpu", "run_dir=scores"]) == 0
    trained = json.loads((folder / "first=run 1" / "result.json").read_text())
    scores = json.loads((folder / "scores" / "result.json").read_text())
    assert scores["val/reward"] == pytest.approx(trained["val/reward"])


def test_the_commands_that_a_run_ends_with_can_be_pasted(
    checkpoint: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (folder / "output.txt").read_text().partition("Next:\n")[2].splitlines()
    commands = [shlex.split(line) for line in lines]
    assert [words[3] for words in commands] == ["generate", "eval", "export", "fit"]  # no MLflow: logger=csv
    assert app.main([*commands[0][3:], "count=1"]) == 0
    assert capsys.readouterr().out.count("forward passes") == 1


def test_generate_prints_json(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["generate", f"ckpt_path={checkpoint}", "json=true", "prompt=0123012301230123"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert "0123012301230123" in record["prompt"]
    assert len(record["completion_ids"]) == len(record["commit_steps"])


def test_generate_grows_a_whole_tree_for_each_prompt(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["rollout=tree", "rollout.backend.tree=[2,2]", "rollout.backend.steps=4", "count=2", "json=true"]
    assert app.main(["generate", f"ckpt_path={checkpoint}", *words]) == 0
    records = json.loads(capsys.readouterr().out)
    assert len(records) == 8
    assert len({record["prompt"] for record in records[:4]}) == 1
    assert records[0]["prompt"] != records[4]["prompt"]


def test_generate_says_in_which_order_tokens_were_written(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["generate", f"ckpt_path={checkpoint}", "count=2"]) == 0
    assert capsys.readouterr().out.count("forward passes") == 2


def test_prompts_are_read_from_a_file(checkpoint: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "asked.jsonl").write_text('{"prompt": "12"}\n{"messages": [{"role": "user", "content": "34"}]}\n')
    assert app.main(["generate", f"ckpt_path={checkpoint}", "json=true", "prompts_path=asked.jsonl"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2


def test_export_writes_the_merged_model_or_the_adapter(checkpoint: str, folder: Path) -> None:
    assert app.main(["export", f"ckpt_path={checkpoint}", "output_folder=merged"]) == 0
    assert not any("lora" in name for name in load_file(folder / "merged" / "model.safetensors"))
    assert app.main(["export", f"ckpt_path={checkpoint}", "output_folder=adapter", "adapter=keep"]) == 0
    assert (folder / "adapter" / "adapter_model.safetensors").exists()


def test_export_into_a_full_folder_asks_for_the_flag(
    checkpoint: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "full").mkdir()
    (folder / "full" / "notes.txt").touch()
    assert app.main(["export", f"ckpt_path={checkpoint}", "output_folder=full"]) == 2
    assert "overwrite=true" in capsys.readouterr().err
    assert app.main(["export", f"ckpt_path={checkpoint}", "output_folder=full", "overwrite=true"]) == 0
    assert (folder / "full" / "notes.txt").exists()


@pytest.mark.parametrize(
    ("data", "expected"), [("sudoku_compact", "ground truth"), ("sudoku_sft", "17 supervised"), ("countdown", "20")]
)
def test_preview_shows_samples(
    data: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DARE_RUN_DIR", raising=False)
    words = ["data.train_prompts=20"] if data == "countdown" else []
    assert app.main(["preview", "model=new_tiny_llada", f"data={data}", "count=1", *words]) == 0
    assert expected in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "count=-3"], "count=-3 must be at least 1"),
        (["generate", "count=0"], "count=0 must be at least 1"),
        (
            ["fit", "logger=none", "trainer=cpu", "model.attention=flex"],
            "attention=flex has no backward pass on the CPU",
        ),
    ],
    ids=["negative", "zero", "flex"],
)
def test_what_cannot_be_done_is_said_before_anything_starts(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DARE_RUN_DIR", raising=False)
    assert app.main(words) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
