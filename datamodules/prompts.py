"""Online data: which prompts a rollout asks, and the replay buffer that its updates read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Protocol

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from dare_lightning.datamodules.chat import encode_prompt
from dare_lightning.datamodules.readers import read_examples
from dare_lightning.datamodules.sizes import check_group_size, check_positive, check_same_split, multiples_near
from dare_lightning.diffusion.noise import derive_seed, generator
from dare_lightning.families.base import PolicyModel
from dare_lightning.parallel.collectives import gather_objects, rank_and_world, sum_over_ranks
from dare_lightning.replay.batch import SequenceBatch
from dare_lightning.replay.loader import START, MicroBatchLoader, Window
from dare_lightning.rewards.base import Example, Reward

log = logging.getLogger(__name__)


class Task(Protocol):
    """A generated task: as many examples as wanted, the two splits never overlapping."""

    def examples(self, split: Literal["train", "heldout"], count: int, seed: int) -> list[Example]:
        """`count` examples of the "train" or "heldout" split."""
        ...


@dataclass(frozen=True)
class Prompts:
    """Tokenised prompts with what is needed to score their answers and to repeat the draw.

    Attributes:
        examples: one a completion; a group's are next to each other.
        ids: token ids of each prompt.
        seeds: one a completion, the root of all its random draws.
        sample_index: position of each completion in the whole rollout, all ranks together.
        group_index: position of each completion's prompt in the whole rollout.
    """

    examples: list[Example]
    ids: list[list[int]]
    seeds: list[int]
    sample_index: list[int]
    group_index: list[int]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Prompts:
        """Itself: prompts are lists, and Lightning moves whatever it gets."""
        return self


@dataclass
class Buffer:
    """One rollout, all its columns, as this rank holds it.

    Attributes:
        rollout: index of the rollout, -1 before the first.
        batch: every completion of this rank, window after window.
        metrics: what the rollout measured, logged when its epoch ends.
    """

    rollout: int = -1
    batch: SequenceBatch | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class Collector(Protocol):
    """Fills the buffer; the rollout callback."""

    def collect(self, rollout: int) -> tuple[SequenceBatch, dict[str, float]]:
        """Generate, score and freeze one rollout."""
        ...


class PromptDataModule(L.LightningDataModule):
    """Prompts of an online run. One Lightning epoch is one rollout.

    A rollout asks `prompts_per_rollout` prompts `group_size` times each. Its completions are used in
    `inner_epochs` passes of `updates_per_rollout` optimiser steps, in forwards of `micro_batch` sequences.

    Args:
        policy: for its tokenizer.
        reward: the verifier of the task.
        path: prompts to train on (parquet, JSON Lines, saved data set, hub name); None generates them from `task`.
        val_path: held-out prompts; None takes the task's held-out split, or sets aside `val_prompts` rows of `path`.
        task: generator for where there is no file.
        train_prompts: how many to generate, or the most to read (None: all).
        val_prompts: how many held-out prompts are scored.
        max_prompt_tokens: longer prompts are dropped, counted and logged; None keeps all.

    Raises:
        ValueError: sizes that do not divide, a group of one, no prompts.
    """

    def __init__(
        self,
        policy: PolicyModel,
        reward: Reward,
        path: str | None = None,
        val_path: str | None = None,
        task: Task | None = None,
        train_prompts: int | None = None,
        val_prompts: int = 64,
        group_size: int = 8,
        prompts_per_rollout: int = 16,
        updates_per_rollout: int = 1,
        inner_epochs: int = 1,
        micro_batch: int = 8,
        max_prompt_tokens: int | None = None,
        seed: int = 42,
    ) -> None:
        super().__init__()
        self.policy, self.reward, self.task = policy, reward, task
        self.path, self.val_path = path, val_path
        self.train_prompts, self.val_prompts = train_prompts, val_prompts
        self.group_size, self.prompts_per_rollout = group_size, prompts_per_rollout
        self.updates_per_rollout, self.inner_epochs, self.micro_batch = updates_per_rollout, inner_epochs, micro_batch
        self.max_prompt_tokens, self.seed = max_prompt_tokens, seed
        self.collector: Collector | None = None
        self.buffer = Buffer()
        self.train: list[tuple[Example, list[int]]] = []
        self.heldout: list[tuple[Example, list[int]]] = []
        self.dropped: dict[str, int] = {}
        self.loader: MicroBatchLoader | None = None
        self._position = START
        self._laps: dict[int, list[int]] = {}
        self._check_sizes()

    def _check_sizes(self) -> None:
        check_positive({name: size for name, size in self._sizes().items() if name != "group_size"})
        check_positive({"val_prompts": self.val_prompts})
        check_group_size(self.group_size)
        if self.path is None and self.task is None:
            raise ValueError("there are no prompts: set data.path to a file, a saved data set or a hub name")
        if self.task is not None and self.path is None and self.train_prompts is None:
            raise ValueError("data.train_prompts must say how many prompts to generate")

    def _sizes(self) -> dict[str, int]:
        """What decides how a rollout is split into micro-batches."""
        return {
            "prompts_per_rollout": self.prompts_per_rollout,
            "group_size": self.group_size,
            "updates_per_rollout": self.updates_per_rollout,
            "inner_epochs": self.inner_epochs,
            "micro_batch": self.micro_batch,
        }

    def check_ranks(self, world: int) -> None:
        """Raise ValueError where the sizes do not divide among `world` ranks."""
        shares = self.updates_per_rollout * world
        if self.prompts_per_rollout % shares:
            choices = multiples_near(self.prompts_per_rollout, shares)
            raise ValueError(
                f"data.prompts_per_rollout={self.prompts_per_rollout} is not a multiple of updates_per_rollout × ranks"
                f" = {self.updates_per_rollout} × {world} = {shares}; choose {choices}"
            )
        samples = self.prompts_per_rollout // shares * self.group_size
        if samples % self.micro_batch:
            divisors = [n for n in range(1, samples + 1) if samples % n == 0]
            nearest = sorted(sorted(divisors, key=lambda n: abs(n - self.micro_batch))[:2])
            raise ValueError(
                f"{samples} completions per rank and update (prompts_per_rollout × group_size / updates / ranks) are"
                f" not a multiple of data.micro_batch={self.micro_batch}; choose {' or '.join(map(str, nearest))}"
            )

    def micro_batches_per_step(self, world: int) -> int:
        """How many micro-batches make one optimiser step: Lightning's accumulate_grad_batches."""
        self.check_ranks(world)
        return self.prompts_per_rollout // self.updates_per_rollout // world * self.group_size // self.micro_batch

    @property
    def single_update(self) -> bool:
        """Whether the rollout serves one optimiser step, so that the policy is its own old policy."""
        return self.updates_per_rollout == 1 and self.inner_epochs == 1

    def setup(self, stage: str | None = None) -> None:
        """Read or generate the prompts and tokenise them, once."""
        if self.train or self.heldout:
            return
        train, heldout = self._examples()
        self.train = self._encoded(train, "training")
        self.heldout = self._encoded(heldout, "held-out")[: self.val_prompts]
        if not self.train or not self.heldout:
            raise ValueError(f"{len(self.train)} training and {len(self.heldout)} held-out prompts are left; need both")
        if len(self.train) < self.prompts_per_rollout:
            raise ValueError(
                f"{len(self.train)} training prompts cannot fill a rollout of {self.prompts_per_rollout};"
                " lower data.prompts_per_rollout or give more prompts"
            )

    def _examples(self) -> tuple[list[Example], list[Example]]:
        if self.path is None:
            assert self.task is not None  # checked on construction, as is the next
            assert self.train_prompts is not None
            return (
                self.task.examples("train", self.train_prompts, self.seed),
                self.task.examples("heldout", self.val_prompts, self.seed),
            )
        train = read_examples(self.path)
        if self.val_path is not None:
            return train[: self.train_prompts], read_examples(self.val_path)
        # Which rows are held out depends on the seed alone, not on how many are trained on.
        order = torch.randperm(len(train), generator=generator(self.seed, _HELD_OUT)).tolist()
        heldout = [train[i] for i in order[: self.val_prompts]]
        asked = {_conversation(example) for example in heldout}
        rest = [train[i] for i in sorted(order[self.val_prompts :])]
        kept = [example for example in rest if _conversation(example) not in asked]
        if len(kept) < len(rest):
            self._note_dropped("training: same prompt as a held-out one", len(rest) - len(kept), len(rest))
        return kept[: self.train_prompts], heldout

    def _encoded(self, examples: Sequence[Example], what: str) -> list[tuple[Example, list[int]]]:
        encoded = [(example, encode_prompt(self.policy.tokenizer, example.messages)) for example in examples]
        limit = self.max_prompt_tokens
        kept = [pair for pair in encoded if pair[1] and (limit is None or len(pair[1]) <= limit)]
        if len(kept) < len(encoded):
            reason = f"{what}: empty or longer than data.max_prompt_tokens={limit}"
            self._note_dropped(reason, len(encoded) - len(kept), len(encoded))
        return kept

    def _note_dropped(self, reason: str, count: int, of: int) -> None:
        self.dropped[reason] = count
        log.warning("%d of %d prompts dropped; %s", count, of, reason)

    def prompts_for(self, rollout: int, rank: int, world: int) -> Prompts:
        """This rank's prompts of a rollout, each repeated `group_size` times; groups stay whole.

        Inside each update's window the prompts are dealt to the ranks in turn, so one rank holds what two together
        do. Every prompt is asked once before any is asked again.
        """
        share = self.prompts_per_rollout // self.updates_per_rollout
        chosen = [
            rollout * self.prompts_per_rollout + update * share + place
            for update in range(self.updates_per_rollout)
            for place in range(rank, share, world)
        ]
        prompts = Prompts([], [], [], [], [])
        for position in chosen:
            example, ids = self.train[self._shuffled(position)]
            group = position - rollout * self.prompts_per_rollout
            for member in range(self.group_size):
                sample = group * self.group_size + member
                prompts.examples.append(example)
                prompts.ids.append(ids)
                prompts.seeds.append(derive_seed(self.seed, rollout, sample))
                prompts.sample_index.append(sample)
                prompts.group_index.append(group)
        return prompts

    def _shuffled(self, position: int) -> int:
        lap, place = divmod(position, len(self.train))
        if lap not in self._laps:
            order = torch.randperm(len(self.train), generator=generator(self.seed, _ORDER, lap)).tolist()
            # A rollout touches its own lap, and the next one where it ends inside.
            self._laps = {known: self._laps[known] for known in (lap - 1,) if known in self._laps} | {lap: order}
        return self._laps[lap][place]

    def ensure_rollout(self, rollout: int) -> SequenceBatch:
        """The buffer of this rollout, collected if it is not there. Every rank must call it."""
        if self.buffer.rollout != rollout or self.buffer.batch is None:
            if self.collector is None:
                raise RuntimeError(
                    "nothing collects rollouts: an online method needs the rollout callback (rollout=builtin)"
                )
            batch, metrics = self.collector.collect(rollout)
            self.buffer = Buffer(rollout, batch, metrics)
        assert self.buffer.batch is not None
        return self.buffer.batch

    def _windows(self, rollout: int) -> Iterator[Window]:
        batch = self.ensure_rollout(rollout)
        for inner in range(self.inner_epochs):
            yield from self._inner_epoch(batch, rollout, inner)

    def _inner_epoch(self, batch: SequenceBatch, rollout: int, inner: int) -> Iterator[Window]:
        # Windows are the same prompts in every inner epoch and for any number of ranks; their order and the order
        # inside them change.
        size = len(batch) // self.updates_per_rollout
        order = generator(self.seed, _ORDER, rollout, inner)
        for window in torch.randperm(self.updates_per_rollout, generator=order).tolist():
            rows = window * size + torch.randperm(size, generator=order)
            yield [_micro_batch(batch, part, inner) for part in rows.split(self.micro_batch)]

    def train_dataloader(self) -> MicroBatchLoader:
        """Micro-batches of the current rollout."""
        trainer = self.trainer
        assert trainer is not None
        module: Any = trainer.lightning_module
        length = trainer.accumulate_grad_batches * self.updates_per_rollout * self.inner_epochs

        def total(counts: Tensor) -> Tensor:
            return sum_over_ranks(counts, trainer.strategy.root_device)

        def count(batch: SequenceBatch) -> Tensor:
            found: Tensor = module.count(batch)
            # Where all samples were left out, the one that stands for them must not count either.
            return found if bool(batch.response_mask.any()) else torch.zeros_like(found)

        self.loader = MicroBatchLoader(lambda epoch: list(self._windows(epoch)), length, count, total)
        self.loader.load_state_dict(self._position)
        return self.loader

    def val_dataloader(self) -> DataLoader:
        """This rank's held-out prompts, as `Prompts`; seeds do not depend on the step, so that scores compare."""
        rank, world = rank_and_world()
        mine = list(range(rank, len(self.heldout), world))
        prompts = Prompts(
            examples=[self.heldout[i][0] for i in mine],
            ids=[self.heldout[i][1] for i in mine],
            seeds=[derive_seed(self.seed, _HELD_OUT, i) for i in mine],
            sample_index=mine,
            group_index=mine,
        )
        return DataLoader([prompts], batch_size=None)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """The loader's position, and the buffer of every rank where the checkpoint is taken inside a rollout."""
        inside = self.loader is not None and 0 < self.loader.position < self.loader.length
        mine = None
        if inside and self.buffer.batch is not None:
            mine = {
                "rollout": self.buffer.rollout,
                "metrics": self.buffer.metrics,
                "columns": {name: value.cpu() for name, value in self.buffer.batch.columns()},
                "block_origin": self.buffer.batch.block_origin,
            }
        # Lightning hands the loader its state back on some resumes and not on those from the end of an epoch.
        position = self._position if self.loader is None else self.loader.state_dict()
        return {"position": position, "buffers": gather_objects(mine), "sizes": self._sizes()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the position and this rank's buffer back."""
        self._position = state_dict["position"]
        buffers = state_dict["buffers"]
        rank, world = rank_and_world()
        if all(saved is None for saved in buffers):
            return
        if len(buffers) != world:
            raise RuntimeError(
                f"the replay buffer was saved by {len(buffers)} ranks, this run has {world}:"
                f" resume with {len(buffers)}, or from a checkpoint at a rollout boundary"
            )
        check_same_split(state_dict["sizes"], self._sizes())
        saved = buffers[rank]
        known = {f.name for f in fields(SequenceBatch)}
        columns = {name: value for name, value in saved["columns"].items() if name in known}
        batch = SequenceBatch(**columns, block_origin=saved.get("block_origin", "global"))
        self.buffer = Buffer(saved["rollout"], batch, dict(saved["metrics"]))


# Salts that keep unrelated streams of one seed apart.
_ORDER, _HELD_OUT = 101, 102


def _conversation(example: Example) -> tuple[tuple[str, str], ...]:
    return tuple((message["role"], message["content"]) for message in example.messages)


def _micro_batch(batch: SequenceBatch, rows: Tensor, inner: int) -> Callable[[], SequenceBatch]:
    return lambda: replace(batch.select(rows.to(batch.ids.device)).kept(), iteration=inner).trim()
