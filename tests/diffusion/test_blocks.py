"""Blocks: how they are numbered, and which tokens the samplers by block hide."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from dare_lightning.diffusion.blocks import block_index, draw_all_blocks, draw_random_block, stratified_cells
from dare_lightning.diffusion.corruption import bounded_counts

EXISTS = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]]).bool()
RESPONSE = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1, 0], [0, 0, 0, 0, 1, 1, 1, 1, 1, 1]]).bool()


def _seeds(count: int) -> Tensor:
    return torch.arange(count) + 1000


def test_blocks_count_from_the_prompt_or_from_the_response() -> None:
    everything = block_index(EXISTS, RESPONSE, 4, "global")
    assert everything.tolist() == [[-1, 0, 0, 0, 0, 1, 1, 1, 1, -1], [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]]
    response = block_index(EXISTS, RESPONSE, 4, "response")
    assert response.tolist() == [[-1, 0, 0, 1, 1, 1, 1, 2, 2, -1], [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]]


def test_unknown_origins_and_empty_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="block_origin='prompt'; use global or response"):
        block_index(EXISTS, RESPONSE, 4, "prompt")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="block_length=0 must be at least 1"):
        block_index(EXISTS, RESPONSE, 0, "global")


def test_every_block_hides_a_share_of_its_tokens_that_its_level_says() -> None:
    blocks = block_index(EXISTS, RESPONSE, 4, "global")
    drawn = draw_all_blocks(RESPONSE, blocks, _seeds(2), rows=5)
    assert not (drawn.mask & ~RESPONSE[:, None]).any()
    assert not drawn.level[~RESPONSE[:, None].expand_as(drawn.level)].any()
    for sample, row in product(range(2), range(5)):
        for block in blocks[sample][RESPONSE[sample]].unique():
            own = RESPONSE[sample] & (blocks[sample] == block)
            hidden, size = int(drawn.mask[sample, row][own].sum()), int(own.sum())
            assert 1 <= hidden <= size
            torch.testing.assert_close(drawn.level[sample, row][own], torch.full((size,), hidden / size))


def test_counts_of_a_block_are_uniform_and_its_tokens_equally_likely() -> None:
    samples = 3000
    maskable = torch.ones(samples, 6, dtype=torch.bool)
    blocks = torch.tensor([0, 0, 0, 0, 1, 1]).expand(samples, -1)
    drawn = draw_all_blocks(maskable, blocks, _seeds(samples), rows=2).mask
    for own, size in ((slice(0, 4), 4), (slice(4, 6), 2)):
        for row in range(2):
            counts = drawn[:, row, own].sum(-1).bincount(minlength=size + 1)[1:] / samples
            torch.testing.assert_close(counts, torch.full((size,), 1 / size), atol=0.04, rtol=0)
        share = drawn[:, :, own].float().mean((0, 1))
        torch.testing.assert_close(share, torch.full((size,), (size + 1) / (2 * size)), atol=0.04, rtol=0)


def test_levels_are_spread_evenly_over_the_cells_of_a_sample() -> None:
    cells = stratified_cells(torch.tensor([0.05, 0.9], dtype=torch.float64), 3, torch.tensor([2, 1]))
    first = cells[0].flatten().sort().values
    torch.testing.assert_close(first.diff(), torch.full((5,), 1 / 6, dtype=torch.float64))
    second = cells[1, :, 0].sort().values
    torch.testing.assert_close(second.diff(), torch.full((2,), 1 / 3, dtype=torch.float64))


def test_draws_by_block_depend_on_the_sample_alone() -> None:
    blocks = block_index(EXISTS, RESPONSE, 4, "global")
    state = torch.get_rng_state()
    whole = draw_all_blocks(RESPONSE, blocks, _seeds(2), (3,), rows=4).mask
    alone = draw_all_blocks(RESPONSE[1:], blocks[1:], _seeds(2)[1:], (3,), rows=4).mask
    assert torch.equal(whole[1:], alone)
    assert not torch.equal(whole, draw_all_blocks(RESPONSE, blocks, _seeds(2), (4,), rows=4).mask)
    assert torch.equal(torch.get_rng_state(), state)


def _worked(rows: int = 2, **settings: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Masks [400, rows, 17] of a response of 13 tokens, of which 10 count, in blocks of 4 after a prompt of 4."""
    samples = 400
    column = torch.arange(17)
    prompt, response, counted = column < 4, column >= 4, (column >= 4) & (column < 14)
    masks = draw_random_block(
        response.expand(samples, -1),
        counted.expand(samples, -1),
        prompt.expand(samples, -1),
        _seeds(samples),
        rows=rows,
        block_length=4,
        **settings,  # type: ignore[arg-type]
    )
    return masks.mask, masks.level, counted, prompt


def test_what_follows_the_block_at_work_is_hidden_and_what_precedes_it_is_not() -> None:
    mask, _, counted, prompt = _worked(context_probability=0.0)
    assert not mask[..., prompt].any()
    assert mask[..., ~prompt & ~counted].all()
    blocks = mask[..., counted][..., :8].unflatten(-1, (2, 4)).sum(-1)  # the third block has two tokens
    last = mask[..., 12:14].sum(-1)
    # Either block 0 is at work, or 1 after a clean 0, or 2 after two clean ones.
    first = (blocks[..., 0] > 0) & (blocks[..., 1] == 4) & (last == 2)
    second = (blocks[..., 0] == 0) & (blocks[..., 1] > 0) & (last == 2)
    third = (blocks == 0).all(-1) & (last > 0)
    assert ((first.int() + second.int() + third.int()) == 1).all()
    # Four blocks of the room modulo three with counted tokens: the first is at work twice as often.
    for at_work, share in ((first, 0.5), (second, 0.25), (third, 0.25)):
        assert float(at_work.float().mean()) == pytest.approx(share, abs=0.06)


def test_the_rows_of_a_sample_work_on_different_blocks_of_its_room() -> None:
    mask, _, _, _ = _worked(rows=4, context_probability=0.0)
    at_work = (~mask[..., 4:14]).sum(-1)  # what precedes and what is left of the block at work
    assert all(len(set(rows.tolist())) > 1 for rows in at_work)


def test_the_context_is_hidden_with_its_probability_and_the_level_is_the_share_of_the_completion() -> None:
    mask, level, counted, prompt = _worked(context_probability=0.25)
    assert float(mask[..., prompt].float().mean()) == pytest.approx(0.25, abs=0.04)
    torch.testing.assert_close(level, mask[..., counted].float().mean(-1))


def test_the_share_of_a_block_stays_in_its_range() -> None:
    u = torch.linspace(0, 0.999, 50, dtype=torch.float64)
    assert bounded_counts(u, torch.tensor(8), 0.25, 0.5).unique().tolist() == [2, 3, 4]
    assert bounded_counts(u, torch.tensor(8)).unique().tolist() == list(range(1, 9))
    assert bounded_counts(u, torch.tensor(1), 0.0, 0.0).unique().tolist() == [1]
    assert bounded_counts(u, torch.tensor(0)).unique().tolist() == [0]
