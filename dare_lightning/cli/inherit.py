"""A checkpoint knows how its run was configured: commands that read one start from there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict

from dare_lightning.cli.compose import compose
from dare_lightning.cli.errors import UserError
from dare_lightning.cli.tree import ConfTree

COMPOSED_FILE = "composed.json"
"""In a run's folder: the options chosen, and the configuration before interpolations were resolved."""

_TRUSTED = ("dare_lightning.", "torch.optim.", "lightning.pytorch.")

# What a run was trained with and a reader of its checkpoint wants as well; not where and how it ran.
INHERITED = ("completion", "scale", "model", "peft", "data", "rollout", "method")


def save_composed(cfg: DictConfig, choices: DictConfig, folder: Path) -> None:
    """Remember a run's configuration for `compose_for_checkpoint`."""
    content = {
        "choices": OmegaConf.to_container(choices),
        "config": OmegaConf.to_container(cfg),
    }
    (folder / COMPOSED_FILE).write_text(json.dumps(content, indent=2), encoding="utf-8")


def run_of(checkpoint: Path) -> Path | None:
    """The run folder a checkpoint lies in; None where it was moved out of it."""
    folders = [checkpoint, *checkpoint.resolve().parents]
    return next((folder for folder in folders if (folder / COMPOSED_FILE).is_file()), None)


def compose_for_checkpoint(command: str, overrides: Sequence[str], config_dirs: Sequence[Path] = ()) -> DictConfig:
    """Like `compose`, with the model, adapter, data, ... of the run that `ckpt_path` comes from as defaults.

    Groups and keys on the command line win over the run's.

    Raises:
        UserError: as `compose`.
    """
    run = None if command == "fit" else _run_named(overrides)
    if run is None:
        return compose(command, overrides, config_dirs)
    saved = json.loads((run / COMPOSED_FILE).read_text(encoding="utf-8"))
    typed = [(text, OverridesParser.create().parse_overrides([text])[0]) for text in overrides]
    groups = ConfTree(config_dirs).defaults(command)
    chosen = {override.key_or_group for _, override in typed}
    # A run on fixed data has no rollout; who reads its checkpoint may want to generate.
    kept = [group for group in INHERITED if group in groups and group not in chosen]
    kept = [group for group in kept if group != "rollout" or saved["choices"].get(group) not in (None, "none")]
    _check_targets(run / COMPOSED_FILE, {group: saved["config"].get(group) for group in kept})
    choices = [f"{group}={saved['choices'].get(group) or 'null'}" for group in kept]
    cfg = compose(command, [*choices, *overrides], config_dirs)
    with open_dict(cfg):
        for group in kept:
            if group in saved["config"]:
                cfg[group] = saved["config"][group]
        # The seed decides which samples are held out.
        if "seed" in cfg and "seed" not in chosen:
            cfg.seed = saved["config"]["seed"]
        for _, override in typed:
            key = override.key_or_group
            if key.split(".")[0] in kept and "." in key and not override.is_delete():
                OmegaConf.update(cfg, key, override.value())
    OmegaConf.set_struct(cfg, True)
    return cfg


def _check_targets(file: Path, node: Any, key: str = "") -> None:
    """A run's folder may come from anybody: what it names is built only where it belongs to this stack."""
    if isinstance(node, Mapping):
        target = node.get("_target_")
        if target is not None and not str(target).startswith(_TRUSTED):
            group = key.split(".")[0]
            raise UserError(
                f"{file} asks for {key}._target_={target}, which is no part of this package; if you trust it, name it"
                f" yourself: {group}=..."
            )
        for name, child in node.items():
            _check_targets(file, child, f"{key}.{name}" if key else str(name))


def _run_named(overrides: Sequence[str]) -> Path | None:
    named = [text for text in overrides if text.startswith("ckpt_path=")]
    if not named:
        return None
    value = OverridesParser.create().parse_overrides(named[-1:])[0].value()
    path = Path(str(value)).expanduser()
    return run_of(path) if value is not None and path.exists() else None
