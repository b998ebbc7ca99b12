"""Token log-probs of any policy: what is run, and what is held in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dare_lightning.families import base
from dare_lightning.families.base import token_log_probs
from tests.tiny import MASK, tiny_llada


@pytest.fixture
def rows() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    clean = torch.randint(5, 35, (5, 12), generator=draw)
    exists = torch.ones(5, 12, dtype=torch.bool)
    exists[:, :2] = False
    exists[1, :4] = False
    exists[:, 11] = False
    hidden = (torch.rand(5, 12, generator=draw) < 0.5) & exists
    return {
        "noisy_ids": clean.masked_fill(hidden, MASK),
        "clean_ids": clean,
        "attention_mask": exists,
        "score_mask": hidden,
    }


def _gradient(policy: Any, scored: Tensor) -> Tensor:
    policy.zero_grad()
    (scored * torch.arange(scored.numel()).view_as(scored)).sum().backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters()])


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_output_head_in_pieces_gives_the_same_values_and_gradients(
    rows: dict[str, Tensor], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tiny_llada(dtype=torch.float64)
    whole = token_log_probs(policy, **rows, temperature=temperature)
    wanted = _gradient(policy, whole)
    sizes = []
    head = policy.logits
    policy.logits = lambda hidden: (sizes.append(len(hidden)), head(hidden))[1]  # type: ignore[method-assign]
    monkeypatch.setattr(base, "MAX_LOGITS", 3 * 40)
    pieces = token_log_probs(policy, **rows, temperature=temperature)
    torch.testing.assert_close(pieces, whole)
    torch.testing.assert_close(_gradient(policy, pieces), wanted)
    assert max(sizes) == 3


def test_rows_and_columns_that_score_nothing_are_not_run(rows: dict[str, Tensor]) -> None:
    policy = tiny_llada(dtype=torch.float64)
    whole = token_log_probs(policy, **rows)
    rows["score_mask"][[0, 3, 4]] = False
    shapes = []
    run = policy.hidden_states
    policy.hidden_states = lambda ids, mask=None: (shapes.append(tuple(ids.shape)), run(ids, mask))[1]  # type: ignore[method-assign]
    part = token_log_probs(policy, **rows)
    assert shapes == [(2, 9)]
    torch.testing.assert_close(part[[1, 2]], whole[[1, 2]])
    assert not part[[0, 3, 4]].any()


def test_nothing_to_score_still_gives_every_parameter_a_gradient_of_zero(rows: dict[str, Tensor]) -> None:
    policy = tiny_llada()
    rows["score_mask"][:] = False
    scored = token_log_probs(policy, **rows)
    assert not scored.any()
    assert not _gradient(policy, scored).any()
