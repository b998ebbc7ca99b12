"""Fixed preference data: pairs of answers to one prompt in, micro-batches that keep every pair together out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from dare_lightning.datamodules.chat import EncodedDialogue, encode_dialogue
from dare_lightning.datamodules.pairs import EQUAL_ANSWERS, Preference, recognise_pair_layout, to_preferences
from dare_lightning.datamodules.prompts import Task
from dare_lightning.datamodules.readers import Dialogue
from dare_lightning.datamodules.sft import DataReport, Sample, SFTDataModule, supervised_batch
from dare_lightning.datamodules.sources import read_rows
from dare_lightning.diffusion.noise import derive_seed
from dare_lightning.families.base import PolicyModel
from dare_lightning.replay.batch import SequenceBatch

TOO_LONG = "an answer is longer than max_length"


@dataclass(frozen=True)
class Pair(Sample):
    """The preferred answer (`encoded`) and the other one."""

    rejected: EncodedDialogue

    @property
    def answers(self) -> tuple[EncodedDialogue, ...]:
        """Both, the preferred one first."""
        return (self.encoded, self.rejected)


class PreferenceDataModule(SFTDataModule):
    """Pairs of a file or a generated task; everything else as in `SFTDataModule`, which counts samples: here pairs.

    In a batch the two answers of a pair have the same `group_index`, and the preferred one the larger `reward`. They
    are always in the same micro-batch, and draw their noise independently. Pairs with equal answers, and pairs of
    which an answer does not fit into max_length with its end, are dropped and counted.

    Args:
        policy: for its tokenizer and end-of-text id.
        path: pairs (parquet, JSON Lines, saved data set, hub name); None takes `task`.
        task: generator of examples whose `extra["answer"]` is the preferred answer.
        rejected_task: generator of the same examples, whose `extra["answer"]` is the other answer.
        min_margin: least difference of scores, where rows have them.
        batch_size: pairs an optimiser step, all ranks together.
        micro_batch: pairs a forward pass.
        data: as in `SFTDataModule`.

    Raises:
        ValueError: sizes out of range or that do not divide; no pair left.
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
        rejected_task: Task | None = None,
        count: int = 0,
        val_count: int = 0,
        limit: int | None = None,
        min_margin: float = 0.0,
        chat_template: str | None = None,
        max_length: int = 4096,
        append_eos: bool = True,
        batch_size: int = 64,
        micro_batch: int = 2,
        seed: int = 42,
    ) -> None:
        super().__init__(
            policy,
            path=path,
            split=split,
            val_path=val_path,
            val_split=val_split,
            val_share=val_share,
            task=task,
            count=count,
            val_count=val_count,
            limit=limit,
            chat_template=chat_template,
            max_length=max_length,
            append_eos=append_eos,
            eos_fill="none",
            batch_size=batch_size,
            micro_batch=micro_batch,
            seed=seed,
        )
        if (task is None) != (rejected_task is None):
            raise ValueError(
                "data.task and data.rejected_task generate the two answers of a pair; give both or neither"
            )
        self.rejected_task = rejected_task
        self.min_margin = min_margin

    def _read(self, path: str, split: str | None) -> tuple[list[Dialogue], DataReport]:
        table = read_rows(path, split, self.limit)
        report = DataReport(path, recognise_pair_layout(table.columns), len(table))
        return list(to_preferences(table, report.dropped, self.min_margin)), report

    def _generated(self, split: Literal["train", "heldout"], count: int) -> tuple[list[Dialogue], DataReport]:
        assert self.rejected_task is not None
        chosen, report = super()._generated(split, count)
        rejected = self.rejected_task.examples(split, count, self.seed)
        pairs: list[Dialogue] = []
        for dialogue, other in zip(chosen, rejected, strict=True):
            prompt, answer = dialogue.messages[: dialogue.context], str(other.extra["answer"])
            if list(other.messages) != list(prompt):
                raise ValueError("data.task and data.rejected_task ask different questions for the same seed")
            if answer == dialogue.messages[-1]["content"]:
                report.dropped[EQUAL_ANSWERS] += 1
                continue
            worse = [*prompt, {"role": "assistant", "content": answer}]
            pairs.append(Preference(dialogue.messages, dialogue.context, dialogue.source, dialogue.index, worse))
        return pairs, report

    def _encoded(self, dialogues: Sequence[Dialogue], report: DataReport) -> tuple[list[Sample], DataReport]:
        samples: list[Sample] = []
        for dialogue in dialogues:
            assert isinstance(dialogue, Preference)
            chosen = self._encode(dialogue.messages, dialogue.context)
            rejected = self._encode(dialogue.rejected, dialogue.context)
            reason = chosen.dropped or rejected.dropped
            if reason is None and not (chosen.complete and rejected.complete):
                reason = TOO_LONG
            if reason is None and chosen.ids == rejected.ids:
                reason = EQUAL_ANSWERS
            if reason is not None:
                report.dropped[reason] += 1
                continue
            report.prompt_tokens.append(chosen.prompt_length)
            report.answer_tokens += [sum(encoded.supervised) for encoded in (chosen, rejected)]
            samples.append(Pair(chosen, dialogue.index, rejected))
        return samples, report

    def _encode(self, messages: Any, context: int) -> EncodedDialogue:
        end = self.policy.eos_token_id if self.append_eos else None
        return encode_dialogue(self.policy.tokenizer, messages, self.max_length, end, context=context)

    def make_batch(self, samples: Sequence[Sample], noise: Sequence[int], fill_to: int = 0) -> SequenceBatch:
        """Both answers of every pair, the preferred one first.

        Args:
            samples: P pairs.
            noise: path of the noise stream in front of the pair's index and the answer's place in it.
            fill_to: unused; answers are as long as they are.
        """
        answers, seeds = [], []
        for pair in samples:
            assert isinstance(pair, Pair)
            for place, encoded in enumerate((pair.encoded, pair.rejected)):
                answers.append(Sample(encoded, pair.index))
                seeds.append(derive_seed(self.seed, *noise, pair.index, place))
        batch = supervised_batch(self.policy, answers, seeds)
        preferred = torch.tensor([1.0, 0.0]).repeat(len(samples))
        return replace(batch, group_index=batch.sample_index.clone(), reward=preferred)
