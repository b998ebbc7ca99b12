"""The backend for block-diffusion policies: block after block, with a cache of keys and values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

import torch

from dare_lightning.diffusion.blocks import BlockOrigin
from dare_lightning.families.base import PolicyModel, using_attention
from dare_lightning.generation.base import Capabilities, Progress
from dare_lightning.generation.block_cache import BlockCache
from dare_lightning.generation.block_canvas import BlockCanvas, block_canvas
from dare_lightning.generation.block_engine import BlockDecoder, BlockRun, EarlyStop, Editing
from dare_lightning.generation.block_steps import AboveThreshold, BlockSteps
from dare_lightning.generation.completion import EOS_POLICIES, EosPolicy, Responses, to_batch
from dare_lightning.generation.engine import Stats
from dare_lightning.generation.history import History
from dare_lightning.generation.sampling import TOKENS, RowStreams, TokenSampler
from dare_lightning.generation.serving import check_choice, check_prompts, evaluating, plain
from dare_lightning.replay.batch import SequenceBatch

# Settings that change the cost of a completion, not the completion.
_COST = ("max_batch_tokens",)


@dataclass(eq=False)
class BlockBackend:
    """Generates with the block-diffusion policy that is being trained, in this process, without a copy of its weights.

    Rows are decoded together, one block of each a forward pass, and each at its own pace: a row whose block is final
    goes on to the next one, whatever the others do. The mask token and ids without a token are never written. A row's
    result depends on its prompt and its seed alone.

    A last block that is begun is completed, and belongs to the response, because its tokens were written in sight of
    each other. What counts in the loss ends with the first end token, or after `max_new_tokens`.

    Args:
        max_new_tokens: G, tokens of an answer, at most.
        block_length: tokens of a block; None for the policy's own, which is all it can be.
        steps: which masks of its block a pass commits.
        editing: lets tokens be written again (LLaDA2.1); None for off.
        temperature: 0 takes the most likely token, otherwise tokens are drawn from softmax(logits / temperature).
        top_p, top_k: draw from the nucleus, from the most likely tokens; None for all.
        early_stop: "block" stops after a block with an end token; "token" as soon as an end token is written and so is
            everything before it, masks left in the block become end-of-text tokens (under editing: "block"); "never"
            decodes all blocks.
        block_origin: where blocks are counted from: "global", the first token of the prompt, or "response".
        eos_policy: what counts after the first end token, see `to_batch`. Under "truncate" the rest of the last block
            is forgotten, in sight of which the answer was written: its log-probs cannot be found again.
        max_batch_tokens: columns of all rows decoded together; at least one row is.
        attention: name of the attention backend while generating; None for the policy's own.

    Raises:
        ValueError: a setting out of range.

    Source: SDAR, arXiv:2510.06303; LLaDA2.0, arXiv:2512.15745; LLaDA2.1, arXiv:2602.08676.
    """

    max_new_tokens: int = 256
    block_length: int | None = None
    steps: BlockSteps | None = None
    editing: Editing | None = None
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    early_stop: EarlyStop = "block"
    block_origin: BlockOrigin = "global"
    eos_policy: EosPolicy = "mask_loss"
    max_batch_tokens: int = 16384
    attention: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "block_length", "top_k", "max_batch_tokens"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ValueError(f"{name}={number} must be at least 1")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature={self.temperature} must be a finite number, 0 or above")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must lie in (0, 1], or be null")
        check_choice("early_stop", self.early_stop, get_args(EarlyStop))
        check_choice("block_origin", self.block_origin, get_args(BlockOrigin))
        check_choice("eos_policy", self.eos_policy, EOS_POLICIES)
        self._steps: BlockSteps = AboveThreshold() if self.steps is None else self.steps
        self.stats = Stats()
        self.version: int | None = None
        self._policy: PolicyModel | None = None

    @property
    def capabilities(self) -> Capabilities:
        """What these settings give. Where tokens are written again, their last steps do not tell earlier states."""
        kept = self.eos_policy != "truncate"
        left = kept and self._steps.from_the_left and self._steps.one_a_pass(self.block_length or 2**31)
        return Capabilities(
            stochastic=True,
            commit_steps=self.editing is None and kept,
            log_probs=True,
            states=kept,
            left_to_right=left and self.editing is None,
        )

    @property
    def settings(self) -> dict[str, Any]:
        """What a completion depends on besides prompt, seed and weights; for records of what was generated."""
        return {field.name: plain(getattr(self, field.name)) for field in fields(self) if field.name not in _COST}

    def validate(self, policy: PolicyModel) -> None:
        """Refuse a policy that cannot be served.

        Raises:
            ValueError: the policy has no blocks, others than these settings say, or does not know the attention
                backend.
        """
        if policy.block_length is None:
            raise ValueError(
                f"{type(policy).__name__} is a masked policy, which has no blocks: use rollout=builtin, or a"
                " block-diffusion policy (model=sdar, model=llada2)"
            )
        if self.block_length not in (None, policy.block_length):
            raise ValueError(
                f"rollout.backend.block_length={self.block_length}, but the policy was made for blocks of"
                f" {policy.block_length}; leave it at null"
            )
        with using_attention(policy, self.attention):
            pass

    def update_weights(self, policy: PolicyModel, version: int) -> None:
        """Generate with this policy from now on. Nothing is copied: later changes of its weights are seen at once."""
        self._policy = policy
        self.version = version

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        progress: Progress | None = None,
        record_states: bool = False,
    ) -> SequenceBatch:
        """One completion for each prompt, in order, on the CPU; `stats` then tells what it cost.

        `commit_step` counts a row's own denoising passes from 0, over all its blocks; in each block its steps follow
        each other without a gap. `commit_log_probs` is the log softmax at temperature 1 of the policy's logits for the
        token that stayed, in the pass that wrote it. Passes that only fill the cache are in `stats`, not in
        `forward_passes`.

        Args:
            prompts: B token-id lists, at least one token each; any id is taken as a real token.
            seeds: B integers; row i draws from seeds[i] alone.
            progress: told about finished blocks, over all rows.
            record_states: see `GenerationBackend.generate`; with editing, this is what tells the edits.

        Raises:
            RuntimeError: no policy yet.
            ValueError: no prompt, an empty one, not one seed for each, or a policy without blocks.
        """
        if self._policy is None:
            raise RuntimeError("the block backend has no policy yet: call update_weights before generate")
        check_prompts(prompts, seeds)
        policy, self.stats = self._policy, Stats()
        self.validate(policy)
        batches = self._batches([len(prompt) for prompt in prompts], policy)
        blocks, lengths = zip(*(self._blocks(len(prompt), policy) for prompt in prompts), strict=True)
        report, parts = _BlockReport(progress, blocks), []
        with evaluating(policy) as device, using_attention(policy, self.attention):
            for batch in batches:
                canvas = self._canvas(policy, [prompts[i] for i in batch], max(lengths), device)
                history = History() if record_states else None
                streams, cache = RowStreams([seeds[i] for i in batch], TOKENS), BlockCache(*canvas.ids.shape)
                self._decoder(policy).run(
                    BlockRun(policy, canvas, streams, cache, self.stats, history, tick=report.tick)
                )
                parts.append(canvas.responses(policy.eos_token_id, history))
                report.finish(batch)
        responses = Responses.in_order(parts, [row for batch in batches for row in batch])
        return self._counted(to_batch(prompts, seeds, responses, policy, self.eos_policy))

    def _counted(self, batch: SequenceBatch) -> SequenceBatch:
        """Tokens that only complete the last block do not count."""
        within = batch.response_mask.cumsum(1) <= self.max_new_tokens
        return replace(batch, completion_mask=batch.completion_mask & within, block_origin=self.block_origin)

    def _batches(self, lengths: Sequence[int], policy: PolicyModel) -> list[list[int]]:
        """Rows that are decoded together: similar prompt lengths, at most `max_batch_tokens` columns."""
        assert policy.block_length is not None
        batches: list[list[int]] = []
        for row in sorted(range(len(lengths)), key=lambda i: lengths[i]):
            width = lengths[row] + self.max_new_tokens + policy.block_length
            if batches and (len(batches[-1]) + 1) * width <= self.max_batch_tokens:
                batches[-1].append(row)
            else:
                batches.append([row])
        return batches

    def _blocks(self, prompt: int, policy: PolicyModel) -> tuple[int, int]:
        """Blocks that are decoded after a prompt of this length, at most, and the response's tokens in them."""
        assert policy.block_length is not None
        inside = prompt % policy.block_length if self.block_origin == "global" else 0
        blocks = -(-(inside + self.max_new_tokens) // policy.block_length)
        return blocks, blocks * policy.block_length - inside

    def _canvas(
        self, policy: PolicyModel, prompts: Sequence[Sequence[int]], width: int, device: torch.device
    ) -> BlockCanvas:
        assert policy.block_length is not None
        sizes = (self.max_new_tokens, policy.block_length)
        return block_canvas(prompts, *sizes, self.block_origin, policy.mask_token_id, device, width)

    def _decoder(self, policy: PolicyModel) -> BlockDecoder:
        sampler = TokenSampler(self.temperature, self.top_p, self.top_k)
        return BlockDecoder(self._steps, sampler, self.editing, self.early_stop, len(policy.tokenizer))


class _BlockReport:
    """Counts finished blocks over all batches; those that an end token spares count as finished with their row."""

    def __init__(self, progress: Progress | None, blocks: Sequence[int]) -> None:
        self._progress = progress
        self._blocks = blocks
        self._before = 0
        self._inside = 0

    def tick(self, blocks: int) -> None:
        """So many more are finished."""
        self._inside += blocks
        if blocks:
            self._tell()

    def finish(self, batch: Sequence[int]) -> None:
        """These rows are done."""
        planned = sum(self._blocks[row] for row in batch)
        self._before += planned
        told, self._inside = self._inside, 0
        if told < planned:
            self._tell()

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(self._before + self._inside, sum(self._blocks))
