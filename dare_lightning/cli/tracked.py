"""What a configuration says about MLflow, read before anything heavy is imported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf


def mlflow_settings(cfg: DictConfig) -> dict[str, Any] | None:
    """The arguments of the first MLflow logger; None where there is none."""
    loggers = OmegaConf.to_container(cfg.get("logger") or OmegaConf.create({}), resolve=True)
    assert isinstance(loggers, dict)
    for settings in loggers.values():
        if isinstance(settings, dict) and str(settings.get("_target_", "")).endswith(".MLflowLogger"):
            return {str(name): value for name, value in settings.items()}
    return None


def store(settings: Mapping[str, Any]) -> tuple[str, str | None]:
    """Address and artifact location of the store that these arguments of a logger mean."""
    from dare_lightning.callbacks.tracking_store import local_store

    uri, artifacts = local_store(Path(settings["save_dir"]))
    if settings.get("tracking_uri") in (None, uri):
        return uri, artifacts
    return str(settings["tracking_uri"]), settings.get("artifact_location")


def start_tracking_early(cfg: DictConfig) -> None:
    """Where MLflow gets a process of its own: start it now, beside the imports of this one."""
    settings = mlflow_settings(cfg)
    if settings is not None and settings.get("own_process"):
        from dare_lightning.callbacks.tracking_process import start_early

        start_early(store(settings)[0])
