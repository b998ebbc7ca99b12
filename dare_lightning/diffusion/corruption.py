"""The forward process: which tokens of a sequence are hidden, and at what level.

Every sampler takes a bool mask of the tokens that may be hidden and one seed for each sample. A sample's draw
depends on its own seed and on how many tokens it has, never on its neighbours, its padding, the batch size or the
global generator. Draws are made on the CPU in float64 and moved to the device of the mask.

Source: algorithms of LLaDA (arXiv:2502.09992, forward process and likelihood evaluation), ESPO and DiffuCoder
(arXiv:2506.20639); the pure functions at the top are their deterministic cores.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dare_lightning.diffusion.noise import generator
from dare_lightning.diffusion.rows import Rows

Salt = tuple[int, ...]

# Keeps streams apart that share a sample's seed and a caller's salt.
_TOKENS, _PROMPT = 1, 2


class Masks(NamedTuple):
    """What a sampler returns.

    Attributes:
        mask: bool [B, N, L], True where the token is hidden.
        level: float32 [B, N], the probability or ratio p of the row; a hidden token's ELBO weight is 1/p.
    """

    mask: Tensor
    level: Tensor


# --- deterministic cores ---------------------------------------------------------------------------------------------


def mask_probability(t: Tensor, eps: float = 1e-3) -> Tensor:
    """p = (1 - eps) t + eps, elementwise: the linear schedule, kept away from 0."""
    return (1 - eps) * t + eps


def stratified_times(u: Tensor, rows: int) -> Tensor:
    """t_n = frac(u + n / N): one uniform draw u [B] gives N evenly spread times [B, N] in [0, 1)."""
    return (u[:, None] + torch.arange(rows, dtype=u.dtype, device=u.device) / rows) % 1.0


def stratified_counts(first: Tensor, length: Tensor, rows: int) -> Tensor:
    """l_n = ((k + round(n L / N) - 1) mod L) + 1: N evenly spread numbers of hidden tokens, each uniform on 1..L.

    Where n L / N ends in 1/2, rounding the sum to even as the original does depends on k, and then l_n is not uniform
    (L = 3, N = 2: never 3 in the second row) and the estimate is biased. Rounding the offset alone avoids it.

    Args:
        first: int64 [B], k, uniform on 1..L.
        length: int64 [B], L; at least 1.
        rows: N.

    Returns:
        int64 [B, N] in 1..L.

    Source: likelihood evaluation of LLaDA, arXiv:2502.09992.
    """
    steps = torch.arange(rows, dtype=torch.float64, device=first.device) * (length[:, None].double() / rows)
    return (first[:, None] + torch.round(steps).long() - 1) % length[:, None] + 1


def bounded_counts(u: Tensor, length: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Uniform on max(1, floor(L low)) .. floor(L high) for uniform u; elementwise, 0 where L is 0."""
    least = (length * low).long().clamp(min=1)
    most = torch.maximum((length * high).long(), least)
    return torch.minimum(least + (u * (most - least + 1)).long(), length)


def mask_below(uniform: Tensor, maskable: Tensor, probability: Tensor) -> Tensor:
    """Independent draws: hide a maskable token where its uniform number is below its row's probability.

    Args:
        uniform: float [B, N, L] in [0, 1).
        maskable: bool [B, L].
        probability: float [B, N].

    Returns:
        bool [B, N, L].
    """
    return (uniform < probability[..., None]) & maskable[:, None]


def mask_lowest(uniform: Tensor, maskable: Tensor, count: Tensor) -> Tensor:
    """Exactly `count` hidden tokens: those with the smallest uniform numbers among the maskable ones.

    Args:
        uniform: float [B, N, L] in [0, 1).
        maskable: bool [B, L], or [B, N, L] where it differs between rows.
        count: int64 [B, N], at most the number of maskable tokens of the sample.

    Returns:
        bool [B, N, L].
    """
    may = maskable if maskable.dim() == 3 else maskable[:, None]
    ranked = uniform.masked_fill(~may, torch.inf).argsort(dim=-1, stable=True)
    rank = torch.empty_like(ranked).scatter_(-1, ranked, torch.arange(ranked.shape[-1]).expand_as(ranked))
    return (rank < count[..., None]) & may


def tie_trailing_eos(mask: Tensor, ids: Tensor, maskable: Tensor, eos_token_id: int) -> Tensor:
    """Hide or keep the run of end tokens that closes a response as a whole, as its first token was drawn.

    Args:
        mask: bool [B, N, L].
        ids: int64 [B, L].
        maskable: bool [B, L], the response.

    Returns:
        bool [B, N, L]; unchanged for samples whose response does not end in an end token.

    Source: option `treat_eos_as_one` of the Dream fine-tuning code.
    """
    # A token belongs to the run when no other kind of response token comes at or after it.
    other = maskable & (ids != eos_token_id)
    run = maskable & (other.flip(-1).cumsum(-1).flip(-1) == 0)
    first = run.int().argmax(-1)
    drawn = mask.gather(-1, first[:, None, None].expand(-1, mask.shape[1], 1))
    return torch.where(run[:, None], drawn, mask)


def coupled_masks(drawn: Masks, maskable: Tensor) -> Masks:
    """Three rows for each sample: everything hidden, the drawn mask at ratio q, its complement at 1 - q.

    Args:
        drawn: one row for each sample, mask [B, 1, L].
        maskable: bool [B, L], the response.

    Source: coupled sampling of DiffuCoder, arXiv:2506.20639.
    """
    everything = maskable[:, None]
    mask = torch.cat([everything, drawn.mask, everything & ~drawn.mask], dim=1)
    return Masks(mask, torch.cat([torch.ones_like(drawn.level), drawn.level, 1 - drawn.level], dim=1))


# --- samplers --------------------------------------------------------------------------------------------------------


def draw_times(
    maskable: Tensor,
    noise_seed: Tensor,
    salt: Salt = (),
    *,
    rows: int = 1,
    low: float = 0.0,
    high: float = 1.0,
    eps: float = 1e-3,
    stratified: bool = False,
) -> Masks:
    """The t-form: t ~ U(low, high), every maskable token hidden with probability p = (1 - eps) t + eps.

    A row may come out with no hidden token; it is a legitimate sample that contributes 0.

    Args:
        maskable: bool [B, L], True where a token may be hidden.
        noise_seed: int64 [B].
        salt: what else the stream depends on, for instance the inner epoch.
        rows: N, independent rows for each sample.
        low, high: range of t; 0 <= low <= high <= 1.
        eps: lower bound of p, in [0, 1).
        stratified: spread the N times evenly, t_n = frac(u + n / N), instead of drawing each on its own.

    Raises:
        ValueError: a bound outside its range.
    """
    if not 0 <= low <= high <= 1:
        raise ValueError(f"mask ratio range [{low}, {high}] is not ordered inside [0, 1]; use for instance [0.2, 0.8]")
    if not 0 <= eps < 1:
        raise ValueError(f"eps={eps} is outside [0, 1); the usual value is 1e-3")
    levels, uniform = uniform_draws(maskable, noise_seed, (_TOKENS, *salt), rows)
    u = stratified_times(levels[:, 0], rows) if stratified else levels
    return _below(maskable, uniform, mask_probability(low + (high - low) * u, eps))


def draw_at_times(maskable: Tensor, noise_seed: Tensor, times: Tensor, salt: Salt = (), *, eps: float = 1e-3) -> Masks:
    """The t-form at given times [B, N] in [0, 1] instead of drawn ones; otherwise as `draw_times`."""
    _, uniform = uniform_draws(maskable, noise_seed, (_TOKENS, *salt), times.shape[1])
    return _below(maskable, uniform, mask_probability(times.cpu().double(), eps))


def draw_counts(
    maskable: Tensor,
    noise_seed: Tensor,
    salt: Salt = (),
    *,
    rows: int = 1,
    stratified: bool = False,
    low: float = 0.0,
    high: float = 1.0,
) -> Masks:
    """The l-form: l ~ U{1..L}, a uniformly random set of exactly l of the L maskable tokens hidden, p = l / L.

    Arguments as `draw_times`; not stratified, `low` and `high` bound l to max(1, floor(L low)) .. floor(L high).
    Never empty, and of lower variance than the t-form. A sample with no maskable token gets an empty mask at level 1.
    """
    levels, uniform = uniform_draws(maskable, noise_seed, (_TOKENS, *salt), rows)
    available = maskable.cpu().sum(-1)
    length = available.clamp(min=1)
    drawn = bounded_counts(levels, length[:, None], low, high)
    count = stratified_counts(drawn[:, 0], length, rows) if stratified else drawn
    mask = mask_lowest(uniform, maskable.cpu(), count)
    return _on(maskable, mask, count.double() / length[:, None])


def draw_pairs(maskable: Tensor, noise_seed: Tensor, salt: Salt = (), *, pairs: int = 1) -> tuple[Masks, Masks]:
    """Complementary pairs: l ~ U{0..L} tokens hidden at level p = l / (L + 1), the others at L / (L + 1) - p.

    Returns:
        The drawn masks and their complements, N = `pairs` rows each. A side with nothing hidden has level 0.

    Source: ESPO's sequence ELBO with reduced variance.
    """
    levels, uniform = uniform_draws(maskable, noise_seed, (_TOKENS, *salt), pairs)
    length = maskable.cpu().sum(-1)[:, None]
    count = (levels * (length + 1)).long()
    mask = mask_lowest(uniform, maskable.cpu(), count)
    # Explicitly double: the quotient of integers takes the default type, which may be a half precision.
    level = count.double() / (length + 1)
    rest = (length - count).double() / (length + 1)
    complement = maskable.cpu()[:, None] & ~mask
    return _on(maskable, mask, level), _on(maskable, complement, rest)


def draw_prompt(prompt_mask: Tensor, noise_seed: Tensor, salt: Salt = (), *, probability: float) -> Tensor:
    """Hide each existing prompt token with a fixed probability, bool [B, L]; a stream of its own.

    Raises:
        ValueError: the probability is outside [0, 1].

    Source: random prompt masking of d1, arXiv:2504.12216.
    """
    if not 0 <= probability <= 1:
        raise ValueError(f"prompt mask probability {probability} is outside [0, 1]; d1 uses 0.15")
    _, uniform = uniform_draws(prompt_mask, noise_seed, (_PROMPT, *salt), 1)
    hidden = mask_below(uniform, prompt_mask.cpu(), torch.full((len(prompt_mask), 1), probability, dtype=torch.float64))
    return hidden[:, 0].to(prompt_mask.device)


def noisy_rows(
    ids: Tensor,
    masks: Masks,
    mask_token_id: int,
    weight: Tensor,
    score_mask: Tensor,
) -> Rows:
    """The rows of these masks.

    Args:
        ids: int64 [B, L], clean tokens.
        masks: what to hide.
        weight: float, broadcastable to [B, N, L]; set to 0 outside the scored positions.
        score_mask: bool [B, N, L], positions to score.
    """
    noisy = ids[:, None].masked_fill(masks.mask, mask_token_id)
    return Rows(noisy, score_mask, weight.expand(score_mask.shape) * score_mask, level=masks.level)


def uniform_draws(maskable: Tensor, noise_seed: Tensor, salt: Salt, rows: int) -> tuple[Tensor, Tensor]:
    """Uniform numbers, float64 on the CPU: one a row [B, N] and one a token [B, N, L] (0 where not maskable).

    The numbers belong to a sample's maskable tokens in their order, not to columns, so that padding moves nothing.
    """
    if rows < 1:
        raise ValueError(f"{rows} noisy rows were asked for; at least 1 is needed")
    on_cpu = maskable.cpu()
    lengths = on_cpu.sum(-1).tolist()
    draws = torch.zeros(len(lengths), rows, 1 + max(lengths, default=0), dtype=torch.float64)
    for sample, (seed, length) in enumerate(zip(noise_seed.tolist(), lengths, strict=True)):
        stream = generator(seed, *salt)
        draws[sample, :, : 1 + length] = torch.rand(rows, 1 + length, generator=stream, dtype=torch.float64)
    place = (on_cpu.cumsum(-1) * on_cpu)[:, None].expand(-1, rows, -1)
    return draws[..., 0], draws.gather(-1, place) * on_cpu[:, None]


def _below(maskable: Tensor, uniform: Tensor, probability: Tensor) -> Masks:
    return _on(maskable, mask_below(uniform, maskable.cpu(), probability), probability)


def _on(maskable: Tensor, mask: Tensor, level: Tensor) -> Masks:
    return Masks(mask.to(maskable.device), level.float().to(maskable.device))
