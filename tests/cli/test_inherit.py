from __future__ import annotations

import json
from pathlib import Path

import pytest

from dare_lightning.cli.compose import compose
from dare_lightning.cli.errors import UserError
from dare_lightning.cli.inherit import COMPOSED_FILE, compose_for_checkpoint


def test_a_run_folder_cannot_name_foreign_code(tmp_path: Path) -> None:
    model = {"_target_": "os.system", "command": "true"}
    content = {"choices": {"model": "tiny_sudoku"}, "config": {"model": model, "seed": 1}}
    (tmp_path / COMPOSED_FILE).write_text(json.dumps(content), encoding="utf-8")
    (tmp_path / "step-1.ckpt").touch()
    with pytest.raises(UserError, match="os.system"):
        compose_for_checkpoint("generate", [f"ckpt_path='{tmp_path / 'step-1.ckpt'}'"])


def test_every_sampler_setting_is_a_key(tmp_path: Path) -> None:
    cfg = compose("fit", ["rollout.backend.attention=eager", "rollout.backend.cfg_scale=1.0"])
    assert cfg.rollout.backend.attention == "eager"
