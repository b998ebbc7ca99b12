"""Checkpoints in the published layout: config.json, safetensors weights, sharded or not. Reading is strict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is not JSON.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; {path.parent} is not a complete checkpoint folder")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); the file is damaged, fetch it again") from error


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as it is.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is not a JSON object.
    """
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise ValueError(f"{folder / 'config.json'} holds a {type(config).__name__}; expected a JSON object")
    return config


def resolve_folder(path: str) -> Path:
    raise NotImplementedError


def load_weights(module: nn.Module, folder: Path, dtype: str | None = None) -> None:
    raise NotImplementedError


def save_checkpoint(
    folder: Path, state: dict[str, Tensor], config: dict[str, Any], tokenizer: Any, source: Path | None
) -> None:
    raise NotImplementedError
