"""Help, composition and mistakes, as a user meets them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from dare_lightning.cli.tree import COMMANDS
from tests.cli.conftest import Finished

Dare = Callable[..., Finished]


def test_help_is_quick_and_names_every_command(dare: Dare) -> None:
    started = time.perf_counter()
    result = dare("--help", python=("-X", "importtime"))
    assert time.perf_counter() - started < 3
    assert result.returncode == 0
    assert all(f"  {command} " in result.stdout for command in COMMANDS)
    assert "| torch" not in result.stderr
    assert "hydra" not in result.stderr


def test_help_of_fit_lists_groups_options_keys_and_examples(dare: Dare) -> None:
    result = dare("fit", "method=d1", "--help")
    assert result.returncode == 0
    assert "d1*" in result.stdout
    assert "coupled_grpo" in result.stdout
    assert "seed=42" in result.stdout
    assert "python -m dare_lightning fit -m" in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    from dare_lightning.cli import help
    from dare_lightning.cli.arguments import parse

    text = help.command(parse([command, "--help"]))
    assert "examples" in text
    assert all(key.split("=")[0] in text for key in help.USED_MOST[command].split()[:1])


def test_no_command_prints_the_overview_and_fails(dare: Dare) -> None:
    result = dare()
    assert result.returncode == 2
    assert "usage:" in result.stdout


def test_cfg_job_prints_the_composed_configuration(dare: Dare) -> None:
    result = dare("fit", "--cfg", "job", "method=sft", "model=llada", "seed=7")
    cfg = yaml.safe_load(result.stdout)
    assert result.returncode == 0
    assert cfg["seed"] == 7
    assert cfg["method"]["_target_"].endswith("SFT")
    assert cfg["model"]["path"] == "???"
    assert "backend" not in cfg.get("rollout", {})
    assert "hydra" not in cfg


def test_cfg_package_prints_a_part_and_resolve_its_values(dare: Dare) -> None:
    result = dare("fit", "--cfg", "job", "--resolve", "-p", "rollout.backend", "completion=planning")
    assert yaml.safe_load(result.stdout)["steps"] == 128


def test_a_folder_of_the_users_own_configuration_is_found(dare: Dare, tmp_path: Path) -> None:
    folder = tmp_path / "my conf" / "experiment"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("# @package _global_\nseed: 99\n")
    result = dare("fit", "--config-dir", "my conf", "experiment=mine", "--cfg", "job")
    assert yaml.safe_load(result.stdout)["seed"] == 99


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["fitt"], "fit"),
        (["fit", "methd=d1"], "method"),
        (["fit", "method=coupled_grp"], "coupled_grpo"),
        (["fit", "method.clip_lowe=0.3"], "method.clip_low"),
        (["fit", "lr=0.1"], "method.optimizer.lr"),
        (["fit", "+method.clip_lo=0.3", "model.path=."], "clip_low"),
        (["fit", "+sede=1", "model.path=."], "seed"),
        (["fit", "peft.rank=3"], "peft=lora"),
        (["fit", "logger=mlflw"], "mlflow"),
        (["fit", "--mutirun"], "--multirun"),
        (["fit", "seed"], "key=value"),
        (["fit", "model.path=mdoel"], "model"),
        (["fit", "ckpt_path=model/lats.ckpt", "model.path=."], "model/last.ckpt"),
        (["fit", "model=llada"], "model.path="),
        (["fit", "seed=1,2", "model.path=."], "--multirun"),
        (["export", "trainer=cpu"], "export has no trainer"),
        (["fit", "--multirun", "seed=1,2", "methd=d1", "model.path=."], "method"),
        (["fit", "--multirun", "method=d1,sfft"], "sft"),
        (["fit", "model=null"], "llada_8b"),
        (["completion", "bsh"], "bash"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_is_one_line_that_names_the_way_out(
    words: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dare_lightning.cli.app import main

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "last.ckpt").touch()
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert expected in lines[0].partition(";")[2] or expected in lines[0]
    assert not (tmp_path / "runs").exists()


def test_every_mistake_is_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    from dare_lightning.cli.app import main

    assert main(["fit", "methd=d1", "logger=mlflw", "sede=3"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 3


@pytest.mark.parametrize(
    "words",
    [
        ["methd=d1"],
        ["+method.clipp=1", "data.group_size=abc", "trainer.max_epochs=x", "method.kl_coef=[1]"],
        ["data.group_size=1"],
    ],
    ids=["names", "types", "sizes"],
)
def test_mistakes_are_found_before_anything_heavy_is_loaded(dare: Dare, words: list[str], tmp_path: Path) -> None:
    result = dare("fit", *words, python=("-X", "importtime"))
    assert result.returncode == 2
    for heavy in ("torch", "lightning", "transformers", "mlflow"):
        assert f"| {heavy}\n" not in result.stderr.replace("|   ", "| ").replace("  ", "")
    for word in words:
        assert f"error: {word.lstrip('+').split('=')[0]}" in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())


def test_the_traceback_is_one_flag_away(dare: Dare) -> None:
    assert "Traceback" in dare("fit", "methd=d1", "--traceback").stderr


def test_a_hub_name_is_not_taken_for_a_missing_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dare_lightning.cli.checks import check
    from dare_lightning.cli.compose import compose
    from dare_lightning.cli.errors import UserError

    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()

    def checked(path: str) -> None:
        cfg = compose("fit", [f"model.path={path}"])
        del cfg.__dict__["_content"]["hydra"]
        check("fit", cfg)

    checked("GSAI-ML/LLaDA-8B-Instruct")
    with pytest.raises(UserError, match="no such file"):
        checked("runs/model")


def test_a_group_is_switched_off_with_null() -> None:
    from dare_lightning.cli.compose import compose

    cfg = compose("fit", ["peft=null", "logger=null", "callbacks=null", "experiment=null", "rollout=null"])
    assert not any(cfg.get(group) for group in ("peft", "logger", "callbacks", "rollout"))
