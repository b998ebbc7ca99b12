"""Methods are refused on policies on which they mean nothing, where possible before these are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dare_lightning.cli.build import build
from dare_lightning.cli.compose import compose
from dare_lightning.families.kinds import announced, kind_of
from dare_lightning.families.llada import LLaDA
from dare_lightning.families.load import load_policy
from dare_lightning.families.sdar import SDAR
from dare_lightning.families.tiny import new_tiny_sdar
from dare_lightning.methods.d_tree_rpo import DTreeRPO
from dare_lightning.methods.ebpo import EBPO
from dare_lightning.methods.spg import SPG
from tests.methods.harness import SGD
from tests.methods.matrix import tiny
from tests.tiny import TINY_BUILDERS

REFUSED = [
    (DTreeRPO, "sdar", {"denoising_steps": 4}, "DTreeRPO is defined for masked policies and SDAR is not one: a node"),
    (EBPO, "dream", {}, "EBPO is defined for block-diffusion policies and Dream is not one: it scores every block"),
    (SPG, "llada2", {}, "SPG's forward_type=block_random is defined for masked policies and LLaDA2 is not one"),
]


@pytest.mark.parametrize(("method", "family", "settings", "message"), REFUSED)
def test_a_method_names_itself_the_family_and_the_reason(
    method: Any, family: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"{message}.*; use method"):
        method(policy=tiny(family), optimizer=SGD, **settings)


def test_a_setting_that_is_defined_elsewhere_is_not_refused() -> None:
    assert SPG(policy=tiny("sdar"), optimizer=SGD, forward_type="random").samples == 2


@pytest.mark.parametrize(
    ("method", "model", "message"),
    [
        ("d_tree_rpo", "sdar", "DTreeRPO is defined for masked policies and SDAR is not one"),
        ("ebpo", "llada", "EBPO is defined for block-diffusion policies and LLaDA is not one"),
        ("spg", "sdar", "SPG's forward_type=block_random is defined for masked policies and SDAR is not one"),
    ],
)
def test_a_run_is_refused_before_weights_are_read(method: str, model: str, message: str, tmp_path: Path) -> None:
    # The folder is empty: reading a policy from it would fail otherwise.
    cfg = compose("fit", [f"method={method}", f"model={model}", f"model.path={tmp_path}", "seed=1"])
    with pytest.raises(ValueError, match=message):
        build(cfg, tmp_path)


@pytest.mark.parametrize("family", TINY_BUILDERS)
def test_a_family_is_known_from_its_builder(family: str) -> None:
    policy = tiny(family)
    assert announced(TINY_BUILDERS[family], None) == (kind_of(policy), type(policy).__name__)
    assert announced(type(policy).from_pretrained, None) == (kind_of(policy), type(policy).__name__)


def test_a_folder_says_its_family(tmp_path: Path) -> None:
    new_tiny_sdar(layers=1, width=16, heads=2).save_pretrained(tmp_path)
    assert announced(load_policy, str(tmp_path)) == ("block", SDAR.__name__)
    assert announced(load_policy, "some/hub-name") is None
    assert announced(LLaDA, None) == ("masked", "LLaDA")
    assert announced(dict, None) is None
