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
from dare_lightning.cli.run_folder import write_beside_earlier
from dare_lightning.cli.tree import ConfTree
from dare_lightning.evaluation.results import Record, find_record

COMPOSED_FILE = "composed.json"
"""In a run's folder: the options chosen, and the configuration before interpolations were resolved."""

_TRUSTED = ("dare_lightning.", "torch.optim.", "lightning.pytorch.")

# What a run was trained with and a reader of its checkpoint wants as well; not where and how it ran.
INHERITED = ("completion", "scale", "model", "peft", "data", "rollout", "method", "eval")
RERUN_KEYS = ("seed", "ckpt_path", "heldout")


def save_composed(cfg: DictConfig, choices: DictConfig, folder: Path) -> None:
    """Remember a run's configuration for `compose_for_checkpoint`."""
    content = {
        "choices": OmegaConf.to_container(choices),
        "config": OmegaConf.to_container(cfg),
    }
    write_beside_earlier(folder / COMPOSED_FILE, json.dumps(content, indent=2))


def run_of(checkpoint: Path) -> Path | None:
    """The run folder a checkpoint lies in; None where it was moved out of it."""
    folders = [checkpoint, *checkpoint.resolve().parents]
    return next((folder for folder in folders if (folder / COMPOSED_FILE).is_file()), None)


def compose_for_checkpoint(command: str, overrides: Sequence[str], config_dirs: Sequence[Path] = ()) -> DictConfig:
    """Like `compose`, with the model, adapter, data, ... of the run that `ckpt_path` comes from as defaults.

    `rerun_path` names a result file of an evaluation instead, which carries the configuration it was made with. Groups
    and keys on the command line win over the run's.

    Raises:
        UserError: as `compose`.
    """
    found = None if command == "fit" else _saved_configuration(overrides)
    if found is None:
        return compose(command, overrides, config_dirs)
    origin, saved = found
    typed = [(text, OverridesParser.create().parse_overrides([text])[0]) for text in overrides]
    groups = ConfTree(config_dirs).defaults(command)
    chosen = {override.key_or_group for _, override in typed}
    # A run on fixed data has no rollout; who reads its checkpoint may want to generate.
    kept = [group for group in INHERITED if group in groups and group not in chosen]
    kept = [group for group in kept if group != "rollout" or saved["choices"].get(group) not in (None, "none")]
    _check_targets(origin, {group: saved["config"].get(group) for group in kept})
    choices = [f"{group}={saved['choices'].get(group) or _listed(saved, group)}" for group in kept]
    cfg = compose(command, [*choices, *overrides], config_dirs)
    with open_dict(cfg):
        for group in kept:
            if group in saved["config"]:
                cfg[group] = saved["config"][group]
        # The seed decides which samples are held out.
        for key in RERUN_KEYS if origin.name != COMPOSED_FILE else RERUN_KEYS[:1]:
            if key in cfg and key not in chosen:
                cfg[key] = saved["config"].get(key)
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


def _listed(saved: Mapping[str, Any], group: str) -> str:
    """The options of a group that takes several, which Hydra does not name among its choices; null for any other."""
    names = ((saved["config"].get(group) or {}).get("benchmarks") or {}) if group == "eval" else {}
    return f"[{','.join(names)}]" if names else "null"


def _saved_configuration(overrides: Sequence[str]) -> tuple[Path, dict[str, Any]] | None:
    """The file that says how the named result or checkpoint was made, and what it says."""
    result = _path_named("rerun_path", overrides)
    if result is not None:
        recipe, record = recipe_of(result)
        if "heldout" not in recipe["config"]:
            # Measured while training: the weights are in the checkpoint of that step, where it was kept.
            recipe["config"]["ckpt_path"] = _checkpoint_of(result, record.step)
        return result, recipe
    checkpoint = _path_named("ckpt_path", overrides)
    run = None if checkpoint is None else run_of(checkpoint)
    if run is None:
        return None
    return run / COMPOSED_FILE, json.loads((run / COMPOSED_FILE).read_text(encoding="utf-8"))


def _checkpoint_of(result: Path, step: int) -> str | None:
    run = run_of(result)
    file = None if run is None else run / "checkpoints" / f"step-{step:08d}.ckpt"
    return str(file) if file is not None and file.is_file() else None


def _path_named(key: str, overrides: Sequence[str]) -> Path | None:
    named = [text for text in overrides if text.startswith(f"{key}=")]
    if not named:
        return None
    value = OverridesParser.create().parse_overrides(named[-1:])[0].value()
    path = Path(str(value)).expanduser()
    return path if value is not None and path.exists() else None


def recipe_of(path: Path) -> tuple[dict[str, Any], Record]:
    """The composed configuration that a result file carries, and its record.

    Raises:
        UserError: it is not such a file, or carries none.
    """
    try:
        record = Record.load(find_record(path))
    except (FileNotFoundError, ValueError) as error:
        raise UserError(f"rerun_path={path}: {error}") from error
    if record.recipe is None:
        raise UserError(f"rerun_path={path}: the result carries no configuration; it was not made by a command")
    return record.recipe, record
