"""Blocks of a sequence: their numbers, and the samplers that hide tokens block by block."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dare_lightning.diffusion.corruption import Masks, Salt, bounded_counts, draw_prompt, mask_lowest, uniform_draws
from dare_lightning.diffusion.noise import generator

BlockOrigin = Literal["global", "response"]

# Keep streams apart that share a sample's seed and a caller's salt; corruption.py has 1 and 2.
_BLOCKS, _ORDER, _TOKENS = 11, 12, 13


class BlockMasks(NamedTuple):
    """What a sampler with a level for each block returns.

    Attributes:
        mask: bool [B, N, L], True where the token is hidden.
        level: float32 [B, N, L], the share of its block that the row hides; 0 outside the maskable tokens.
    """

    mask: Tensor
    level: Tensor


# --- deterministic cores ---------------------------------------------------------------------------------------------


def block_index(attention_mask: Tensor, response_mask: Tensor, block_length: int, origin: BlockOrigin) -> Tensor:
    """The block of each token, int64 [B, L]; -1 where there is no token.

    Args:
        attention_mask: bool [B, L], tokens that exist.
        response_mask: bool [B, L], the response; whatever exists before its first token is prompt.
        block_length: tokens a block.
        origin: "global" counts tokens from the start of the prompt, so that the first response block may hold the end
            of the prompt; "response" starts a new block at the response.

    Raises:
        ValueError: no such origin, or a block without tokens.
    """
    if block_length < 1:
        raise ValueError(f"block_length={block_length} must be at least 1")
    position = attention_mask.cumsum(-1) - 1
    if origin == "global":
        block = position // block_length
    elif origin == "response":
        before = attention_mask & (response_mask.cumsum(-1) == 0)
        prompt = before.sum(-1, keepdim=True)
        own = (prompt + block_length - 1) // block_length + (position - prompt) // block_length
        block = torch.where(position < prompt, position // block_length, own)
    else:
        raise ValueError(f"block_origin={origin!r}; use global or response, whichever the rollout used")
    return torch.where(attention_mask, block, -1)


def stratified_cells(u: Tensor, rows: int, blocks: Tensor) -> Tensor:
    """u_m = frac(u + m / M), m over the M = rows x blocks cells of each sample: [B] -> [B, N, max blocks].

    Each block meets N evenly spread numbers, and each row as many as the sample has blocks.

    Args:
        u: float64 [B], uniform.
        rows: N.
        blocks: int64 [B], blocks of each sample.
    """
    most = int(blocks.max()) if len(blocks) else 0
    row = torch.arange(rows, dtype=u.dtype)[None, :, None]
    block = torch.arange(max(most, 1), dtype=u.dtype)[None, None]
    count = blocks.clamp(min=1).to(u.dtype)[:, None, None]
    return (u[:, None, None] + (row * count + block) / (rows * count)) % 1.0


# --- samplers --------------------------------------------------------------------------------------------------------


def draw_all_blocks(
    maskable: Tensor,
    blocks: Tensor,
    noise_seed: Tensor,
    salt: Salt = (),
    *,
    rows: int = 1,
    low: float = 0.0,
    high: float = 1.0,
) -> BlockMasks:
    """The l-form in every block at once: block b hides l_b ~ U{1..L_b} of its L_b maskable tokens, at level l_b / L_b.

    The levels of a sample are stratified over all its blocks and rows. Every block that has a maskable token has a
    hidden one in every row.

    Args:
        maskable: bool [B, L], True where a token may be hidden.
        blocks: int64 [B, L], as `block_index`.
        noise_seed: int64 [B].
        salt: what else the stream depends on.
        rows: N.
        low, high: bounds of l_b, max(1, floor(L_b low)) .. floor(L_b high).

    Source: one reading of LLaDA2.1's block-level likelihood, arXiv:2602.08676 equation 4; there the levels are
    stratified over a whole batch, here over a sample, whose noise must not depend on its neighbours.
    """
    on_cpu = maskable.cpu()
    # Blocks that hold a maskable token, numbered from 0 in each sample; -1 elsewhere.
    own = torch.where(on_cpu, blocks.cpu(), -1)
    starts = on_cpu & (own > torch.nn.functional.pad(own.cummax(-1).values, (1, 0), value=-1)[:, :-1])
    number = (starts.cumsum(-1) - 1) * on_cpu
    count = starts.sum(-1)
    u, uniform = uniform_draws(maskable, noise_seed, (_BLOCKS, *salt), rows)
    cells = stratified_cells(u[:, 0], rows, count)
    sizes = torch.zeros(len(on_cpu), cells.shape[-1], dtype=torch.int64).scatter_add_(-1, number, on_cpu.long())
    hidden = bounded_counts(cells, sizes[:, None], low, high)
    # Sorted by block and then by the uniform number, a token's place minus its block's first is its rank in the block.
    ranked = (number[:, None] + uniform).masked_fill(~on_cpu[:, None], torch.inf).argsort(dim=-1, stable=True)
    rank = torch.empty_like(ranked).scatter_(-1, ranked, torch.arange(ranked.shape[-1]).expand_as(ranked))
    first = (sizes.cumsum(-1) - sizes).gather(-1, number)
    of_token = hidden.gather(-1, number[:, None].expand(-1, rows, -1))
    mask = (rank - first[:, None] < of_token) & on_cpu[:, None]
    level = of_token.double() / sizes.gather(-1, number).clamp(min=1)[:, None] * on_cpu[:, None]
    return BlockMasks(mask.to(maskable.device), level.float().to(maskable.device))


def draw_random_block(
    response: Tensor,
    counted: Tensor,
    prompt: Tensor,
    noise_seed: Tensor,
    salt: Salt = (),
    *,
    rows: int,
    block_length: int,
    low: float = 0.0,
    high: float = 1.0,
    context_probability: float = 0.15,
) -> Masks:
    """Each row is at work in one block: part of it hidden, all that follows hidden, what precedes hidden at random.

    The block of row j is entry j of a random permutation of the response's blocks modulo the number of blocks with
    counted tokens; where there are more rows than blocks, further permutations follow. Inside it l tokens are hidden,
    l uniform on max(1, floor(n low)) .. floor(n high) of its n counted ones. Response tokens that do not count are
    hidden. Prompt tokens and counted tokens of earlier blocks are hidden with `context_probability`.

    Args:
        response: bool [B, L], the whole response.
        counted: bool [B, L], its first tokens, those that count in the loss.
        prompt: bool [B, L].
        rows: N.
        block_length: tokens a block, counted from the start of the response.
        low, high: range of the share of the block that is hidden.

    Returns:
        Masks whose level is the share of the counted tokens that the row hides.

    Source: forward type `block_random` of SPG, arXiv:2510.09541.
    """
    response_cpu, counted_cpu = response.cpu(), counted.cpu()
    block = (response_cpu.cumsum(-1) - 1) // block_length
    of_row = _block_of_row(response_cpu.sum(-1), counted_cpu.sum(-1), noise_seed, salt, rows, block_length)
    u, uniform = uniform_draws(counted, noise_seed, (_TOKENS, *salt), rows)
    here = counted_cpu[:, None] & (block[:, None] == of_row[..., None])
    size = here.sum(-1)
    mask = mask_lowest(uniform, here, bounded_counts(u, size, low, high))
    mask |= counted_cpu[:, None] & (block[:, None] > of_row[..., None])
    mask |= counted_cpu[:, None] & (block[:, None] < of_row[..., None]) & (uniform < context_probability)
    share = mask.sum(-1).double() / counted_cpu.sum(-1).clamp(min=1)[:, None]
    masks = Masks(mask.to(response.device), share.float().to(response.device))
    return hide_context(masks, response & ~counted, prompt, noise_seed, salt, context_probability)


def hide_context(
    masks: Masks, always: Tensor, prompt: Tensor, noise_seed: Tensor, salt: Salt, probability: float
) -> Masks:
    """Hide these tokens [B, L] in every row as well, and each prompt token with a fixed probability, anew in each."""
    rows = masks.mask.shape[1]
    drawn = [draw_prompt(prompt, noise_seed, (*salt, row), probability=probability) for row in range(rows)]
    return Masks(masks.mask | always[:, None] | torch.stack(drawn, dim=1), masks.level)


def _block_of_row(
    canvas: Tensor, counted: Tensor, noise_seed: Tensor, salt: Salt, rows: int, block_length: int
) -> Tensor:
    """int64 [B, N]; `canvas` and `counted` are token numbers [B]."""
    found = torch.zeros(len(canvas), rows, dtype=torch.int64)
    for sample, seed in enumerate(noise_seed.tolist()):
        every = max(1, -(-int(canvas[sample]) // block_length))
        used = max(1, -(-int(counted[sample]) // block_length))
        stream = generator(seed, _ORDER, *salt)
        order = [torch.randperm(every, generator=stream) for _ in range(-(-rows // every))]
        found[sample] = torch.cat(order)[:rows] % used
    return found
