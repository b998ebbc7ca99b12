"""What every model family offers to the rest of the house."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dare_lightning.diffusion.diagnostics import EntropySum
from dare_lightning.families.attention import View
from dare_lightning.families.block import count_blocks, narrowed
from dare_lightning.families.fused import fused_log_probs

MAX_LOGITS = 2**24
"""The most logits that scoring and generation hold at a time: 64 MB in float32."""


class TorchModule(Protocol):
    """The part of `torch.nn.Module` that is used on a policy; every module has it."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Every parameter."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter with its dotted name."""
        ...

    def modules(self) -> Iterator[nn.Module]:
        """The module and everything inside it."""
        ...

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The same with dotted names."""
        ...

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Switch the gradients of all parameters."""
        ...

    def eval(self) -> Self:
        """Switch to evaluation mode."""
        ...

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move to a device or dtype."""
        ...


@runtime_checkable
class PolicyModel(TorchModule, Protocol):
    """A denoiser: a torch module that predicts every token of a sequence from a noisy copy of it.

    Logits are always aligned: position i of the output predicts token i. A family whose published head predicts
    token i + 1 shifts inside `hidden_states`, once, and nobody else knows.

    Attributes:
        tokenizer: the checkpoint's `PreTrainedTokenizerFast`-like tokenizer.
        mask_token_id, pad_token_id, eos_token_id: read from the checkpoint, never assumed.
        stop_token_ids: ids that end an answer (end of text, end of turn).
        block_length: tokens a block for block-diffusion families, None for masked ones.
        left_context: columns to the left of a piece of a sequence that a pass over the piece must read as well (1 for
            a family whose head predicts the next token), so that every state of the piece is aligned.
        lora_targets: names of the linear layers that `peft=lora` adapts by default.
        attention: name of the attention backend used now ("eager", "sdpa", "flex", "varlen").
        source: folder the checkpoint was read from, None for one built in memory.
        config: the raw content of config.json, written back unchanged on save.
    """

    tokenizer: Any
    mask_token_id: int
    pad_token_id: int
    eos_token_id: int
    stop_token_ids: tuple[int, ...]
    block_length: int | None
    left_context: int
    lora_targets: tuple[str, ...]
    attention: str
    source: Path | None
    config: dict[str, Any]

    def hidden_states(self, ids: Tensor, attention_mask: Tensor | None = None, view: View | None = None) -> Tensor:
        """Aligned final hidden states, float [B, L, H].

        Args:
            ids: int64 [B, L].
            attention_mask: bool [B, L] over keys, True = token exists. Other positions still get an output, which
                means nothing. Not read where there is a view.
            view: positions, visibility and cache of a pass over part of a sequence, or under another mask than
                everything sees everything (block families: than the block-causal one).
        """
        ...

    def denoise(
        self,
        noisy_ids: Tensor,
        clean_ids: Tensor,
        attention_mask: Tensor | None = None,
        block_ids: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [B, L, H] from which `logits` predicts the clean tokens, given the noisy ones.

        Masked families read `noisy_ids` alone; block families read [noisy ; clean] under the block mask of
        `block_ids`, int64 [B, L], -1 where there is no token; None counts blocks from the first token.
        """
        ...

    @property
    def head_weight(self) -> Tensor | None:
        """float [V, H] where the output head is a product with it; None where it is another."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Output head: [..., H] -> [..., V]."""
        ...

    def save_pretrained(self, folder: Path) -> None:
        """Write weights, config and tokenizer in the published layout."""
        ...


@contextmanager
def using_attention(policy: PolicyModel, name: str | None) -> Iterator[None]:
    """Run the body with another attention backend (None: leave it as it is)."""
    before = policy.attention
    policy.attention = before if name is None else name
    try:
        yield
    finally:
        policy.attention = before


def token_log_probs(
    policy: PolicyModel,
    noisy_ids: Tensor,
    clean_ids: Tensor,
    attention_mask: Tensor,
    score_mask: Tensor,
    target_ids: Tensor | None = None,
    temperature: float = 1.0,
    block_ids: Tensor | None = None,
    entropy: EntropySum | None = None,
) -> Tensor:
    """log p(target_i | noisy input) at the scored positions, 0 elsewhere.

    Only the scored positions reach the output head, so nothing of size [B, L, V] exists. The softmax is float32
    (float64 inputs stay float64).

    Args:
        noisy_ids, clean_ids: int64 [B, L].
        attention_mask, score_mask: bool [B, L].
        target_ids: int64 [B, L]; the clean tokens where None.
        temperature: divides the logits, > 0.
        block_ids: int64 [B, L], see `PolicyModel.denoise`.
        entropy: takes the entropy of the distribution at each scored position.

    Returns:
        float [B, L].
    """
    states = scored_states(policy, noisy_ids, clean_ids, attention_mask, score_mask, block_ids)
    targets = (clean_ids if target_ids is None else target_ids)[score_mask]
    chosen = chosen_log_probs(policy, states, targets, temperature, entropy)
    return chosen.new_zeros(noisy_ids.shape).masked_scatter(score_mask, chosen)


def scored_states(
    policy: PolicyModel,
    noisy_ids: Tensor,
    clean_ids: Tensor,
    attention_mask: Tensor,
    score_mask: Tensor,
    block_ids: Tensor | None = None,
) -> Tensor:
    """Hidden states of the scored positions, float [N, H], in the order of `score_mask.nonzero()`.

    Rows without a scored position, columns without a token and repetitions of a row are not run. Arguments as
    `token_log_probs`.
    """
    rows = score_mask.any(1).nonzero().flatten()
    if len(rows) == 0:
        # One row still runs, so that every parameter has a gradient (of 0), which data-parallel training expects.
        rows = torch.zeros(1, dtype=torch.int64, device=score_mask.device)
    used = attention_mask[rows].any(0).nonzero().flatten().tolist()
    columns = slice(used[0], used[-1] + 1) if used else slice(None)
    noisy, clean, exists = noisy_ids[rows, columns], clean_ids[rows, columns], attention_mask[rows, columns]
    # Rows that read the same are run once: with the whole response hidden, all answers to a prompt are one row.
    read, blocks = [noisy, exists.long()], None
    if policy.block_length is not None:
        blocks = count_blocks(clean, exists, policy.block_length) if block_ids is None else block_ids[rows, columns]
        noisy, exists, blocks = narrowed(noisy, clean, exists, blocks, score_mask[rows, columns])
        read = [noisy, exists.long(), clean, blocks]
    place, first = distinct_rows(torch.cat(read, dim=1))
    hidden = policy.denoise(noisy[first], clean[first], exists[first], None if blocks is None else blocks[first])
    row, column = score_mask[rows, columns].nonzero(as_tuple=True)
    return hidden[place[row], column]


def chosen_log_probs(
    policy: PolicyModel,
    hidden: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    entropy: EntropySum | None = None,
) -> Tensor:
    """log softmax(logits / temperature) of the targets, without a [N, V] tensor of all positions.

    Positions pass the output head in pieces of at most `MAX_LOGITS` logits. Where there are several, the backward
    pass computes each piece's logits again, so memory does not grow with the vocabulary. A fused kernel does both
    where there is one, see `fused_log_probs`.

    Args:
        hidden: float [N, H].
        targets: int64 [N].
        entropy: takes the entropy of softmax(logits / temperature), without a gradient; beside a fused kernel that of
            as many positions, evenly spread, as make one piece.

    Returns:
        float [N], at least float32.
    """

    size, again = max(1, MAX_LOGITS // policy.logits(hidden[:0].detach()).shape[-1]), False
    if (fused := fused_log_probs(policy.head_weight, hidden, targets, temperature)) is not None:
        if entropy is not None:
            with torch.no_grad():
                logits = policy.logits(hidden[:: -(-len(hidden) // size)]).float() / temperature
                entropy.add(logits, logits.logsumexp(-1))
        return fused

    def score(states: Tensor, wanted: Tensor) -> Tensor:
        logits = policy.logits(states)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if temperature != 1:
            logits = logits / temperature
        normalizer = logits.logsumexp(-1)
        # Some gradient plans differentiate these pieces while others are still to be scored.
        if entropy is not None and not again:
            entropy.add(logits, normalizer)
        return logits.gather(-1, wanted[:, None]).squeeze(-1) - normalizer

    if len(hidden) <= size:
        return score(hidden, targets)
    pieces = [
        checkpoint(score, states, wanted, use_reentrant=False, preserve_rng_state=False)
        for states, wanted in zip(hidden.split(size), targets.split(size), strict=True)
    ]
    again = True
    return torch.cat(pieces)


def distinct_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """For each row [B, C] the number of its distinct content [B], and a row index for each of those [U]."""
    _, place = torch.unique(rows, dim=0, return_inverse=True)
    count = int(place.max()) + 1
    first = torch.full((count,), len(rows), device=rows.device)
    first.scatter_reduce_(0, place, torch.arange(len(rows), device=rows.device), "amin")
    return place, first
