"""What files and sizes say against a run before anything heavy is imported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig

from dare_lightning.cli.errors import UserError
from dare_lightning.datamodules.sizes import check_group_size, check_positive

_SIZES = ("prompts_per_rollout", "updates_per_rollout", "inner_epochs", "micro_batch", "batch_size", "val_prompts")


def check_contents(cfg: DictConfig) -> None:
    """Look into what a checked configuration names.

    Raises:
        UserError: a model folder holds no model, a data file holds nothing, a size is too small; one line for each.
    """
    data = cfg.get("data") or {}
    problems = [*_model(cfg.get("model") or {}), *_sizes(data)]
    for key, value in (("data.path", data.get("path")), ("data.val_path", data.get("val_path"))):
        problems += _files(key, value)
    problems += _files("prompts_path", cfg.get("prompts_path"))
    if problems:
        raise UserError(*problems)


def _model(model: Any) -> Iterator[str]:
    path = model.get("path")
    # What other packages read, they know.
    if path is None or not str(model.get("_target_")).startswith("dare_lightning.") or not Path(path).exists():
        return
    folder = Path(path)
    if not folder.is_dir():
        yield f"model.path={path}: a file; name the folder that has config.json and the weights"
    elif not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        inside = sorted(file.parent for file in folder.glob("*/config.json"))
        way_out = f"did you mean {inside[0]}?" if inside else "name the folder that has it beside the weights"
        yield f"model.path={path}: the folder has no config.json; {way_out}"


def _files(key: str, value: Any) -> Iterator[str]:
    for path in [Path(str(item)) for item in (value if isinstance(value, ListConfig) else [value])]:
        if path.is_file() and path.stat().st_size == 0:
            yield f"{key}={path}: the file is empty"
        elif path.is_dir() and not any(path.iterdir()):
            yield f"{key}={path}: the folder is empty"


def _sizes(data: Any) -> Iterator[str]:
    given = {name: data[name] for name in _SIZES if isinstance(data.get(name), int)}
    try:
        check_positive(given)
        if "group_size" in data:
            check_group_size(data["group_size"])
    except ValueError as error:
        yield str(error)
