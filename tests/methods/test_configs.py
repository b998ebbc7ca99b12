"""Every file of conf/method builds its method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
from omegaconf import OmegaConf

import dare_lightning.conf
from dare_lightning.cli.compose import compose
from tests.methods.table_model import TablePolicy, random_tables

METHODS = sorted(
    path.stem
    for path in (Path(str(dare_lightning.conf.__file__)).parent / "method").glob("*.yaml")
    if not path.stem.startswith("_")
)


def _built(name: str) -> Any:
    config = OmegaConf.to_container(compose("fit", [f"method={name}"]).method, resolve=True)
    assert isinstance(config, dict)
    return hydra.utils.instantiate(config, policy=TablePolicy(random_tables()))


@pytest.mark.parametrize("name", METHODS)
def test_a_method_builds_from_its_file(name: str) -> None:
    module = _built(name)
    configured = module.configure_optimizers()
    optimizer = configured["optimizer"] if isinstance(configured, dict) else configured
    assert isinstance(optimizer, torch.optim.AdamW)


def test_the_dare_variants_scale_advantages_clip_twice_and_count_after_the_end() -> None:
    for name in ("d1_dare", "coupled_grpo_dare"):
        module = _built(name)
        assert module.objective.clip.dual == 3.0
        assert module.count_after_eos
        got = module.advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0]]))
        torch.testing.assert_close(got, torch.tensor([[1.0, -1.0, -1.0, 1.0]]) * 3**0.5 / 2, atol=1e-5, rtol=0)
    assert _built("d1").objective.clip.dual is None
