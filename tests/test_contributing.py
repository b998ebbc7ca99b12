"""The worked examples of CONTRIBUTING.md, written to files and used together as one training run."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, open_dict

from dare_lightning.cli.build import build
from dare_lightning.cli.checks import check
from dare_lightning.cli.compose import compose
from dare_lightning.families.base import PolicyModel
from dare_lightning.families.load import load_policy
from tests.shared import ROOT
from tests.tiny import EOS, MASK, PAD, tiny_tokenizer

BLOCK = re.compile(r"^```(?:python|yaml)\n# ((?:dare_lightning|conf|tests)/\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLES = dict(BLOCK.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")))
PACKAGES = ("methods", "families", "generation", "rewards", "evaluation.benchmarks")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with every example in its place, seen by the package as its own."""
    folder = tmp_path_factory.mktemp("examples")
    for place, content in EXAMPLES.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(content, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        for name in PACKAGES:
            package = importlib.import_module(f"dare_lightning.{name}")
            added = folder / "dare_lightning" / name.replace(".", "/")
            patch.setattr(package, "__path__", [*package.__path__, str(added)])
        yield folder


@pytest.fixture
def checkpoint(written: Path, tmp_path: Path) -> Path:
    """A checkpoint of the example family with random weights."""
    family = importlib.import_module("dare_lightning.families.mean_field").MeanField
    config = {"model_type": "mean_field", "d_model": 16, "vocab_size": 40, "mask_token_id": MASK}
    torch.manual_seed(0)
    family(config | {"eos_token_id": EOS, "pad_token_id": PAD}, tiny_tokenizer()).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def composed(written: Path, checkpoint: Path, run_dir: Path) -> DictConfig:
    words = ["method=reinforce", "model=mean_field", f"model.path={checkpoint}", "rollout=one_shot", "data=reverse"]
    words += ["trainer=cpu", "logger=none", "callbacks=none", "trainer.max_epochs=2", f"run_dir={run_dir}"]
    words += ["data.train_prompts=32", "data.val_prompts=4", "data.prompts_per_rollout=4", "data.group_size=4"]
    words += ["completion.max_new_tokens=5", "data.micro_batch=8", f"run_root={run_dir}"]
    cfg = compose("fit", words, [written / "conf"])
    with open_dict(cfg):
        cfg.pop("hydra")
    return cfg


def test_there_is_an_example_of_each_kind() -> None:
    assert {place.split("/")[1] for place in EXAMPLES if place.startswith("conf/")} == {
        "method", "model", "rollout", "reward", "data",
    }  # fmt: skip
    assert len([place for place in EXAMPLES if place.startswith("dare_lightning/")]) == 5


def test_the_examples_pass_the_checks_and_train_together(written: Path, checkpoint: Path, tmp_path: Path) -> None:
    cfg = composed(written, checkpoint, tmp_path / "run")
    check("fit", cfg, [written / "conf"])
    objects = build(cfg, tmp_path / "run")
    policy: Any = objects.policy
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    objects.trainer.fit(objects.method, datamodule=objects.data)
    assert objects.trainer.global_step == 2
    assert any(not torch.equal(before[name], value) for name, value in policy.state_dict().items())


def test_the_family_is_recognised_and_reads_back_what_it_wrote(checkpoint: Path, tmp_path: Path) -> None:
    policy: Any = load_policy(str(checkpoint))
    assert isinstance(policy, PolicyModel)
    policy.save_pretrained(tmp_path / "again")
    torch.testing.assert_close(
        dict(load_policy(str(tmp_path / "again")).named_parameters()), dict(policy.named_parameters()), rtol=0, atol=0
    )


def test_the_backend_answers_a_prompt_the_same_alone_and_in_a_batch(written: Path, checkpoint: Path) -> None:
    backend = importlib.import_module("dare_lightning.generation.one_shot").OneShotBackend(5)
    backend.update_weights(load_policy(str(checkpoint)), version=0)
    together = backend.generate([[5, 6, 7], [8]], [1, 2])
    alone = backend.generate([[8]], [2])
    assert torch.equal(together.ids[1, -5:], alone.ids[0, -5:])


def test_the_reward_and_the_benchmark_fit_each_other(written: Path, checkpoint: Path, tmp_path: Path) -> None:
    data = composed(written, checkpoint, tmp_path).data
    task, reward = instantiate(data.task), instantiate(data.reward)
    train, heldout = task.examples("train", 20, 0), task.examples("heldout", 20, 0)
    verdicts = reward([example.ground_truth for example in train], train)
    assert {(v.reward, v.status) for v in verdicts} == {(1.0, "right")}
    assert not {e.ground_truth for e in train} & {e.ground_truth for e in heldout}


@pytest.mark.parametrize("place", [place for place in EXAMPLES if place.startswith("tests/")])
def test_the_tests_of_the_examples_pass(written: Path, place: str) -> None:
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(EXAMPLES[place], place, "exec"), names)
    tests = [value for name, value in names.items() if name.startswith("test_")]
    assert tests
    for test in tests:
        test()
