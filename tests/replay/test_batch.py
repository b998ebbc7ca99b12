from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dare_lightning.replay.batch import TOKEN_COLUMNS, SequenceBatch, concatenate


def batch(samples: int = 2, length: int = 5, start: int = 0) -> SequenceBatch:
    """Two columns of prompt, the rest response; every value is its own."""
    ids = start + torch.arange(samples * length).view(samples, length)
    exists = torch.ones(samples, length, dtype=torch.bool)
    response = torch.arange(length).expand(samples, length) >= 2
    return SequenceBatch(
        ids=ids,
        attention_mask=exists,
        response_mask=response,
        completion_mask=response.clone(),
        noise_seed=start + torch.arange(samples),
        sample_index=start + torch.arange(samples),
        advantage=torch.arange(samples).float(),
        old_log_probs=-torch.ones(samples, 2, 3, length),
        commit_step=torch.zeros(samples, length, dtype=torch.int64),
    )


def test_select_takes_rows_of_every_column_in_the_asked_order() -> None:
    whole = replace(batch(4), iteration=1, denominator=torch.tensor([7.0]))
    chosen = whole.select(torch.tensor([2, 0]))
    for name, column in chosen.columns():
        assert torch.equal(column, dict(whole.columns())[name][[2, 0]]), name
    assert chosen.iteration == 1
    assert chosen.denominator is not None
    assert chosen.denominator.item() == 7
    assert len(whole.select(slice(1, 3))) == 2


def test_trim_drops_columns_that_no_row_uses() -> None:
    padded = batch(2, 6)
    padded.attention_mask[:, 0] = False
    padded.attention_mask[:, 5] = False
    padded.attention_mask[0, 4] = False
    trimmed = padded.trim()
    assert trimmed.length == 4
    assert torch.equal(trimmed.ids, padded.ids[:, 1:5])
    assert trimmed.old_log_probs is not None
    assert trimmed.old_log_probs.shape == (2, 2, 3, 4)
    assert torch.equal(trimmed.noise_seed, padded.noise_seed)


def test_trim_keeps_unused_columns_in_between_and_batches_without_tokens() -> None:
    gap = batch(1, 5)
    gap.attention_mask[:, 2] = False
    assert gap.trim().length == 5
    gap.attention_mask[:] = False
    assert gap.trim().length == 5


def test_concatenate_pads_each_column_with_what_padding_means_there() -> None:
    short, long = batch(1, 3), batch(2, 5, start=100)
    joined = concatenate([replace(short, denominator=torch.ones(1)), long])
    assert joined.ids.shape == (3, 5)
    assert joined.sample_index.tolist() == [0, 100, 101]
    for name, column in joined.columns():
        if name in TOKEN_COLUMNS:
            assert (column[0, ..., 3:] == TOKEN_COLUMNS[name]).all(), name
            assert torch.equal(column[1:], dict(long.columns())[name]), name
    assert joined.denominator is None


def test_concatenate_undoes_a_split_into_rows() -> None:
    whole = batch(4)
    joined = concatenate([whole.select(part) for part in torch.arange(4).split(3)])
    for name, column in joined.columns():
        assert torch.equal(column, dict(whole.columns())[name]), name


def test_concatenate_refuses_nothing_and_unlike_batches() -> None:
    with pytest.raises(ValueError, match="empty list"):
        concatenate([])
    with pytest.raises(ValueError, match="different columns; the first has.*old_log_probs"):
        concatenate([batch(), replace(batch(), old_log_probs=None)])


def test_prompt_is_what_exists_and_was_not_written() -> None:
    one = batch(1, 5)
    one.attention_mask[0, 0] = False
    assert one.prompt_mask.tolist() == [[False, True, False, False, False]]


def test_to_moves_the_denominator_too() -> None:
    moved = replace(batch(), denominator=torch.ones(1)).to("meta")
    assert moved.denominator is not None
    assert {t.device.type for t in (moved.denominator, *(c for _, c in moved.columns()))} == {"meta"}


def test_batches_of_different_numbers_of_forward_passes_are_padded_after_the_last_pass() -> None:
    short = replace(batch(1, 4), states=torch.full((1, 2, 4), 3), step_rewards=torch.ones(1, 2))
    long = replace(batch(2, 5), states=torch.full((2, 3, 5), 7), step_rewards=torch.ones(2, 3))
    joined = concatenate([short, long])
    assert joined.states is not None
    assert joined.step_rewards is not None
    assert joined.states.shape == (3, 3, 5)
    assert joined.states[0].tolist() == [[3, 3, 3, 3, 0], [3, 3, 3, 3, 0], [0] * 5]
    assert joined.step_rewards.tolist() == [[1, 1, 0], [1, 1, 1], [1, 1, 1]]
