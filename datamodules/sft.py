"""Fixed data for supervised fine-tuning: conversations in, micro-batches of supervised sequences out."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor

from dare_lightning.datamodules.chat import EncodedDialogue, encode_dialogue, fill_block, use_template
from dare_lightning.datamodules.prompts import Task
from dare_lightning.datamodules.readers import Dialogue, recognise_layout, to_dialogues
from dare_lightning.datamodules.sizes import check_positive, check_same_split, multiples_near
from dare_lightning.datamodules.sources import read_rows
from dare_lightning.datamodules.splitting import Batches, TokenSplit, by_number
from dare_lightning.diffusion.noise import derive_seed, generator
from dare_lightning.families.base import PolicyModel
from dare_lightning.parallel.collectives import rank_and_world, sum_over_ranks
from dare_lightning.replay.batch import SequenceBatch
from dare_lightning.replay.loader import START, MicroBatchLoader, Window

log = logging.getLogger(__name__)

EosFill = Literal["none", "batch", "max_length", "block"]

# Salts that keep unrelated streams of one seed apart.
_ORDER, _HELD_OUT = 201, 202


@dataclass
class DataReport:
    """What was read, what was kept, and why the rest was not.

    Attributes:
        source: file, folder, hub name or task.
        layout: the column layout found.
        rows: rows read.
        dropped: rows left out, by reason.
        cut: rows kept whose answer max_length shortened.
        held_out: rows kept that are not trained on.
        prompt_tokens, answer_tokens: lengths of the kept rows; everything before the first supervised token is
            prompt, all supervised tokens are answer.
    """

    source: str
    layout: str
    rows: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    cut: int = 0
    held_out: int = 0
    prompt_tokens: list[int] = field(default_factory=list)
    answer_tokens: list[int] = field(default_factory=list)

    @property
    def kept(self) -> int:
        """Rows that are used, held out or not."""
        return len(self.prompt_tokens)

    def __str__(self) -> str:
        text = f"{self.source} ({self.layout} layout): {self.kept} of {self.rows} rows"
        for reason, count in sorted(self.dropped.items()):
            text += f"; {count} dropped: {reason}"
        text += f"; {self.cut} answers cut at max_length" if self.cut else ""
        return text + (f"; {self.held_out} held out" if self.held_out else "")


@dataclass(frozen=True)
class Sample:
    """An encoded conversation; `index` is its row in the source, and so the root of its noise."""

    encoded: EncodedDialogue
    index: int

    @property
    def answers(self) -> tuple[EncodedDialogue, ...]:
        """Every encoded conversation of the row."""
        return (self.encoded,)


class SFTDataModule(L.LightningDataModule):
    """Conversations of a file or a generated task, encoded once, shuffled by (seed, epoch).

    An optimiser step is a window of `batch_size` samples, dealt to the ranks and cut into micro-batches. The last
    window of an epoch is shorter where the samples do not divide; its loss is divided by what is in it. With
    several ranks each must have the same number, so up to ranks - 1 samples sit an epoch out (others the next one).

    Args:
        policy: for its tokenizer and end-of-text id.
        path: conversations (parquet, JSON Lines, saved data set, hub name); None takes `task`.
        split: which part of `path`.
        val_path: held-out conversations; None sets `val_share` of the rows aside.
        val_split: which part of `val_path`.
        val_share: share of the rows that is held out, by a hash of the row number: the same rows in every run.
        task: generator of examples whose `extra["answer"]` is the answer to learn.
        count, val_count: how many examples of the task to generate for training and to hold out.
        limit: reads the first `limit` rows only.
        chat_template: a Jinja file that replaces the tokenizer's template.
        max_length: longest sequence in tokens. Longer answers are cut and get no end token; rows whose prompt
            leaves no room for an answer are dropped and counted.
        append_eos: teach one end-of-text token behind the last end of turn.
        eos_fill: end-of-text tokens that follow, attended and taught as part of the answer. "batch" fills up to the
            longest sequence of the optimiser step (LLaDA's guidelines), "max_length" to max_length (DARE), "block" to
            the end of a block policy's last block (SDAR), "none" not at all. Cut answers are never filled.
        batch_size: samples an optimiser step, all ranks together.
        micro_batch: samples a forward pass.
        max_tokens: tokens of a forward pass at most, fill included, padding not; replaces `micro_batch`.
        seed: of the order and the noise.

    Raises:
        ValueError: sizes out of range or that do not divide; no row left.
    """

    def __init__(
        self,
        policy: PolicyModel,
        path: str | None = None,
        split: str | None = None,
        val_path: str | None = None,
        val_split: str | None = None,
        val_share: float = 0.0,
        task: Task | None = None,
        count: int = 0,
        val_count: int = 0,
        limit: int | None = None,
        chat_template: str | None = None,
        max_length: int = 4096,
        append_eos: bool = True,
        eos_fill: EosFill = "batch",
        batch_size: int = 32,
        micro_batch: int = 4,
        max_tokens: int | None = None,
        seed: int = 42,
    ) -> None:
        super().__init__()
        self.policy, self.task = policy, task
        self.path, self.split, self.limit = path, split, limit
        self.val_path, self.val_split, self.val_share = val_path, val_split, val_share
        self.count, self.val_count = count, val_count
        self.chat_template, self.max_length = chat_template, max_length
        self.append_eos, self.eos_fill = append_eos, eos_fill
        self.batch_size, self.micro_batch, self.seed = batch_size, micro_batch, seed
        self.max_tokens = max_tokens
        self.train: list[Sample] = []
        self.heldout: list[Sample] = []
        self.report: DataReport | None = None
        self.val_report: DataReport | None = None
        self.loader: MicroBatchLoader | None = None
        self._position = START
        self._most_filled = 0
        self._check_settings()

    def _check_settings(self) -> None:
        check_positive({"max_length": self.max_length, "batch_size": self.batch_size, "micro_batch": self.micro_batch})
        check_positive({} if self.max_tokens is None else {"max_tokens": self.max_tokens})
        if self.eos_fill not in ("none", "batch", "max_length", "block"):
            raise ValueError(f"data.eos_fill={self.eos_fill!r}; use none, batch, max_length or block")
        if not 0 <= self.val_share < 1:
            raise ValueError(f"data.val_share={self.val_share} must be at least 0 and below 1")
        if (self.path is None) == (self.task is None):
            given = "neither" if self.path is None else "both"
            raise ValueError(f"data needs either path or task, {given} given; set data.path=<file, folder or hub name>")
        if self.task is not None and self.count < 1:
            raise ValueError(f"data.count={self.count} must say how many examples of the task to generate")

    def check_ranks(self, world: int) -> None:
        """Raise ValueError where the sizes do not divide among `world` ranks."""
        size = self.micro_batch if self.max_tokens is None else 1
        unit = size * world
        if self.batch_size % unit:
            choices = multiples_near(self.batch_size, unit)
            raise ValueError(
                f"data.batch_size={self.batch_size} is not a multiple of micro_batch × ranks ="
                f" {size} × {world} = {unit}; choose data.batch_size={choices}"
            )

    def micro_batches_per_step(self, world: int) -> int:
        """How many micro-batches make one optimiser step: Lightning's accumulate_grad_batches."""
        self.check_ranks(world)
        plan = self.token_split(world)
        return self.batch_size // (self.micro_batch * world) if plan is None else plan.parts

    def token_split(self, world: int) -> TokenSplit | None:
        """How steps are split by tokens; None where they are split by number."""
        if self.max_tokens is None:
            return None
        self.setup()
        return TokenSplit.of([self._read_tokens(s) for s in self.train], self.batch_size // world, self.max_tokens)

    def _read_tokens(self, sample: Sample) -> int:
        """The most tokens that the sample can have in a batch."""
        return max(len(sample.encoded.ids), self._most_filled if sample.encoded.complete else 0)

    # Reading.

    def setup(self, stage: str | None = None) -> None:
        """Read or generate the conversations and encode them, once."""
        if self.train:
            return
        use_template(self.policy.tokenizer, self.chat_template)
        if self.task is not None:
            train = self._generated("train", self.count)
            heldout = self._generated("heldout", self.val_count) if self.val_count else None
        else:
            train = self._read(str(self.path), self.split)
            heldout = None if self.val_path is None else self._read(self.val_path, self.val_split)
        samples, self.report = self._encoded(*train)
        if heldout is not None:
            self.heldout, self.val_report = self._encoded(*heldout)
        held = {s.index for s in samples if heldout is None and is_held_out(s.index, self.val_share)}
        self.train = [s for s in samples if s.index not in held]
        self.heldout += [s for s in samples if s.index in held]
        self.report.held_out = len(held)
        if not self.train:
            raise ValueError(f"no conversation to train on is left: {self.report}")
        self._most_filled = self._fill_to(self.train)
        for report in (self.report, self.val_report):
            if report is not None:
                log.log(logging.WARNING if report.dropped or report.cut else logging.INFO, "%s", report)

    def _read(self, path: str, split: str | None) -> tuple[list[Dialogue], DataReport]:
        table = read_rows(path, split, self.limit)
        report = DataReport(path, recognise_layout(table.columns), len(table))
        return to_dialogues(table, report.dropped), report

    def _generated(self, split: Literal["train", "heldout"], count: int) -> tuple[list[Dialogue], DataReport]:
        assert self.task is not None
        report = DataReport(f"{type(self.task).__name__}, {split}", "generated", count)
        dialogues = []
        for number, example in enumerate(self.task.examples(split, count, self.seed)):
            if "answer" not in example.extra:
                raise ValueError(
                    f"{type(self.task).__name__} gives no answers to learn: extra has {list(example.extra)}"
                )
            answer = {"role": "assistant", "content": str(example.extra["answer"])}
            dialogues.append(Dialogue([*example.messages, answer], len(example.messages), example.source, number))
        return dialogues, report

    def _encoded(self, dialogues: Sequence[Dialogue], report: DataReport) -> tuple[list[Sample], DataReport]:
        end = self.policy.eos_token_id if self.append_eos else None
        samples = []
        for dialogue in dialogues:
            encoded = encode_dialogue(
                self.policy.tokenizer, dialogue.messages, self.max_length, end, context=dialogue.context
            )
            if encoded.dropped is not None:
                report.dropped[encoded.dropped] += 1
                continue
            encoded = fill_block(encoded, self.policy) if self.eos_fill == "block" else encoded
            report.cut += not encoded.complete
            report.prompt_tokens.append(encoded.prompt_length)
            report.answer_tokens.append(sum(encoded.supervised))
            samples.append(Sample(encoded, dialogue.index))
        return samples, report

    # Batches.

    def make_batch(self, samples: Sequence[Sample], noise: Sequence[int], fill_to: int = 0) -> SequenceBatch:
        """The sequences as columns, right-padded.

        Args:
            samples: B conversations.
            noise: path of the noise stream in front of the sample index.
            fill_to: length to which complete sequences are filled with taught end-of-text tokens.
        """
        seeds = [derive_seed(self.seed, *noise, sample.index) for sample in samples]
        return supervised_batch(self.policy, samples, seeds, fill_to)

    def order(self, epoch: int) -> list[int]:
        """Positions in `train`, as this epoch goes through them."""
        return torch.randperm(len(self.train), generator=generator(self.seed, _ORDER, epoch)).tolist()

    def windows(self, epoch: int, rank: int, world: int) -> Iterator[Window]:
        """This rank's micro-batches of each optimiser step of an epoch.

        The samples of a step are dealt to the ranks in turn, so any number of ranks together trains on the same.
        """
        order, plan = self.order(epoch), self.token_split(world)
        for start in range(0, len(order), self.batch_size):
            window = [self.train[position] for position in order[start : start + self.batch_size]]
            window = window[: len(window) // world * world]
            if window:
                fill_to = self._fill_to(window)
                mine = window[rank::world]
                parts = by_number(mine, self.micro_batch) if plan is None else plan.split(mine, self._read_tokens)
                yield [partial(self.make_batch, part, (_ORDER, epoch), fill_to) for part in parts]

    def _fill_to(self, samples: Sequence[Sample]) -> int:
        if self.eos_fill == "batch":
            return max(len(sample.encoded.ids) for sample in samples)
        return self.max_length if self.eos_fill == "max_length" else 0

    def train_dataloader(self) -> MicroBatchLoader:
        """Micro-batches in windows of one optimiser step."""
        trainer = self.trainer
        assert trainer is not None
        module: Any = trainer.lightning_module
        rank, world = rank_and_world()
        self.check_ranks(world)
        length = sum(len(window) for window in self.windows(0, rank, world))
        if not length:
            raise ValueError(f"{len(self.train)} conversations are fewer than the {world} ranks")

        def windows(epoch: int) -> list[Window]:
            return list(self.windows(epoch, rank, world))

        def total(counts: Tensor) -> Tensor:
            return sum_over_ranks(counts, trainer.strategy.root_device)

        self.loader = MicroBatchLoader(windows, length, module.count, total)
        self.loader.load_state_dict(self._position)
        return self.loader

    def _split(self) -> dict[str, int]:
        """What decides how an epoch is split into micro-batches."""
        return {
            "batch_size": self.batch_size,
            "micro_batch": self.micro_batch,
            "max_tokens": self.max_tokens or 0,
            "ranks": rank_and_world()[1],
            "conversations": len(self.train),
        }

    def state_dict(self) -> dict[str, Any]:
        """The loader's position: Lightning does not hand it back on a resume from the end of an epoch."""
        inside = self.loader is not None and 0 < self.loader.position < self.loader.length
        position = self._position if self.loader is None else self.loader.state_dict()
        return {"position": position, "split": self._split() if inside else {}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the checkpoint was taken.

        Raises:
            RuntimeError: that was inside an epoch, which this run splits in another way.
        """
        check_same_split(state_dict["split"], self._split())
        self._position = state_dict["position"]

    def val_dataloader(self) -> Batches | list[Any]:
        """Held-out sequences; their noise does not depend on the epoch, so that losses compare.

        They are filled with end tokens as in training, each `batch_size` of them to their own longest. Empty where
        nothing is held out. Ranks get equal shares, up to ranks - 1 sequences are left out.
        """
        rank, world = rank_and_world()
        samples = self.heldout[: len(self.heldout) // world * world]
        if not samples:
            return []
        makers = []
        for start in range(0, len(samples), self.batch_size):
            window = samples[start : start + self.batch_size]
            fill_to = self._fill_to(window)
            makers += [
                partial(self.make_batch, part, (_HELD_OUT,), fill_to)
                for part in by_number(window[rank::world], self.micro_batch)
            ]
        return Batches(makers)


def supervised_batch(
    policy: PolicyModel, samples: Sequence[Sample], seeds: Sequence[int], fill_to: int = 0
) -> SequenceBatch:
    """Conversations as columns, right-padded.

    Args:
        policy: for its pad and end-of-text ids.
        samples: B conversations.
        seeds: B roots of random draws.
        fill_to: length to which complete sequences are filled with taught end-of-text tokens.
    """
    length = max(fill_to, max(len(sample.encoded.ids) for sample in samples))
    ids = torch.full((len(samples), length), policy.pad_token_id)
    exists = torch.zeros(len(samples), length, dtype=torch.bool)
    taught = torch.zeros(len(samples), length, dtype=torch.bool)
    for row, sample in enumerate(samples):
        used = len(sample.encoded.ids)
        ids[row, :used] = torch.tensor(sample.encoded.ids)
        exists[row, :used] = True
        taught[row, :used] = torch.tensor(sample.encoded.supervised)
        if sample.encoded.complete and used < fill_to:
            ids[row, used:fill_to] = policy.eos_token_id
            exists[row, used:fill_to] = taught[row, used:fill_to] = True
    return SequenceBatch(
        ids=ids,
        attention_mask=exists,
        response_mask=taught,
        completion_mask=taught.clone(),
        noise_seed=torch.tensor(list(seeds)),
        sample_index=torch.tensor([sample.index for sample in samples]),
    )


def is_held_out(index: int, share: float) -> bool:
    """Whether row `index` belongs to the held-out share; depends on nothing else."""
    return derive_seed(0, _HELD_OUT, index) < share * 2**63
