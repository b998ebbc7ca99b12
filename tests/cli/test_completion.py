"""What a shell offers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dare_lightning.cli.completion import complete, script


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("dare-lightning ge", ["generate"]),
        ("python -m dare_lightning ex", ["export"]),
        ("dare-lightning fit --mul", ["--multirun"]),
        ("dare-lightning fit peft=l", ["peft=lora"]),
        ("dare-lightning fit -m method=sft,coupled_grpo_", ["method=sft,coupled_grpo_dare"]),
        ("dare-lightning fit callbacks=[checkpoint,rng", ["callbacks=[checkpoint,rng_state"]),
        ("dare-lightning fit method=sft method.optimizer.l", ["method.optimizer.lr="]),
        ("dare-lightning fit +trainer.max_ep", ["+trainer.max_epochs="]),
        ("dare-lightning export overwrite=", ["overwrite=true", "overwrite=false"]),
        ("dare-lightning fit ckpt_path=", []),
        ("dare-lightning completion z", ["zsh"]),
    ],
)
def test_candidates_fit_what_was_typed(line: str, expected: list[str]) -> None:
    assert complete([line]) == expected


def test_keys_are_those_of_the_chosen_option() -> None:
    assert "method.prompt_mask_probability=" in complete(["dare-lightning fit method=d1 method.p"])
    assert "method.prompt_mask_probability=" not in complete(["dare-lightning fit method=sft method.p"])


def test_bash_completes_both_ways_of_calling(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "completion.sh").write_text(script("bash"))
    lines = f"""
        source completion.sh
        PATH="{Path(sys.executable).parent}:$PATH"
        COMP_LINE="python -m dare_lightning fit method=coupled_grpo_d"; COMP_POINT=${{#COMP_LINE}}
        COMP_WORDS=(python -m dare_lightning fit method = coupled_grpo_d); COMP_CWORD=6
        _dare_lightning_complete python
        echo "${{COMPREPLY[*]}}"
        complete -p python dare-lightning
    """
    result = subprocess.run(["bash", "-c", lines], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.stdout.splitlines()[0] == "coupled_grpo_dare"
    assert result.stdout.count("_dare_lightning_complete") == 2


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_scripts_are_valid(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "completion").write_text(script(shell))
    assert subprocess.run([shell, "-n", str(tmp_path / "completion")], capture_output=True).returncode == 0
