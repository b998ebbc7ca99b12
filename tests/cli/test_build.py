"""What does not fit together is refused before weights are read: here the policy's folder is empty."""

from __future__ import annotations

from pathlib import Path

import pytest

from dare_lightning.cli.build import build
from dare_lightning.cli.compose import compose
from dare_lightning.cli.errors import UserError

MISFITS = [
    (["method=mdpo", "rollout=fast_dllm"], "MDPO needs states from the rollout, which BuiltinBackend does not give"),
    (["method=d_tree_rpo", "rollout=tree", "data.group_size=4"], "makes 16 completions of each prompt, data.group_si"),
    (["method=d1", "rollout.backend.temperature=0"], "temperature=0 makes the answers of a group equal"),
    (["method=sft", "data=sudoku"], "SFT trains on given answers; choose data=sft"),
    (["method=d1", "data=sudoku_sft"], "D1 trains on rollouts and needs prompts; choose data=gsm8k"),
    (["method=vrpo", "data=sudoku"], "VRPO compares pairs of answers; choose data=preference"),
    (["method=d1", "rollout=none"], "D1 needs a rollout; choose rollout=builtin"),
]


@pytest.mark.parametrize(("words", "message"), MISFITS)
def test_a_misfit_is_named_before_weights_are_read(words: list[str], message: str, tmp_path: Path) -> None:
    cfg = compose("fit", [*words, "model=llada", f"model.path={tmp_path}"])
    with pytest.raises((UserError, ValueError), match=message):
        build(cfg, tmp_path)
