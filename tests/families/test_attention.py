"""Packing, views and caches: the same numbers as the plain pass, for every family."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dare_lightning.families import attention, flex
from dare_lightning.families.attention import KeyValueCache, Packing, View
from dare_lightning.families.base import using_attention
from dare_lightning.families.tiny import new_tiny_dream, new_tiny_llada, new_tiny_llada_moe, new_tiny_sdar

POLICIES = {"llada": new_tiny_llada, "dream": new_tiny_dream, "llada_moe": new_tiny_llada_moe}


@pytest.fixture(params=POLICIES, ids=POLICIES)
def policy(request: pytest.FixtureRequest) -> Any:
    return POLICIES[request.param](layers=2, width=32, heads=2).double()


def _ids(samples: int, length: int) -> Tensor:
    return torch.randint(7, 40, (samples, length), generator=torch.Generator().manual_seed(0))


def _ragged() -> tuple[Tensor, Tensor]:
    exists = torch.ones(4, 11, dtype=torch.bool)
    exists[0, :3] = False
    exists[2, 6:] = False
    exists[3, :3] = False
    return _ids(4, 11), exists


@pytest.mark.parametrize("attention", ["eager", "varlen"])
def test_every_kernel_gives_the_same_states_and_gradients(policy: Any, attention: str) -> None:
    ids, exists = _ragged()
    weight = torch.randn(4, 11, 32, dtype=torch.float64) * exists[..., None]
    found = []
    for name in ("sdpa", attention):
        policy.zero_grad()
        with using_attention(policy, name):
            hidden = policy.hidden_states(ids, exists)
        (hidden * weight).sum().backward()
        gradients = [p.grad for _, p in policy.named_parameters() if p.grad is not None]
        found.append((hidden[exists], torch.cat([g.flatten() for g in gradients])))
    torch.testing.assert_close(found[1][0], found[0][0])
    torch.testing.assert_close(found[1][1], found[0][1])


def test_flex_gives_the_same_states_and_refuses_gradients_on_the_cpu(policy: Any) -> None:
    ids, exists = _ragged()
    with torch.no_grad():
        plain = policy.hidden_states(ids, exists)
        with using_attention(policy, "flex"):
            flexed = policy.hidden_states(ids, exists)
    torch.testing.assert_close(flexed[exists], plain[exists])
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(".0." in name and "v_proj" in name)  # as under an adapter of the values alone
    with using_attention(policy, "flex"), pytest.raises(ValueError, match="no backward pass on the CPU"):
        policy.hidden_states(ids, exists)


def test_packed_rows_hold_no_padding() -> None:
    ids, exists = _ragged()
    packing = Packing.of(exists)
    assert packing.pack(ids).shape == (1, int(exists.sum()))
    assert packing.lengths == (8, 11, 6, 8)
    assert packing.positions[:9].tolist() == [*range(8), 0]
    spread = packing.unpack(packing.pack(ids)[..., None].double())[..., 0]
    assert torch.equal(spread, ids.double() * exists)


@torch.no_grad()
def test_a_pass_over_a_piece_with_a_fresh_cache_is_the_pass_over_all(policy: Any) -> None:
    ids, exists = _ids(3, 12), torch.ones(3, 12, dtype=torch.bool)
    exists[1, :2] = False
    positions = (exists.cumsum(1) - 1).clamp_min(0)
    cache, rows = KeyValueCache(3, 12), torch.arange(3)
    columns = torch.arange(12).expand(3, -1)
    whole = policy.hidden_states(ids, view=View(positions, exists[:, None], cache, rows, columns))
    # The first token of a sequence has none before it, and no family is asked for it.
    later = exists & (exists.cumsum(1) > 1)
    torch.testing.assert_close(whole[later], policy.hidden_states(ids, exists)[later])
    # Each row reads a piece of its own, in another order of rows, with what the family needs on its left.
    chosen = torch.tensor([2, 0])
    piece = torch.tensor([[4], [7]]) + torch.arange(-policy.left_context, 4)
    view = View(positions[chosen].gather(1, piece), exists[chosen][:, None], cache, chosen, piece)
    part = policy.hidden_states(ids[chosen].gather(1, piece), view=view)[:, policy.left_context :]
    wanted = torch.stack([whole[2, 4:8], whole[0, 7:11]])
    torch.testing.assert_close(part, wanted)


@torch.no_grad()
def test_what_a_piece_writes_is_what_later_passes_read(policy: Any) -> None:
    ids = _ids(1, 8)
    cache, rows = KeyValueCache(1, 8), torch.zeros(1, dtype=torch.int64)
    columns = torch.arange(8)[None]
    policy.hidden_states(ids, view=View(columns, None, cache, rows, columns))
    changed = ids.clone()
    changed[0, 6] = 8 + (ids[0, 6] == 8)
    tail = columns[:, 5:]
    policy.hidden_states(changed[:, 5:], view=View(tail, None, cache, rows, tail))
    head = columns[:, :3]
    before = policy.hidden_states(ids)[:, :3]
    after = policy.hidden_states(ids[:, :3], view=View(head, None, cache, rows, head))
    assert (after - before).abs().max() > 1e-6


@torch.no_grad()
def test_a_view_hides_keys_from_single_tokens(policy: Any) -> None:
    ids = _ids(2, 6)
    positions = torch.arange(6).expand(2, -1)
    visible = torch.ones(2, 6, 6, dtype=torch.bool)
    visible[:, :4, 4:] = False
    hidden = policy.hidden_states(ids, view=View(positions, visible))
    torch.testing.assert_close(hidden[:, :4], policy.hidden_states(ids[:, :4]))


def test_queries_keys_and_values_have_one_dtype_under_autocast(policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    kernel = attention.sdpa

    def spy(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        seen.append({q.dtype, k.dtype, v.dtype})
        return kernel(q, k, v, bias)

    monkeypatch.setitem(attention.KERNELS, "sdpa", partial(attention._Masked, spy))
    with torch.autocast("cpu", torch.bfloat16):
        policy.float().hidden_states(_ids(2, 5))
    assert seen == [{torch.bfloat16}] * 2


@torch.no_grad()
def test_a_flex_mask_is_prepared_once_for_a_shape_and_again_where_it_shows_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []
    create = flex._create
    monkeypatch.setattr(flex, "_MASKS", OrderedDict())
    monkeypatch.setattr(flex, "_create", lambda *given: made.append(given) or create(*given))
    for policy in (new_tiny_llada(layers=2, width=32, heads=2), new_tiny_sdar(layers=2, width=32, heads=2)):
        ids, exists = _ragged()
        made.clear()
        with using_attention(policy, "flex"):
            first = policy.hidden_states(ids, exists)
            again = policy.hidden_states(ids.flip(0), exists)
            assert len(made) == 1
            assert not torch.equal(first, again)
            shifted = policy.hidden_states(ids, exists.roll(1, 1))
            assert len(made) == 2
        plain = policy.hidden_states(ids, exists.roll(1, 1))
        torch.testing.assert_close(shifted[exists.roll(1, 1)], plain[exists.roll(1, 1)])


@torch.no_grad()
@pytest.mark.parametrize("length", [127, 128, 129])
def test_flex_fills_up_to_whole_tiles_and_shows_the_filling_to_nobody(policy: Any, length: int) -> None:
    ids = _ids(2, length)
    with using_attention(policy, "flex"):
        found = policy.hidden_states(ids)
    torch.testing.assert_close(found, policy.hidden_states(ids))


def test_prepared_masks_are_given_up_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_MASKS", OrderedDict())
    for rows in range(1, flex.KEPT + 3):
        flex.prepared(torch.ones(rows, 5, dtype=torch.bool), rows, 5, 5, torch.device("cpu"))
    assert [key[1] for key in flex._MASKS] == list(range(3, flex.KEPT + 3))
