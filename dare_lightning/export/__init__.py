"""Checkpoints for use without this project."""

from dare_lightning.export.policy import ExportReport, export_policy, load_policy_state

__all__ = ["ExportReport", "export_policy", "load_policy_state"]
