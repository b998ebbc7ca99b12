"""Every file of conf/method builds its method."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf

import dare_lightning.conf
from dare_lightning.cli.compose import compose
from tests.methods.table_model import TablePolicy, random_tables

METHODS = sorted(
    path.stem
    for path in (Path(str(dare_lightning.conf.__file__)).parent / "method").glob("*.yaml")
    if not path.stem.startswith("_")
)


@cache
def _settings(name: str) -> DictConfig:
    """What a method's file says; composing it takes a while."""
    method: DictConfig = compose("fit", [f"method={name}"]).method
    return method


def _built(name: str, block_length: int | None = None) -> Any:
    config = OmegaConf.to_container(_settings(name), resolve=True)
    assert isinstance(config, dict)
    policy = TablePolicy(random_tables(), block_length=block_length)
    return hydra.utils.instantiate(config, policy=policy)


def _defined(name: str) -> Any:
    """The method on a masked policy, or on a block policy where it says that it is not defined on the other."""
    try:
        return _built(name)
    except InstantiationException as refusal:
        if "is defined for block-diffusion policies" not in str(refusal):
            raise
        return _built(name, block_length=4)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_builds_from_its_file(name: str) -> None:
    module = _defined(name)
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


def test_the_dare_variants_of_sequence_methods_divide_as_dare_does() -> None:
    bgpo, ebpo, vrpo = _built("bgpo_dare"), _built("ebpo_dare", 4), _built("vrpo_dare")
    assert bgpo.length_divisor == 17  # the room of a compact answer
    assert bgpo.count_after_eos
    assert ebpo.length_divisor == 1
    assert ebpo.clip.high == 0.2
    assert vrpo.length_divisor == 512
    assert vrpo.noise.samples == 4
    originals = _built("bgpo"), _built("ebpo", 4), _built("espo")
    assert [module.length_divisor for module in originals] == [None] * 3


def test_spg_has_two_rows_by_default_and_one_as_dare_runs_it() -> None:
    assert _built("spg").samples == 2
    assert _built("spg_dare").samples == 1


@pytest.mark.parametrize("name", ["ebpo", "ebpo_dare"])
def test_a_method_without_meaning_for_masked_policies_is_refused_by_name(name: str) -> None:
    with pytest.raises(InstantiationException, match="EBPO is defined for block-diffusion policies and TablePolicy"):
        _built(name)


def test_the_block_at_work_is_refused_for_block_policies_by_name() -> None:
    with pytest.raises(InstantiationException, match="forward_type=block_random is defined for masked policies"):
        _built("spg", block_length=4)
