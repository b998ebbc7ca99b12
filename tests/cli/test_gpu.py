"""Whole runs on a GPU, against the same runs on the CPU: `pytest -m gpu -n0 -rs`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dare_lightning.cli import app

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; PyTorch finds none here"),
    pytest.mark.timeout(600),
]

ONLINE = [
    *("trainer.max_epochs=2", "trainer.check_val_every_n_epoch=1", "data.train_prompts=64", "data.val_prompts=32"),
    *("data.prompts_per_rollout=8", "data.micro_batch=64", "logger=none"),
]
OFFLINE = [
    *("method=sft", "model=new_tiny_llada", "data=sudoku_sft", "data.count=64", "data.val_count=16"),
    *("data.batch_size=16", "data.micro_batch=16", "trainer.max_epochs=1", "logger=none"),
]


def _fit(run: str, *words: str) -> dict[str, dict[str, float]]:
    """The curves of a run, point by point, from its folder."""
    assert app.main(["fit", f"run_dir={run}", *words]) == 0
    history: dict[str, dict[str, float]] = json.loads((Path(run) / "history.json").read_text())
    return history


def _weights(run: str) -> dict[str, torch.Tensor]:
    return load_file(Path(run) / "model" / "model.safetensors")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DARE_RUN_DIR", raising=False)


@pytest.mark.parametrize("words", [ONLINE, OFFLINE], ids=["online", "offline"])
def test_a_run_on_the_gpu_is_the_run_on_the_cpu(words: list[str]) -> None:
    torch.cuda.reset_peak_memory_stats()
    gpu = _fit("gpu", *words, "trainer=auto")
    assert torch.cuda.max_memory_allocated() > 0, "the run did not use the GPU"
    cpu = _fit("cpu", *words, "trainer=cpu")
    first = {name: min(points, key=int) for name, points in cpu.items()}
    for name, point in first.items():
        # Sums are rounded in another order, so that a rare draw may fall otherwise.
        assert gpu[name][point] == pytest.approx(cpu[name][point], rel=0.1, abs=0.02), name
    moved = [(_weights("gpu")[name] - weight).abs().max() for name, weight in _weights("cpu").items()]
    assert max(moved) < 0.02


def test_bfloat16_on_the_gpu_trains_with_finite_weights() -> None:
    _fit("gpu", *ONLINE, "trainer=one_gpu")
    assert all(weight.isfinite().all() for weight in _weights("gpu").values())


def test_a_run_on_the_gpu_goes_on_where_it_was_stopped() -> None:
    _fit("whole", *ONLINE, "trainer=auto")
    _fit("part", *ONLINE, "trainer=auto", "trainer.max_epochs=1")
    _fit("part", *ONLINE, "trainer=auto", "ckpt_path=part/checkpoints")
    for name, weight in _weights("whole").items():
        torch.testing.assert_close(_weights("part")[name], weight, rtol=1e-3, atol=1e-3)
