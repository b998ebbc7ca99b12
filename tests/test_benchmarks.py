"""The benchmarks compare what computes the same, and refuse what does not."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as program
from benchmarks import block, compare, decoding, packing, rows, startup, training, widened
from dare_lightning.families.tiny import new_tiny_sdar
from dare_lightning.generation.block import BlockBackend
from dare_lightning.generation.block_steps import MostConfident
from dare_lightning.generation.engine import Stats
from dare_lightning.methods.coupled_grpo import CoupledGRPO
from dare_lightning.methods.sft import SFT
from tests.peak import measured
from tests.tiny import tiny_llada


def test_baseline_and_measured_step_agree_in_every_training_case() -> None:
    policy = tiny_llada()
    method = CoupledGRPO(policy, partial(torch.optim.AdamW, lr=1e-3))
    batch = training.rollout(policy, prompts=2, longest=12, answer=4)
    for pair in (
        training._trimmed(method, batch),
        training._attention(method, batch),
        training._distinct(policy, batch),
    ):
        result = training.compare("case", *pair, repeats=1)
        assert result["speedup"] == pytest.approx(result["baseline"] / result["measured"])


def test_the_plain_supervised_step_computes_the_methods_loss() -> None:
    policy = tiny_llada(vocab=512)
    method = SFT(policy, partial(torch.optim.AdamW, lr=1e-3))
    batch = packing.padded_batch(policy, [(5, 7), (9, 12), (4, 3)])
    plain = packing.plain_step(policy, method, batch)
    for attention in ("sdpa", "varlen"):
        torch.testing.assert_close(packing.our_step(policy, method, batch, attention), plain)


def test_plain_block_decoding_and_scoring_compute_the_same() -> None:
    policy = new_tiny_sdar(layers=1, width=16, heads=2).double()
    backend = BlockBackend(9, steps=MostConfident(), early_stop="never")
    backend.update_weights(policy, 0)
    prompts = [[9, 8, 7], [12, 9, 30, 31, 11]]
    batch = backend.generate(prompts, [0, 0])
    for row, plain in enumerate(block.plain_decode(policy, prompts, 9)):
        assert batch.ids[row, batch.attention_mask[row]].tolist() == plain.tolist()
    method = SFT(policy, partial(torch.optim.SGD, lr=0.1), level_scope="block", samples=2)
    rows = method.corrupt(batch)
    found = method.row_log_probs(policy, rows, batch)
    torch.testing.assert_close(block.plain_log_probs(policy, rows, batch), found)


def test_pieces_of_the_head_take_less_memory_than_all_logits() -> None:
    whole, pieces = (measured("memory", 16_000, flag, 2048) for flag in (False, True))
    assert pieces < 0.9 * whole


@pytest.mark.parametrize("name", rows.METHODS)
def test_both_gradient_plans_of_the_memory_benchmark_take_the_same_step(name: str) -> None:
    losses, gradients = [], []
    for single in (True, False):
        policy = tiny_llada(layers=1, width=16, heads=2, vocab=200)
        method, batch = rows.prepared(name, policy, 4, single)
        assert method.corrupt(batch).count == 4
        losses.append(rows.step(method, batch))
        gradients.append({key: value.grad for key, value in policy.named_parameters()})
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_a_step_of_many_rows_takes_the_memory_of_few() -> None:
    few, many, single = (measured("rows", "cj_grpo", *point) for point in ((4, False), (16, False), (16, True)))
    assert many < 1.5 * few
    assert single > 3 * many


def test_steps_with_different_losses_are_not_compared() -> None:
    with pytest.raises(AssertionError):
        training.compare("case", lambda: torch.tensor(1.0), lambda: torch.tensor(2.0), repeats=1)


def test_the_program_names_the_machine_and_writes_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [startup._result("help", [startup.Start(1.0, 0.9), startup.Start(0.5, 0.4), startup.Start(0.75, 0.25)])]
    monkeypatch.setitem(program.GROUPS, "startup", lambda quick: found)
    assert program.main(["--only", "startup", "--json", str(tmp_path / "out.json")]) == 0
    shown = capsys.readouterr().out
    assert "processor" in shown
    assert "| help (0.4 s of processor time) | 3 | 0.75 | 4.00x |" in shown
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["results"] == {"startup": found}
    assert written["machine"]["torch"] == torch.__version__


def test_a_slow_case_is_not_repeated_and_a_start_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "ENOUGH", 0.0)
    assert len(startup._repeated(lambda: startup.Start(1.0, 1.0), 3)) == 1
    monkeypatch.setattr(startup, "PATIENCE", 0.2)
    assert 0.2 < startup._first_step().clock < 20


def test_an_unknown_group_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.main(["--only", "sampling"])
    assert ", ".join(program.GROUPS) in capsys.readouterr().err


def test_a_widened_policy_computes_what_the_small_one_computes() -> None:
    small = tiny_llada(layers=2, width=32, heads=2, vocab=40)
    wide = widened.widened(small, layers=3, width=64, vocabulary=90)
    ids = torch.randint(5, 40, (3, 11))
    logits = wide(ids)
    torch.testing.assert_close(logits[..., :40], small(ids), rtol=1e-4, atol=1e-4)
    assert logits[..., 40:].max() < logits[..., :40].min()


def _finished_run(folder: Path, seed: int, method: str, scores: list[float]) -> None:
    (folder / "csv").mkdir(parents=True)
    (folder / "overrides.txt").write_text(f"method={method}\nseed={seed}\n")
    columns = "epoch,step,cost/passes,cost/rollout_passes,cost/training_passes,cost/tokens,val/solve_rate"
    lines = [columns, f"0,0,,,,,{scores[0]}"]
    for step, score in enumerate(scores[1:]):
        lines += [f"{step},{step},,,,,{score}", f"{step},{step},{100 * (step + 1)},{60},{40},{7},"]
    (folder / "csv" / "metrics.csv").write_text("\n".join(lines) + "\n")


def test_runs_are_compared_by_method_at_the_passes_they_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _finished_run(tmp_path / "0", 1, "d1", [0.1, 0.2, 0.4])
    _finished_run(tmp_path / "1", 2, "d1", [0.1, 0.3, 0.2])
    _finished_run(tmp_path / "2", 1, "espo", [0.1, 0.1, 0.05])
    found = compare.find_runs([tmp_path])
    assert list(found) == ["d1", "espo"]
    assert found["d1"][0].curve == ((0.0, 0.1), (100.0, 0.2), (200.0, 0.4))
    assert found["d1"][0].at(150) == pytest.approx(0.3)
    assert compare.main([str(tmp_path), "--plot", str(tmp_path / "plot.png")]) == 0
    assert "| `d1` | 0.100 | 0.300 | +0.200 | 0.141 | 1: +0.300, 2: +0.100 | 2 | 60 + 40 |" in capsys.readouterr().out
    assert (tmp_path / "plot.png").stat().st_size > 0


def test_an_unfinished_run_is_named(tmp_path: Path) -> None:
    _finished_run(tmp_path / "0", 1, "d1", [0.1])
    with pytest.raises(ValueError, match="1 held-out scores and 0 costs"):
        compare.find_runs([tmp_path])


def test_the_plain_and_the_built_in_decoder_write_the_same_one_token_a_step() -> None:
    policy = tiny_llada(layers=1, width=16, heads=2).eval()
    prompts = [[5, 6, 7], [9, 8, 7], [6, 6]]
    plain, _ = decoding._plain(policy, prompts, 6, 6, Stats())
    ours, _, stats = decoding._ours(policy, prompts, 6, {"steps": 6})
    assert torch.equal(plain, ours)
    assert stats.forwards == 6
