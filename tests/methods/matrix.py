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
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

import dare_lightning.conf
from dare_lightning.cli.compose import compose
from dare_lightning.cli.tree import ConfTree
from dare_lightning.generation.base import GenerationBackend
from dare_lightning.generation.builtin import BuiltinBackend
from dare_lightning.methods.base import DiffusionPolicyModule
from tests.tiny import TINY_BUILDERS

# Files without a class of their own are presets of another: other numbers, built by test_configs.
METHODS = sorted(
    path.stem
    for path in (Path(str(dare_lightning.conf.__file__)).parent / "method").glob("*.yaml")
    if not path.stem.startswith("_") and "_target_" in OmegaConf.load(path)
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
    **{(name, "estimator_std"): EXACT for name in ("cj_grpo", "dipo", "justgrpo", "mdpo", "tracerl", "d_tree_rpo")},
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
def rollout(name: str) -> DictConfig:
    """The backend of a file of conf/rollout."""
    return compose("fit", [f"rollout={name}", *SMALL]).rollout.backend


def built(name: str, policy: Any) -> tuple[DiffusionPolicyModule, GenerationBackend]:
    """The configured method and a backend that serves it on this policy.

    Raises:
        Undefined: the method refuses the policy by name, or no rollout serves both.
    """
    cfg = configured(name)
    try:
        method: DiffusionPolicyModule = instantiate(cfg.method, policy=policy)
    except InstantiationException as refusal:
        if "is defined for" not in str(refusal):
            raise
        raise Undefined(f"refused by name: {refusal.__cause__}") from refusal
    return method, _backend(policy, method, cfg)


def _backend(policy: Any, method: DiffusionPolicyModule, cfg: DictConfig) -> GenerationBackend:
    """The configured backend; for a block family the first that serves it and the method's needs."""
    if policy.block_length is None:
        return instantiate(cfg.rollout.backend) if cfg.get("rollout") else BuiltinBackend(steps=2, max_new_tokens=4)
    for name in ROLLOUTS:
        try:
            backend: GenerationBackend = instantiate(rollout(name))
            backend.validate(policy)
        except (ValueError, InstantiationException):
            continue
        if all(asdict(backend.capabilities)[need] for need in method.needs):
            return backend
    raise Undefined("no rollout of conf/rollout serves this family and this method")


def tiny(family: str) -> Any:
    """The smallest policy of a family."""
    return TINY_BUILDERS[family](layers=1, width=16, heads=2)


def defined(name: str, family: str) -> bool:
    """Whether the pair can be built."""
    try:
        built(name, tiny(family))
    except Undefined:
        return False
    return True


def table() -> str:
    """README's table: a row a method, a column a family."""
    titles = [type(tiny(family)).__name__ for family in TINY_BUILDERS]
    lines = ["| method | " + " | ".join(titles) + " |", "|---" * (len(titles) + 1) + "|"]
    for name in METHODS:
        cells = ["yes" if defined(name, family) else "no" for family in TINY_BUILDERS]
        lines.append(f"| [`{name}`](docs/methods/{name}.md) | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
