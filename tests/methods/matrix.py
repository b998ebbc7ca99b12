"""Which method is defined on which family: asked of the objects, and written as README's table.

Families are found by their tiny builders, methods by their files in conf/; neither is named here.
Run from the checkout to print the table: python -m tests.methods.matrix
"""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf

import dare_lightning.conf
from dare_lightning.cli.compose import compose
from dare_lightning.cli.tree import ConfTree
from dare_lightning.families.kinds import kind_of
from dare_lightning.generation.base import GenerationBackend
from dare_lightning.generation.builtin import BuiltinBackend
from dare_lightning.methods.base import DiffusionPolicyModule
from tests.shared import ROOT
from tests.tiny import TINY_BUILDERS

# Files without a class or a network of their own are presets of another: other numbers, built by test_configs.
METHODS = sorted(
    path.stem
    for path in (Path(str(dare_lightning.conf.__file__)).parent / "method").glob("*.yaml")
    if not path.stem.startswith("_") and (keys := OmegaConf.load(path)).get("_target_", keys.get("value_model"))
)
ROLLOUTS = [name for name in ConfTree().options("rollout") if name != "none"]
# What every method reports of an optimiser step, and which methods do not, for what reason.
RATIOS = ("clip_fraction", "dual_clip_fraction", "ratio_mean", "ratio_square_mean", "ratio_max")
MEASURED = ("entropy", "estimator_std", "old_kl", "ratio_clamped_fraction", *RATIOS)
ONE_ROW = "scores each token once: there are no other draws"
EXACT = "scores what the rollout did, without a Monte Carlo estimate"
GIVEN = "learns from given answers: no policy wrote them"
UNMEASURED: dict[tuple[str, str], str] = {
    ("d1", "estimator_std"): ONE_ROW,
    ("coupled_grpo", "estimator_std"): "its three rows are one draw",
    ("diffpo", "estimator_std"): "its two rows are one draw",
    **{
        (name, "estimator_std"): EXACT
        for name in ("cj_grpo", "dipo", "justgrpo", "mdpo", "tracerl", "tracerl_value", "d_tree_rpo")
    },
    **{("spg", name): "compares with no old policy" for name in (*RATIOS, "old_kl", "ratio_clamped_fraction")},
    **{(m, name): GIVEN for m in ("sft", "vrpo") for name in (*RATIOS, "old_kl", "ratio_clamped_fraction")},
    ("sft", "estimator_std"): "one row a sample by default (method.samples)",
}
SMALL = ["scale=tiny", "completion.max_new_tokens=4", "completion.steps=2", "completion.block_length=2"]


class Undefined(Exception):
    """The method is not defined on the family, or no rollout of conf/ gives what it needs there."""


@cache
def configured(method: str) -> DictConfig:
    """A fit by this method, with short completions and few noisy rows."""
    cfg = compose("fit", [f"method={method}", *SMALL])
    if "samples" in cfg.method:
        cfg.method.samples = min(cfg.method.samples, 4)
    return cfg


@cache
def written(name: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """What the configured fit says of the method, and of the backend where it has one: plain values, quick to build."""
    cfg = configured(name)
    backend = OmegaConf.to_container(cfg.rollout.backend, resolve=True) if cfg.get("rollout") else None
    return OmegaConf.to_container(cfg.method, resolve=True), backend


@cache
def rollout(name: str) -> dict[str, Any]:
    """The backend of a file of conf/rollout."""
    return OmegaConf.to_container(compose("fit", [f"rollout={name}", *SMALL]).rollout.backend, resolve=True)


def needed_setting(name: str, policy: Any) -> tuple[str, Any] | None:
    """The setting, and its value, with which a method is defined on a policy where its own value is not; None for none.

    Only what the method itself names as the way out.
    """
    settings, _ = written(name)
    for case in get_class(settings["_target_"]).undefined:
        if case.on == kind_of(policy) and case.instead is not None and settings[case.setting] == case.value:
            return case.setting, case.instead
    return None


def built(name: str, policy: Any, held: bool = False) -> tuple[DiffusionPolicyModule, GenerationBackend]:
    """The configured method and a backend that serves it on this policy.

    Args:
        held: pay for a divergence from the reference, where the method has one.

    Raises:
        Undefined: the method refuses the policy by name, or no rollout serves both.
    """
    settings, backend = written(name)
    kind, changed = get_class(settings["_target_"]), {}
    if (needed := needed_setting(name, policy)) is not None:
        changed[needed[0]] = needed[1]
    if held and kind.online and kind.uses_old_policy:
        changed["kl_coef"] = 0.01
    try:
        method: DiffusionPolicyModule = instantiate(settings | changed, policy=policy)
    except InstantiationException as refusal:
        if "is defined for" not in str(refusal):
            raise
        raise Undefined(f"refused by name: {refusal.__cause__}") from refusal
    return method, _backend(policy, method, backend)


def _backend(policy: Any, method: DiffusionPolicyModule, settings: dict[str, Any] | None) -> GenerationBackend:
    """The configured backend; for a block family the first that serves it and the method's needs."""
    if policy.block_length is None:
        return instantiate(settings) if settings is not None else BuiltinBackend(steps=2, max_new_tokens=4)
    for name in ROLLOUTS:
        offer = _offer(name)
        try:
            offer.validate(policy)
        except ValueError:
            continue
        if all(asdict(offer.capabilities)[need] for need in method.needs):
            backend: GenerationBackend = instantiate(rollout(name))
            return backend
    raise Undefined("no rollout of conf/rollout serves this family and this method")


@cache
def _offer(name: str) -> GenerationBackend:
    """The backend of a file of conf/rollout, to be asked what it can do, and never used."""
    offer: GenerationBackend = instantiate(rollout(name))
    return offer


def tiny(family: str) -> Any:
    """The smallest policy of a family."""
    return TINY_BUILDERS[family](layers=1, width=16, heads=2)


def cell(name: str, family: str) -> str:
    """Whether the pair can be built, and with which setting where it needs one."""
    policy = tiny(family)
    try:
        built(name, policy)
    except Undefined:
        return "no"
    needed = needed_setting(name, policy)
    return "yes" if needed is None else f"yes, `{needed[0]}={needed[1]}`"


def page(name: str) -> str:
    """The page of docs/methods that a method is explained on: its own, or that of the method it is based on."""
    pages = ROOT / "docs" / "methods"
    while not (pages / f"{name}.md").is_file():
        name = name.rpartition("_")[0]
    return f"docs/methods/{name}.md"


def table() -> str:
    """README's table: a row a method, a column a family."""
    titles = [type(tiny(family)).__name__ for family in TINY_BUILDERS]
    lines = ["| method | " + " | ".join(titles) + " |", "|---" * (len(titles) + 1) + "|"]
    for name in METHODS:
        cells = [cell(name, family) for family in TINY_BUILDERS]
        lines.append(f"| [`{name}`]({page(name)}) | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
