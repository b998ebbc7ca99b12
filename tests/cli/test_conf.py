"""Every file of conf/ composes, and what it describes can be built."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf, open_dict

from dare_lightning.cli.checks import check
from dare_lightning.cli.compose import compose
from dare_lightning.cli.tree import COMMANDS, PACKAGED, ConfTree
from dare_lightning.families.tiny import new_tiny_sdar
from tests.tiny import tiny_llada

TREE = ConfTree()
CHOSEN = {group: options for group in TREE.defaults("fit") if (options := TREE.options(group))}
# An experiment chooses the others, and sets what belongs to its choice.
GROUPS = {group: options for group, options in CHOSEN.items() if group != "experiment"}
OPTIONS = [(group, option) for group, options in GROUPS.items() for option in options]
# Parts of a run that need other hardware are built with these values instead.
ON_CPU = {"accelerator": "cpu", "devices": 1, "strategy": "auto", "precision": "32-true"}


def composed(*overrides: str) -> DictConfig:
    """The configuration of a fit, with stand-ins for what has to be given and for assets."""
    cfg = compose("fit", overrides)
    with open_dict(cfg):
        cfg.pop("hydra")
    for key in {*OmegaConf.missing_keys(cfg), *(["model.path"] if "path" in cfg.model else [])}:
        OmegaConf.update(cfg, key, str(PACKAGED))
    return cfg


@cache
def round_of_options(number: int) -> DictConfig:
    """Composing takes a while, so one configuration tries the option of this number in every group."""
    chosen = [f"{group}={options[number % len(options)]}" for group, options in GROUPS.items()]
    folder = tempfile.mkdtemp()
    return composed(*chosen, f"run_dir={folder}", f"run_root={folder}")


def part(group: str, option: str) -> Any:
    """What a configuration that chose this option holds for the group."""
    return round_of_options(GROUPS[group].index(option)).get(group)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_composes(command: str) -> None:
    assert compose(command, []).run_root == "runs"


@pytest.mark.parametrize("path", sorted(PACKAGED.rglob("*.yaml")), ids=lambda p: str(p.relative_to(PACKAGED)))
def test_every_file_says_what_it_is_for(path: Path) -> None:
    assert TREE.about(str(path.relative_to(PACKAGED).with_suffix("")))


def test_every_group_can_be_chosen_somewhere() -> None:
    assert set(TREE.groups()) - {"reward"} <= set(TREE.defaults("fit"))


@pytest.mark.parametrize("number", range(max(map(len, GROUPS.values()))))
def test_every_option_composes_and_its_keys_are_taken(number: int) -> None:
    check("fit", round_of_options(number))


@pytest.mark.parametrize("name", CHOSEN["experiment"])
def test_every_experiment_composes_and_its_keys_are_taken(name: str) -> None:
    check("fit", composed(f"experiment={name}"))


@pytest.mark.parametrize(
    "words",
    [
        "method=sft model=llada model.path=. data=gsm8k_sft data.path=.",
        "method=d1 model=llada model.path=. data=gsm8k data.path=.",
        "method=coupled_grpo_dare model=llada model.path=. data=countdown peft=lora trainer=cpu logger=csv",
        "method=d1 model=llada_8b data=math data.path=. trainer=ddp",
    ],
)
def test_the_documented_command_lines_are_right(words: str) -> None:
    cfg = compose("fit", words.split())
    with open_dict(cfg):
        cfg.pop("hydra")
    check("fit", cfg)
    assert bool(cfg.get("rollout")) == ("sft" not in words)


@pytest.mark.parametrize(
    ("group", "option"), [o for o in OPTIONS if o[0] in ("callbacks", "logger", "rollout", "peft")], ids=str
)
def test_parts_are_built_as_described(group: str, option: str) -> None:
    if option == "tensorboard":
        pytest.importorskip("tensorboard")
    node = part(group, option) or {}
    # A group of one part, or of parts by name.
    described = [node] if "_target_" in node else list(node.values())
    built = [instantiate(description) for description in described]
    assert [type(b).__name__ for b in built] == [d._target_.rsplit(".", 1)[-1] for d in described]


@pytest.mark.parametrize("option", GROUPS["trainer"])
def test_trainers_are_built(option: str, tmp_path: Path) -> None:
    node = OmegaConf.merge(part("trainer", option), ON_CPU)
    trainer: L.Trainer = instantiate(node, logger=False, default_root_dir=str(tmp_path))
    assert trainer.num_sanity_val_steps == 0
    assert trainer.check_val_every_n_epoch == node.check_val_every_n_epoch


@pytest.mark.parametrize("option", GROUPS["method"])
def test_methods_are_built_with_an_optimizer(option: str) -> None:
    try:
        method: Any = instantiate(part("method", option), policy=tiny_llada())
    except InstantiationException as refusal:
        if "is defined for block-diffusion policies" not in str(refusal):
            raise
        method = instantiate(part("method", option), policy=new_tiny_sdar(layers=1, width=16, heads=2))
    assert method.configure_optimizers()


@pytest.mark.parametrize("option", TREE.options("reward"))
def test_rewards_are_built(option: str) -> None:
    cfg = OmegaConf.load(PACKAGED / "reward" / f"{option}.yaml")
    assert isinstance(cfg, DictConfig)
    assert callable(instantiate(cfg))


@pytest.mark.parametrize("option", GROUPS["data"])
def test_data_modules_are_built(option: str) -> None:
    assert isinstance(instantiate(part("data", option), policy=tiny_llada()), L.LightningDataModule)
