"""What does not fit together is refused before weights are read: here the policy's folder is empty."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra.utils import instantiate
from omegaconf import DictConfig, open_dict

from dare_lightning.cli.build import build
from dare_lightning.cli.compose import compose
from dare_lightning.cli.errors import UserError
from dare_lightning.datamodules.prompts import PromptDataModule

MISFITS = [
    (["method=mdpo", "rollout=fast_dllm"], "MDPO needs states from the rollout, which BuiltinBackend does not give"),
    (["method=d_tree_rpo", "rollout=tree", "data.group_size=4"], "makes 16 completions of each prompt, data.group_si"),
    (["method=d1", "rollout.backend.temperature=0"], "temperature=0 makes the answers of a group equal"),
    (["method=sft", "data=sudoku"], "SFT trains on given answers; choose data=sft"),
    (["method=d1", "data=sudoku_sft"], "D1 trains on rollouts and needs prompts; choose data=gsm8k"),
    (["method=vrpo", "data=sudoku"], "VRPO compares pairs of answers; choose data=preference"),
    (["trainer.check_val_every_n_epoch=0"], "check_val_every_n_epoch=0 must be at least 1"),
    (["method=d1", "rollout=none"], "D1 needs a rollout; choose rollout=builtin"),
]


def composed(*words: str) -> DictConfig:
    cfg = compose("fit", words)
    with open_dict(cfg):
        cfg.pop("hydra")
    return cfg


@pytest.mark.parametrize(("words", "message"), MISFITS)
def test_a_misfit_is_named_before_weights_are_read(words: list[str], message: str, tmp_path: Path) -> None:
    cfg = composed(*words, "model=llada", f"model.path={tmp_path}")
    with pytest.raises((UserError, ValueError), match=message):
        build(cfg, tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data._target_=mylib.Nope"], "data._target_=mylib.Nope cannot be imported: No module named 'mylib'"),
        (
            ["method._target_=dare_lightning.methods.d1.D2"],
            "method._target_=dare_lightning.methods.d1.D2 cannot be imp",
        ),
        (["method._target_=dare_lightning.conf_unknown"], "method._target_=dare_lightning.conf_unknown cannot be imp"),
        (["method._target_=builtins.print"], "method._target_=builtins.print is no subclass of DiffusionPolicyModule"),
        (["data=sudoku", "model=new_tiny_sdar", "rollout=builtin"], "the policy is a block-diffusion model"),
    ],
)
def test_what_a_run_cannot_be_built_from_is_named_with_its_key(words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises((UserError, ValueError), match=message):
        build(composed("method=d1", "logger=none", "trainer=cpu", *words), tmp_path)


def sudoku_prompts(policy: Any, **settings: Any) -> Any:
    """Data that come from a function."""
    return instantiate(composed("data=sudoku_compact").data, policy=policy, **settings)


def test_data_may_come_from_a_function(tmp_path: Path) -> None:
    words = ["model=new_tiny_llada", "logger=none", "trainer=cpu", f"run_dir={tmp_path}"]
    cfg = composed("method=d1", *words)
    cfg.data = {"_target_": "tests.cli.test_build.sudoku_prompts", "seed": 1}
    assert isinstance(build(cfg, tmp_path).data, PromptDataModule)
    cfg = composed("method=sft", "data=sudoku_sft", *words)
    cfg.data = {"_target_": "tests.cli.test_build.sudoku_prompts"}
    with pytest.raises(UserError, match="SFT trains on given answers"):
        build(cfg, tmp_path)
