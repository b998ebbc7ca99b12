"""The built-in backend: masked-diffusion decoding from composable parts, batched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import torch

from dare_lightning.families.base import PolicyModel, using_attention
from dare_lightning.generation.base import Capabilities, Progress
from dare_lightning.generation.cached import (
    CachedForward,
    CacheKind,
    FirstColumnFirst,
    SureOfStale,
    check_cache,
    check_sure,
)
from dare_lightning.generation.canvas import masked_canvas
from dare_lightning.generation.completion import EOS_POLICIES, EosPolicy, Responses, to_batch
from dare_lightning.generation.engine import Denoiser, Forward, FullForward, Run, Stats
from dare_lightning.generation.history import History
from dare_lightning.generation.layout import Layout
from dare_lightning.generation.lengths import LengthPolicy, check_lengths
from dare_lightning.generation.sampling import Streams, TokenSampler
from dare_lightning.generation.schedule import EvenSchedule, Plan, StepPolicy
from dare_lightning.generation.scores import ORDERS, DeferredEnds, EndScore, Order, score_of
from dare_lightning.generation.serving import check_choice, check_prompts, evaluating, plain
from dare_lightning.generation.tree import Growth, Tree, check_groups, check_tree
from dare_lightning.replay.batch import SequenceBatch

ScoreFrom = Literal["clean", "sampled"]
SCORE_FROM: tuple[str, ...] = get_args(ScoreFrom)

# Orders whose scores lie in [0, 1].
PROBABILITIES = ("low_confidence", "topk_margin")

# Settings that change the cost of a completion, not the completion.
_COST = ("max_batch_tokens",)


@dataclass(eq=False)
class BuiltinBackend:
    """Generates with the policy that is being trained, in this process, without a copy of its weights.

    A response is `max_new_tokens` masks, decoded block by block from the left; within a block each forward pass
    commits the proposals it is surest of. The mask token is never proposed. A row's result depends on its prompt and
    its seed alone: neither on the rows that share its forward passes nor on how many they are.

    Args:
        steps: steps of a whole response, a multiple of the number of blocks; None for one token a step. Must be None
            where the schedule does not count steps.
        max_new_tokens: G, tokens of a response; the most there may be where `lengths` decides.
        block_length: tokens of a block, a divisor of max_new_tokens; None for one block of the whole response.
        lengths: lets every response find its own length, such as Daedal or RhoEos; None for max_new_tokens.
        schedule: which positions a pass commits; None for the even schedule.
        temperature: 0 takes the most likely token, otherwise tokens are drawn from softmax(logits / temperature).
        top_p, top_k: draw from the nucleus, and then from the most likely tokens only; None keeps all.
        remasking: which proposals are kept: the most probable (low_confidence), those with the largest margin
            (topk_margin) or the least entropy (entropy), or any (random).
        score_from: what those are computed from: the clean logits, or what tokens are sampled from.
        order_temperature: above 0, what is kept is drawn from softmax(score / order_temperature).
        running_confidence: every pass writes the whole block, then the least confident tokens written so far are
            hidden again, as many as the schedule leaves; the last pass hides none.
        cfg_scale: w of classifier-free guidance; 0 is off. Doubles the work.
        suppress_eos: the end-of-text token is never written (`logits_eos_inf` of LLaDA's appendix).
        defer_eos: end tokens are committed after every other proposal (`confidence_eos_eot_inf`).
        ends: another score for end-of-text proposals, such as EndRejection; None for none.
        early_stop: a row is finished when an end token is written and so is everything before it; the masks left
            become end-of-text tokens without further passes. The answer is the same; LLaDA's own code goes on.
        cache: "prefix" or "dual" keeps keys and values of the prompt and earlier blocks, or of everything outside the
            block, from a block's first pass on (see `CachedForward`); an approximation, faster. None for none.
        cache_refresh: passes after which a block's cache is filled anew by reading everything; None for once a block.
        cache_sure: a pass that relies on a cache commits only proposals at least this sure, and a row whose last pass
            committed fewer than two tokens reads everything. For schedules by confidence. None commits in every pass
            what the schedule says.
        first_column_first: with a cache, as published code for Dream: a block's first pass commits its first column
            alone, and later passes do not read the column before the block.
        tree: children at each level where the completions of a prompt grow as a tree, such as [4, 4]; the group size
            must be the number of its leaves. Nodes at depth d branch after d of len(tree) equal shares of the steps.
        eos_policy: what counts after the first end token, see `to_batch`.
        max_batch_tokens: columns a forward pass may read (twice that under guidance); at least one row (one tree)
            is read.
        attention: name of the attention backend while generating; None for the policy's own.

    Raises:
        ValueError: a setting out of range, or numbers that do not divide.

    Source: LLaDA, arXiv:2502.09992, section 2.4 and its appendix on sampling; the running confidence is MDPO's,
    arXiv:2508.13148. Sources of the parts are named there.
    """

    steps: int | None = None
    max_new_tokens: int = 256
    block_length: int | None = None
    lengths: LengthPolicy | None = None
    schedule: StepPolicy | None = None
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    remasking: Order = "low_confidence"
    score_from: ScoreFrom = "clean"
    order_temperature: float = 0.0
    running_confidence: bool = False
    cfg_scale: float = 0.0
    suppress_eos: bool = False
    defer_eos: bool = False
    ends: EndScore | None = None
    early_stop: bool = True
    cache: CacheKind | None = None
    cache_refresh: int | None = None
    cache_sure: float | None = None
    first_column_first: bool = False
    tree: Sequence[int] | None = None
    eos_policy: EosPolicy = "mask_loss"
    max_batch_tokens: int = 16384
    attention: str | None = None

    def __post_init__(self) -> None:
        self._check_values()
        self._steps: StepPolicy = EvenSchedule() if self.schedule is None else self.schedule
        check_sure(self.cache_sure, self.cache, self.cache_refresh, self._steps)
        if self.cache_sure is not None:
            self._steps = SureOfStale(self._steps, self.cache_sure)
        if self.first_column_first:
            self._steps = FirstColumnFirst(self._steps)
        self.layout: Layout = self._lay_out()
        self._check_parts()
        self._tree: Tree | None = None
        if self.tree is not None:
            self._tree = check_tree(self.tree, self.layout, self._steps)
        self.stats = Stats()
        self.version: int | None = None
        self._policy: PolicyModel | None = None

    def _check_values(self) -> None:
        for name in ("steps", "max_new_tokens", "max_batch_tokens", "top_k"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ValueError(f"{name}={number} must be at least 1")
        for name in ("temperature", "cfg_scale", "order_temperature"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}={value} must be a finite number, 0 or above")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must lie above 0 and not above 1; null keeps all tokens")
        check_choice("remasking", self.remasking, ORDERS)
        check_choice("score_from", self.score_from, SCORE_FROM)
        check_choice("eos_policy", self.eos_policy, EOS_POLICIES)

    def _lay_out(self) -> Layout:
        if self.lengths is None:
            return self._steps.layout(self.max_new_tokens, self.block_length, self.steps)
        check_lengths(self.lengths, self._steps, self.max_new_tokens)
        for name in ("running_confidence", "suppress_eos", "tree"):
            if getattr(self, name):
                raise ValueError(f"{name}={getattr(self, name)} does not go with lengths; switch one of them off")
        # Blocks begin where the one before ends, so that they need not divide anything.
        self._steps.layout(self.max_new_tokens, None, self.steps)
        if self.block_length is not None and not 1 <= self.block_length <= self.max_new_tokens:
            raise ValueError(f"block_length={self.block_length} must lie in 1 to max_new_tokens={self.max_new_tokens}")
        return Layout((0, self.max_new_tokens), (0, 0))

    def _check_parts(self) -> None:
        """Refuse parts that do not fit each other."""
        name = type(EvenSchedule() if self.schedule is None else self.schedule).__name__
        random = self.remasking == "random"
        probabilities = "use low_confidence or topk_margin"
        if self._steps.compares_probabilities and self.remasking not in PROBABILITIES:
            raise ValueError(f"remasking={self.remasking} gives {name} no probabilities to compare; {probabilities}")
        if self._steps.compares_probabilities and self.order_temperature > 0:
            raise ValueError(f"order_temperature={self.order_temperature} leaves {name} no probabilities to compare")
        if self._steps.needs_random_order and not random:
            raise ValueError(f"{name} commits at random, remasking={self.remasking} has no say; use remasking=random")
        if random and (self.order_temperature > 0 or self.score_from == "sampled"):
            raise ValueError("a random order has no scores: set order_temperature to 0 and score_from to clean")
        if random and self._steps.needs_random_order and self.defer_eos:
            raise ValueError(f"{name} commits whatever it draws; defer_eos has no say: set it to false")
        if self.ends is not None:
            if self.remasking not in PROBABILITIES:
                raise ValueError(f"ends scales probabilities, remasking={self.remasking} has none; {probabilities}")
            if self.ends.contested and not (isinstance(self._steps, EvenSchedule) and not self.running_confidence):
                raise ValueError("EndsLast(contested=true) is defined for the even schedule without running_confidence")
            self.ends.check(self.layout.steps)
        if self.running_confidence:
            self._check_running(name)
        names = ("cfg_scale", "running_confidence", "tree", "lengths")
        check_cache(self.cache, self.cache_refresh, {setting: getattr(self, setting) for setting in names})
        if self.first_column_first and self.cache is None:
            raise ValueError("first_column_first=true is a rule of cached decoding; set cache to prefix or dual")

    def _check_running(self, name: str) -> None:
        if not isinstance(self._steps, Plan):
            raise ValueError(
                f"running_confidence needs a schedule that says how many masks each step leaves, {name} does not; use "
                "EvenSchedule or MaskRatioSchedule"
            )
        if self.order_temperature > 0:
            raise ValueError(
                f"order_temperature={self.order_temperature} would make running_confidence remember noise in place of"
                " confidence; set it to 0"
            )
        if self.early_stop:
            raise ValueError(
                "early_stop=true: with running_confidence a written end token may be hidden again, so no answer is "
                "finished early; set early_stop to false"
            )
        if self.tree is not None:
            raise ValueError(
                "running_confidence hides tokens again, so the states of a tree's nodes do not follow from its leaves; "
                "set tree to null or running_confidence to false"
            )

    @property
    def capabilities(self) -> Capabilities:
        """What these settings give."""
        # Whether a token stays what and where it was when it was written, and is there in training.
        kept = self.eos_policy != "truncate"
        stays = kept and not self.running_confidence and self.lengths is None
        return Capabilities(
            stochastic=True,
            commit_steps=stays,
            log_probs=True,
            states=kept and self._whole_canvas,
            left_to_right=self.layout.widest == 1 and stays,
            tree=kept and self._tree is not None,
            group_size=None if self._tree is None else self._tree.leaves,
        )

    @property
    def _whole_canvas(self) -> bool:
        """Whether every pass reads all of a canvas of one length, so that its states can be recorded."""
        return self.cache is None and self.lengths is None

    @property
    def settings(self) -> dict[str, Any]:
        """What a completion depends on besides prompt, seed and weights; for records of what was generated."""
        names = [f.name for f in fields(self) if f.name not in _COST]
        return {name: plain(getattr(self, name)) for name in names}

    def validate(self, policy: PolicyModel) -> None:
        """Refuse a policy that cannot be served.

        Raises:
            ValueError: the policy is a block-diffusion one, or does not know the attention backend.
        """
        if policy.block_length is not None:
            raise ValueError(
                f"the policy is a block-diffusion model (block_length={policy.block_length}), which must not see later "
                "blocks; the built-in backend shows it all masks of the response: use rollout=block, or a masked model"
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

        Rows are read in batches of similar prompt length. `commit_step` counts a row's own forward passes from 0
        and is -1 where no pass wrote the token (masks filled at the end). `commit_log_probs` is the log softmax at
        temperature 1 of the policy's own logits for the committed token, without guidance or suppressed tokens: what
        scoring the token on the same canvas gives. A guided pass counts once in `forward_passes`.

        Args:
            prompts: B token-id lists, at least one token each; any id is taken as a real token.
            seeds: B integers; row i draws from seeds[i] alone.
            progress: told about denoising steps, over all batches.
            record_states: see `GenerationBackend.generate`.

        Raises:
            RuntimeError: no policy yet.
            ValueError: no prompt, an empty one, not one seed for each, or states asked for that are not recorded.
        """
        if record_states and not self._whole_canvas:
            raise ValueError(
                "states are recorded where every pass reads a whole canvas of one length: set cache and lengths to null"
            )
        if self._policy is None:
            raise RuntimeError("the built-in backend has no policy yet: call update_weights before generate")
        check_prompts(prompts, seeds)
        if self._tree is not None:
            check_groups(self._tree, prompts)
        policy, self.stats = self._policy, Stats()
        batches = self._batches([len(prompt) for prompt in prompts])
        report = _StepReport(progress, self.layout.steps or self.max_new_tokens, len(batches))
        parts = []
        with evaluating(policy) as device, using_attention(policy, self.attention):
            for batch in batches:
                run = self._start(policy, [prompts[i] for i in batch], [seeds[i] for i in batch], device, record_states)
                run.tick = report.tick
                self._denoiser(policy).run(run)
                run.canvas.fill(policy.eos_token_id)
                parts.append(Responses.of(run.canvas, run.history))
                report.finish_batch()
        responses = Responses.in_order(parts, [row for batch in batches for row in batch])
        if self._tree is not None:
            responses = replace(responses, node_index=self._tree.node_index(len(prompts)))
        return to_batch(prompts, seeds, responses, policy, self.eos_policy)

    def _batches(self, lengths: Sequence[int]) -> list[list[int]]:
        """Rows that share forward passes: similar prompt lengths, at most `max_batch_tokens` columns, whole trees."""
        together = 1 if self._tree is None else self._tree.leaves
        batches: list[list[int]] = []
        for first in sorted(range(0, len(lengths), together), key=lambda i: lengths[i]):
            width = lengths[first] + self.max_new_tokens
            rows = list(range(first, first + together))
            if batches and (len(batches[-1]) + together) * width <= self.max_batch_tokens:
                batches[-1].extend(rows)
            else:
                batches.append(rows)
        return batches

    def _start(
        self,
        policy: PolicyModel,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        device: torch.device,
        record_states: bool,
    ) -> Run:
        canvas = masked_canvas(prompts, self.layout, policy.mask_token_id, policy.pad_token_id, device)
        canvas.refresh_every, canvas.cautious = self.cache_refresh, self.cache_sure is not None
        canvas.leaves_masks = self.ends is not None and self.ends.contested
        if self.lengths is not None:
            block_length = self.block_length or self.max_new_tokens
            canvas.vary(self.lengths.initial, block_length, self.lengths.probes)
        if self.running_confidence:
            canvas.remember_scores()
        streams, history = Streams(seeds), History() if record_states else None
        growth = None if self._tree is None else Growth(self._tree, canvas, history)
        return Run(policy, canvas, streams, self.stats, history, growth)

    def _forward(self) -> Forward:
        if self.cache is None:
            return FullForward(self.cfg_scale)
        return CachedForward(self.cache, reads_left_context=not self.first_column_first)

    def _denoiser(self, policy: PolicyModel) -> Denoiser:
        score = score_of(self.remasking)
        plan = self._steps if isinstance(self._steps, Plan) else None
        return Denoiser(
            forward=self._forward(),
            sampler=TokenSampler(self.temperature, self.top_p, self.top_k),
            score=DeferredEnds(score, policy.stop_token_ids) if self.defer_eos else score,
            steps=self._steps,
            sampled_score=self.score_from == "sampled",
            order_temperature=self.order_temperature,
            ends=self.ends,
            lengths=self.lengths,
            contested=plan if self.ends is not None and self.ends.contested else None,
            remask=plan if self.running_confidence else None,
            suppressed_ids=(policy.eos_token_id,) if self.suppress_eos else (),
            stop_token_ids=policy.stop_token_ids if self.early_stop else (),
            planned_steps=self.layout.steps,
        )


class _StepReport:
    """Turns forward passes of several batches into one count of denoising steps."""

    def __init__(self, progress: Progress | None, steps: int, batches: int) -> None:
        self._progress = progress
        self._steps = steps
        self._total = steps * batches
        self._before = 0
        self._inside = 0

    def tick(self) -> None:
        """One more step of this batch is done."""
        self._inside += 1
        self._tell()

    def finish_batch(self) -> None:
        """The batch is done, however many steps it needed."""
        self._before += self._steps
        if self._inside < self._steps:
            self._inside = 0
            self._tell()
        self._inside = 0

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(self._before + self._inside, self._total)
