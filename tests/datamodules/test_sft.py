"""Fixed data as micro-batches: what is in them, how they divide, and that dividing changes nothing."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from dare_lightning.datamodules.chat import ANSWER_CUT_OFF, PROMPT_TOO_LONG
from dare_lightning.datamodules.sft import SFTDataModule, is_held_out
from dare_lightning.evaluation.benchmarks.sudoku import SudokuTask
from dare_lightning.families.llada import LLaDA
from dare_lightning.families.tiny import new_tiny_sdar
from dare_lightning.methods.sft import NORMALIZATIONS, SFT
from dare_lightning.replay.batch import SequenceBatch, concatenate
from tests.shared import fixture_model, shared_file
from tests.tiny import END_OF_TURN, EOS, tiny_llada


@pytest.fixture(scope="module")
def policy() -> LLaDA:
    return tiny_llada(vocab=110)


@pytest.fixture
def file(tmp_path: Path) -> str:
    return write(tmp_path, [("a" * (n % 5 + 1), "b" * (3 * n % 7 + 1)) for n in range(22)])


def write(folder: Path, rows: list[tuple[str, str]]) -> str:
    lines = [json.dumps({"prompt": prompt, "completion": answer}) for prompt, answer in rows]
    (folder / "data.jsonl").write_text("\n".join(lines))
    return str(folder / "data.jsonl")


def ready(policy: LLaDA, **settings: Any) -> SFTDataModule:
    data = SFTDataModule(policy, **{"batch_size": 8, "micro_batch": 2, "max_length": 64} | settings)
    data.setup()
    return data


def windows(data: SFTDataModule, epoch: int, rank: int = 0, world: int = 1) -> list[list[SequenceBatch]]:
    return [[make() for make in window] for window in data.windows(epoch, rank, world)]


def test_a_batch_supervises_the_answer_its_end_of_turn_and_the_end_of_text(policy: LLaDA, file: str) -> None:
    data = ready(policy, path=file, eos_fill="none")
    batch = data.make_batch(data.train[:4], (0,))
    for row in range(4):
        taught = batch.ids[row][batch.completion_mask[row]]
        assert policy.tokenizer.decode(taught) == "b" * (3 * row % 7 + 1) + "<|eot_id|><|endoftext|>"
    assert torch.equal(batch.response_mask, batch.completion_mask)
    assert not (batch.response_mask & ~batch.attention_mask).any()
    assert batch.sample_index.tolist() == [0, 1, 2, 3]


def test_padding_is_neither_attended_nor_taught_without_fill(policy: LLaDA, file: str) -> None:
    data = ready(policy, path=file, eos_fill="none")
    batch = data.make_batch(data.train[:4], (0,))
    lengths = torch.tensor([len(sample.encoded.ids) for sample in data.train[:4]])
    assert torch.equal(batch.attention_mask.sum(1), lengths)
    assert (batch.ids[~batch.attention_mask] == policy.pad_token_id).all()


@pytest.mark.parametrize("micro_batch", [1, 2, 8])
def test_batch_fill_reaches_the_longest_sequence_of_the_step_whatever_the_micro_batch(
    policy: LLaDA, file: str, micro_batch: int
) -> None:
    data = ready(policy, path=file, eos_fill="batch", micro_batch=micro_batch)
    for window in windows(data, 0):
        longest = max(len(data.train[i].encoded.ids) for part in window for i in part.sample_index.tolist())
        for part in window:
            assert part.length == longest
            assert part.attention_mask.all()
            assert (part.ids[:, -1] == EOS).all()
            assert part.completion_mask[:, -1].all()


def test_max_length_fill_reaches_the_limit(policy: LLaDA, file: str) -> None:
    data = ready(policy, path=file, eos_fill="max_length", max_length=40)
    batch = windows(data, 0)[0][0]
    assert batch.length == 40
    assert batch.completion_mask[:, -1].all()


def test_a_cut_answer_is_not_filled(policy: LLaDA, tmp_path: Path) -> None:
    data = ready(policy, path=write(tmp_path, [("a", "b" * 50), ("a", "b")]), eos_fill="max_length", max_length=40)
    cut, whole = data.train
    batch = data.make_batch([cut, whole], (0,), fill_to=45)
    assert not {EOS, END_OF_TURN} & set(batch.ids[0][batch.completion_mask[0]].tolist())
    assert batch.attention_mask.sum(1).tolist() == [40, 45]
    assert data.report is not None
    assert data.report.cut == 1


def test_dropped_rows_are_counted_by_reason_and_told(
    policy: LLaDA, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = 64 - len("<s>user:|assistant:") + 2
    rows = [("a", "b"), ("a", ""), ("", "b"), ("a" * 100, "b"), ("a" * prompt, "b")]
    data = ready(policy, path=write(tmp_path, rows))
    assert data.report is not None
    assert data.report.dropped["no answer"] == 1
    assert data.report.dropped["no prompt"] == 1
    assert data.report.dropped[PROMPT_TOO_LONG] + data.report.dropped[ANSWER_CUT_OFF] == 2
    assert data.report.kept == len(data.train) == 1
    assert "1 of 5 rows; 1 dropped: max_length removes the whole answer; 1 dropped: no answer" in caplog.text


def test_no_row_left_is_an_error_that_says_why(policy: LLaDA, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no conversation to train on.*0 of 2 rows; 2 dropped: no answer"):
        ready(policy, path=write(tmp_path, [("a", ""), ("b", "")]))


@pytest.mark.parametrize("batch_size", [4, 8, 32])
def test_every_sample_is_used_once_an_epoch_in_another_order(policy: LLaDA, file: str, batch_size: int) -> None:
    data = ready(policy, path=file, batch_size=batch_size)
    seen = [
        [i for window in windows(data, epoch) for part in window for i in part.sample_index.tolist()]
        for epoch in (0, 1)
    ]
    assert sorted(seen[0]) == sorted(seen[1]) == list(range(22))
    assert seen[0] != seen[1]


def test_ranks_share_the_samples_and_the_noise_of_one_process(policy: LLaDA, file: str) -> None:
    data = ready(policy, path=file)

    def drawn(world: int) -> list[dict[int, int]]:
        shares = [windows(data, 3, rank, world) for rank in range(world)]
        assert len({tuple(len(window) for window in share) for share in shares}) == 1
        steps = []
        for step in zip(*shares, strict=True):
            parts = [part for window in step for part in window]
            steps.append({int(i): int(s) for p in parts for i, s in zip(p.sample_index, p.noise_seed, strict=True)})
        return steps

    assert drawn(1) == drawn(2)


def test_samples_that_do_not_divide_among_the_ranks_sit_the_epoch_out(policy: LLaDA, file: str) -> None:
    data = ready(policy, path=file, batch_size=12, micro_batch=1)
    sizes = [sum(len(part) for window in windows(data, 0, rank, 4) for part in window) for rank in range(4)]
    assert sizes == [5, 5, 5, 5]


def test_noise_changes_with_the_epoch_and_the_seed(policy: LLaDA, file: str) -> None:
    def noise(seed: int, epoch: int) -> set[int]:
        step = windows(ready(policy, path=file, seed=seed), epoch)
        return {int(s) for window in step for part in window for s in part.noise_seed}

    assert len(noise(1, 0) | noise(1, 1) | noise(2, 0)) == 3 * 22


@pytest.mark.parametrize(
    ("settings", "world", "message"),
    [
        ({"batch_size": 30, "micro_batch": 4}, 2, r"batch_size=30 .*4 × 2 = 8; choose data\.batch_size=24 or 32"),
        ({"batch_size": 3, "micro_batch": 4}, 1, r"batch_size=3 .*choose data\.batch_size=4"),
    ],
)
def test_a_batch_that_does_not_divide_names_the_numbers_and_the_nearest(
    policy: LLaDA, settings: dict[str, int], world: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SFTDataModule(policy, path="x", **settings).micro_batches_per_step(world)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "either path or task, neither given"),
        ({"path": "x", "task": SudokuTask(), "count": 1}, "both given"),
        ({"task": SudokuTask()}, "count=0"),
        ({"path": "x", "eos_fill": "some"}, "eos_fill='some'; use none, batch, max_length or block"),
        ({"path": "x", "val_share": 1.0}, "val_share=1.0"),
        ({"path": "x", "micro_batch": 0}, "micro_batch=0 must be at least 1"),
    ],
)
def test_a_wrong_setting_is_refused_on_construction(policy: LLaDA, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SFTDataModule(policy, **settings)


def test_the_held_out_share_depends_on_the_row_alone(policy: LLaDA, file: str) -> None:
    one, other = (
        ready(policy, path=file, val_share=0.3, seed=seed, limit=limit) for seed, limit in ((1, None), (2, 15))
    )
    assert {s.index for s in other.heldout} == {s.index for s in one.heldout if s.index < 15}
    assert not {s.index for s in one.heldout} & {s.index for s in one.train}
    assert 0.28 < sum(is_held_out(n, 0.3) for n in range(10_000)) / 10_000 < 0.32


def test_a_held_out_file_is_read_apart(policy: LLaDA, file: str, tmp_path: Path) -> None:
    (tmp_path / "held").mkdir()
    data = ready(policy, path=file, val_path=write(tmp_path / "held", [("c", "d")] * 3), val_share=0.5)
    assert (len(data.train), len(data.heldout)) == (22, 3)


def test_held_out_noise_is_the_same_in_every_epoch(policy: LLaDA, file: str) -> None:
    data = ready(policy, path=file, val_share=0.4)
    first, second = (concatenate(list(data.val_dataloader())) for _ in range(2))
    assert torch.equal(first.noise_seed, second.noise_seed)
    assert len(first) == len(data.heldout)


def test_held_out_batches_are_filled_as_far_as_training_would(policy: LLaDA, file: str, tmp_path: Path) -> None:
    heldout = write(tmp_path, [("a", "b" * length) for length in (2, 5, 3, 4, 9, 1)])
    data = ready(policy, path=file, val_path=heldout, batch_size=4, eos_fill="batch")
    lengths = [len(sample.encoded.ids) for sample in data.heldout]
    longest = [max(lengths[:4])] * 2 + [max(lengths[4:])]
    assert [batch.ids.shape[1] for batch in data.val_dataloader()] == longest
    assert len(set(longest)) == 2


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_the_held_out_loss_is_that_of_one_batch(policy: LLaDA, file: str, normalization: Any) -> None:
    def loss(micro_batch: int) -> float:
        data = ready(policy, path=file, val_share=0.5, batch_size=8, micro_batch=micro_batch, eos_fill="none")
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        runner = L.Trainer(accelerator="cpu", enable_model_summary=False, **quiet)  # type: ignore[arg-type]
        module = SFT(policy=policy, optimizer=partial(torch.optim.SGD, lr=0.1), normalization=normalization, samples=2)
        return runner.validate(module, datamodule=data, verbose=False)[0]["val/loss"]

    assert loss(1) == pytest.approx(loss(8), rel=1e-5)


def test_nothing_held_out_means_no_validation_batches(policy: LLaDA, file: str) -> None:
    assert len(ready(policy, path=file).val_dataloader()) == 0


def test_compact_sudoku_answers_are_sixteen_digits_and_an_end_token(policy: LLaDA) -> None:
    task = SudokuTask(form="compact")
    data = ready(policy, task=task, count=20, val_count=5, append_eos=False, eos_fill="none")
    assert data.report is not None
    assert set(data.report.answer_tokens) == {17}
    assert (len(data.train), len(data.heldout)) == (20, 5)


def test_a_template_file_is_used(policy: LLaDA, file: str, tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}{{ m.content }}|{% endfor %}")
    data = ready(tiny_llada(vocab=110), path=file, chat_template=str(tmp_path / "chat.jinja"))
    assert policy.tokenizer.decode(data.train[0].encoded.ids) == "a|b<|endoftext|>"


def test_the_real_gsm8k_file_is_encoded_whole(policy: LLaDA) -> None:
    llada = LLaDA.from_pretrained(str(fixture_model("llada-tiny-a")))
    data = ready(llada, path=str(shared_file("data/sft/train/gsm8k.parquet")), limit=200, max_length=4096)
    assert len(data.train) == 200
    assert data.report is not None
    assert (data.report.layout, data.report.dropped.total(), data.report.cut) == ("verl", 0, 0)
    batch = data.make_batch(data.train[:2], (0,))
    answer = llada.tokenizer.decode(batch.ids[0][batch.completion_mask[0]])
    assert answer.endswith("#### 72<|eot_id|><|endoftext|>")


class Recorder(L.Callback):
    """Notes which samples each micro-batch holds, and saves one checkpoint."""

    def __init__(self, save_at: int, path: Path | None) -> None:
        self.save_at, self.path = save_at, path
        self.seen: list[list[int]] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch.sample_index.tolist())
        if self.path is not None and len(self.seen) == self.save_at:
            trainer.save_checkpoint(self.path)


def trained(
    file: str, micro_batch: int, recorder: Recorder | None = None, ckpt_path: Path | None = None, **settings: Any
) -> tuple[dict[str, torch.Tensor], L.Trainer]:
    policy = tiny_llada(vocab=110, dtype=torch.float64)
    data = SFTDataModule(policy, path=file, max_length=64, batch_size=8, micro_batch=micro_batch, **settings)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=2,
        accumulate_grad_batches=data.micro_batches_per_step(1),
        callbacks=[recorder or Recorder(0, None)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )
    module = SFT(policy=policy, optimizer=partial(torch.optim.SGD, lr=0.1))
    trainer.fit(module, datamodule=data, ckpt_path=None if ckpt_path is None else str(ckpt_path))
    return policy.state_dict(), trainer


def test_splitting_a_step_into_micro_batches_does_not_change_the_update(file: str) -> None:
    whole, trainer = trained(file, 8, val_share=0.2)
    split, _ = trained(file, 1, val_share=0.2)
    assert trainer.global_step == 2 * 3  # the last window of an epoch is shorter
    assert torch.isfinite(trainer.callback_metrics["val/loss"])
    torch.testing.assert_close(split, whole, rtol=0, atol=1e-9)


@pytest.mark.parametrize("save_at", [2, 6, 8], ids=["first_epoch", "epoch_end", "second_epoch"])
def test_a_resumed_run_sees_the_remaining_samples_and_ends_with_the_same_weights(
    file: str, tmp_path: Path, save_at: int
) -> None:
    first = Recorder(save_at, tmp_path / "saved.ckpt")
    whole, _ = trained(file, 4, first)
    rest = Recorder(0, None)
    resumed, trainer = trained(file, 4, rest, ckpt_path=first.path)
    assert trainer.global_step == 2 * 3
    assert rest.seen == first.seen[save_at:]
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)


def test_the_last_block_of_a_complete_answer_is_filled_and_taught(policy: LLaDA, tmp_path: Path) -> None:
    blocks = new_tiny_sdar(layers=1, width=16, heads=2, block_length=8)
    path = write(tmp_path, [("a", "b" * n) for n in (1, 2, 3, 90)])
    data = ready(blocks, path=path, eos_fill="block", val_share=0.0, batch_size=4)  # type: ignore[arg-type]
    for sample in data.train[:3]:
        ids, plain = sample.encoded.ids, len(sample.encoded.ids) - sample.encoded.ids.count(EOS)
        assert len(ids) % 8 == 0
        assert len(ids) - plain <= 8
        assert all(sample.encoded.supervised[plain:])
    assert len(data.train[3].encoded.ids) == 64
    with pytest.raises(ValueError, match="eos_fill=block needs a block-diffusion policy, LLaDA has no blocks"):
        ready(policy, path=path, eos_fill="block", val_share=0.0)
