"""Attention kernels, rotary positions and normalisation."""

from __future__ import annotations

import math

import pytest
import torch

from dare_lightning.families import attention, layers


@pytest.mark.parametrize("name", attention.KERNELS)
def test_attention_ignores_masked_keys(name):
    q, k, v = torch.randn(3, 2, 4, 6, 8, dtype=torch.float64).unbind(0)
    mask = torch.tensor([[True] * 4 + [False] * 2, [True] * 6])
    whole = attention.bound_kernel(name, mask)(q, k, v)
    torch.testing.assert_close(whole[:1], attention.bound_kernel(name, None)(q[:1], k[:1, :, :4], v[:1, :, :4]))
    torch.testing.assert_close(whole[1:], attention.bound_kernel(name, None)(q[1:], k[1:], v[1:]))


@pytest.mark.parametrize("name", attention.KERNELS)
def test_a_row_without_keys_is_finite(name):
    q, k, v = torch.randn(3, 1, 2, 3, 4).unbind(0)
    assert attention.bound_kernel(name, torch.zeros(1, 3, dtype=torch.bool))(q, k, v).isfinite().all()


@pytest.mark.parametrize("name", attention.KERNELS)
def test_query_heads_share_key_heads_in_consecutive_groups(name):
    q = torch.randn(1, 4, 3, 2, dtype=torch.float64)
    k, v = torch.randn(2, 1, 2, 3, 2, dtype=torch.float64).unbind(0)
    grouped = attention.bound_kernel(name, None)(q, k, v)
    for head in range(4):
        own = slice(head // 2, head // 2 + 1)
        torch.testing.assert_close(
            grouped[:, head : head + 1], attention.bound_kernel(name, None)(q[:, head : head + 1], k[:, own], v[:, own])
        )


def test_an_unknown_kernel_names_the_known_ones():
    with pytest.raises(ValueError, match="'flash'.*eager, sdpa, flex, varlen"):
        attention.check_attention("flash")


def test_rotation_by_hand():
    # Head size 2, position 1: one angle of 1 radian.
    cos, sin = layers.rotary_tables(torch.tensor([1]), 2, 10000.0, torch.float64)
    turned = layers.rotate(torch.tensor([[[[1.0, 0.0]]]], dtype=torch.float64), cos, sin)
    torch.testing.assert_close(turned.flatten(), torch.tensor([math.cos(1), math.sin(1)], dtype=torch.float64))


def test_rotated_products_depend_on_distance_alone():
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).unbind(0)

    def product(at_q: int, at_k: int) -> torch.Tensor:
        turn = [layers.rotary_tables(torch.tensor([at]), 8, 100.0, torch.float64) for at in (at_q, at_k)]
        return (layers.rotate(q, *turn[0]) * layers.rotate(k, *turn[1])).sum()

    torch.testing.assert_close(product(5, 2), product(105, 102))
    assert (product(5, 2) - product(5, 3)).abs() > 1e-3


def test_the_norm_multiplies_its_weight_after_rounding():
    norm = layers.RMSNorm(64, 1e-5).to(torch.bfloat16)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
    assert torch.equal(norm(x), wide.to(torch.bfloat16) * norm.weight)


def test_no_mask_is_needed_where_every_token_exists():
    assert attention.needed_key_mask(torch.ones(2, 3, dtype=torch.bool)) is None
    partial = torch.tensor([[True, False]])
    assert attention.needed_key_mask(partial) is not None


def test_narrow_tables_turn_the_first_dimensions_alone():
    tables = layers.rotary_tables(torch.tensor([1]), 2, 10000.0, torch.float64)
    turned = layers.rotate(torch.tensor([[[[1.0, 0.0, 5.0, 6.0]]]], dtype=torch.float64), *tables)
    torch.testing.assert_close(
        turned.flatten(), torch.tensor([math.cos(1), math.sin(1), 5.0, 6.0], dtype=torch.float64)
    )


def test_positions_count_the_tokens_that_exist():
    ids = torch.zeros(2, 5, dtype=torch.int64)
    assert attention.token_positions(ids, None).tolist() == [0, 1, 2, 3, 4]
    mask = torch.tensor([[False, False, True, True, True], [True, False, True, True, False]])
    assert attention.token_positions(ids, mask)[:, 0].tolist() == [[0, 0, 0, 1, 2], [0, 0, 1, 2, 2]]
