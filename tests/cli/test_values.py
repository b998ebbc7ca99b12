"""Values of the wrong type are named before anything is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from dare_lightning.cli.app import main
from dare_lightning.cli.contents import check_contents
from dare_lightning.cli.values import wrong_defaults, wrong_values


def said(target: str, **given: Any) -> list[str]:
    """What is wrong with these arguments, given as `part.<name>`."""
    return list(wrong_values(OmegaConf.create({"part": {"_target_": target, **given}})))


PROMPTS = "dare_lightning.datamodules.prompts.PromptDataModule"
TRAINER = "lightning.pytorch.Trainer"
ADAMW = "torch.optim.AdamW"
D1 = "dare_lightning.methods.d1.D1"


@pytest.mark.parametrize(
    ("target", "name", "value", "expected"),
    [
        (PROMPTS, "group_size", "abc", "=abc: must be a whole number"),
        (PROMPTS, "group_size", 2.5, "=2.5: must be a whole number"),
        (PROMPTS, "group_size", True, "=true: must be a whole number"),
        (PROMPTS, "train_prompts", "all", "=all: must be a whole number or null"),
        (PROMPTS, "path", ["a"], "=['a']: must be text or null"),
        (TRAINER, "max_epochs", "x", "=x: must be a whole number or null"),
        (TRAINER, "gradient_clip_val", "high", "=high: must be a number or null"),
        (ADAMW, "lr", "high", "=high: must be a number"),
        (D1, "kl_coef", [1], "=[1]: must be a number"),
        (D1, "clip_low", None, "=null: must be a number"),
        ("dare_lightning.generation.builtin.BuiltinBackend", "cache", "suffix", "one of prefix, dual or null"),
        ("dare_lightning.generation.builtin.BuiltinBackend", "tree", 4, "a list [whole number, ...] or null"),
        ("dare_lightning.methods.sft.SFT", "normalization", "tokn", "must be one of "),
    ],
)
def test_a_value_of_another_type_is_named_with_what_is_allowed(
    target: str, name: str, value: Any, expected: str
) -> None:
    (line,) = said(target, **{name: value})
    assert line.startswith(f"part.{name}=")
    assert expected in line


@pytest.mark.parametrize(
    ("target", "name", "value"),
    [
        (PROMPTS, "group_size", 4),
        (PROMPTS, "train_prompts", None),
        (PROMPTS, "path", 2024),  # a folder may be called so
        (PROMPTS, "reward", {"_target_": "tests.cli.variety.Variety"}),
        (PROMPTS, "task", "not ours to judge"),
        (TRAINER, "devices", "auto"),
        (TRAINER, "devices", [0, 1]),
        (TRAINER, "precision", "bf16-mixed"),
        (ADAMW, "lr", 1),
        (ADAMW, "betas", [0.9, 0.99]),
        (D1, "kl_coef", 1),
        ("tests.cli.variety.Variety", "form", ["whatever"]),
    ],
)
def test_what_fits_or_cannot_be_judged_passes(target: str, name: str, value: Any) -> None:
    assert said(target, **{name: value}) == []


def test_a_value_that_another_key_gives_is_named_by_that_key() -> None:
    part = {"_target_": PROMPTS, "group_size": "${sizes.group}"}
    (line,) = wrong_values(OmegaConf.create({"sizes": {"group": "x"}, "part": part}))
    assert line == "sizes.group=x: must be a whole number"


def test_keys_of_a_command_keep_the_kind_of_their_defaults() -> None:
    cfg = OmegaConf.create({"seed": "abc", "validate_first": "maybe", "run_dir": 3})
    found = list(wrong_defaults(cfg, {"seed": 42, "validate_first": True, "run_dir": None}))
    assert found == ["seed=abc: must be a whole number", "validate_first=maybe: must be true or false"]


def _refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main(["fit", *words]) == 2
    assert not Path("runs").exists()
    return capsys.readouterr().err.strip().splitlines()


def test_what_files_and_sizes_say_is_found_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run/model").mkdir(parents=True)
    Path("run/model/config.json").touch()
    Path("empty.jsonl").touch()
    Path("nothing").mkdir()
    words = ["model.path=run", "data.group_size=1", "data.path=empty.jsonl", "data.val_path=nothing"]
    assert _refused(words, capsys) == [
        "error: model.path=run: the folder has no config.json; did you mean run/model?",
        "error: data.group_size=1: group-relative advantages compare answers to one prompt; use 2 or more",
        "error: data.path=empty.jsonl: the file is empty",
        "error: data.val_path=nothing: the folder is empty",
    ]
    (line,) = _refused(["model.path=empty.jsonl"], capsys)
    assert line.endswith("empty.jsonl: a file; name the folder that has config.json and the weights")


def test_an_adapter_alone_is_a_model_folder(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").touch()
    model = {"_target_": "dare_lightning.families.load.load_policy", "path": str(tmp_path)}
    check_contents(OmegaConf.create({"model": model}))
