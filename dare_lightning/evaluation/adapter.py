"""The live policy as OpenCompass sees a model, and our verifiers as it sees evaluators."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from dare_lightning.diffusion.noise import derive_seed
from dare_lightning.evaluation.benchmark import Benchmark
from dare_lightning.evaluation.results import sha256_of_json
from dare_lightning.rewards.base import Reward

Messages = list[dict[str, str]]
ROLES = {"HUMAN": "user", "BOT": "assistant", "SYSTEM": "system"}

# Keeps the streams of benchmark answers and of likelihoods apart from others of the same seed.
_ANSWERS, _LIKELIHOODS = 301, 302


class Asked(NamedTuple):
    """A question: the conversation so far, and the seed of its answer."""

    messages: Messages
    seed: int


class Judged(NamedTuple):
    """A given answer to a question, to be scored with noise drawn from `seed`."""

    messages: Messages
    answer: str
    seed: int


class Answered(NamedTuple):
    """A generated answer and its length in tokens."""

    text: str
    tokens: int


class Asker:
    """Puts one data set's questions to the policy, and remembers what was asked.

    A question's seed depends on its words, on how often it was asked before and on `seed` alone: neither on its place
    in the data set nor on a limit, a batch or the number of ranks. All answers given to one question share their noise.

    Args:
        generate: questions -> answers.
        likelihood: given answers -> negative ELBO in nats a token, each.
        count_tokens: text -> number of tokens.
        seed: of the evaluation.

    Attributes:
        prompts, tokens: the conversations, and the lengths of their answers.
        seconds: wall-clock time spent waiting for answers.
        shots: answered examples that stood before a question, at most.
    """

    def __init__(
        self,
        generate: Callable[[Sequence[Asked]], list[Answered]],
        likelihood: Callable[[Sequence[Judged]], list[float]],
        count_tokens: Callable[[str], int],
        seed: int,
    ) -> None:
        self._generate = generate
        self._likelihood = likelihood
        self.count_tokens = count_tokens
        self.seed = seed
        self.prompts: list[Messages] = []
        self.tokens: list[int] = []
        self.seconds = 0.0
        self.shots = 0
        self._times: Counter[str] = Counter()

    def answers(self, prompts: Sequence[Any]) -> list[str]:
        """One answer for each prompt, as OpenCompass writes prompts."""
        asked = []
        for prompt in prompts:
            messages = to_messages(prompt)
            key = sha256_of_json(messages)
            asked.append(Asked(messages, _seed_of(self.seed, key, _ANSWERS, self._times[key])))
            self._times[key] += 1
            self._see(messages)
        started = time.perf_counter()
        found = self._generate(asked)
        self.seconds += time.perf_counter() - started
        self.prompts += [question.messages for question in asked]
        self.tokens += [answer.tokens for answer in found]
        return [answer.text for answer in found]

    def losses(self, prompts: Sequence[Any]) -> list[float]:
        """Negative ELBO a token of the last turn of each prompt, given the turns before it.

        Raises:
            ValueError: the last turn is not the assistant's, so there is no answer to score.
        """
        judged = []
        for prompt in prompts:
            messages = to_messages(prompt)
            if len(messages) < 2 or messages[-1]["role"] != "assistant":
                raise ValueError("likelihoods need prompts whose last turn is the answer (role BOT)")
            context = messages[:-1]
            self._see(context)
            seed = _seed_of(self.seed, sha256_of_json(context), _LIKELIHOODS)
            judged.append(Judged(context, messages[-1]["content"], seed))
        return self._likelihood(judged)

    def _see(self, messages: Messages) -> None:
        # A last turn of the assistant is the beginning of the answer, not an example.
        self.shots = max(self.shots, sum(message["role"] == "assistant" for message in messages[:-1]))


def to_messages(prompt: Any) -> Messages:
    """A prompt of OpenCompass (text, or a list of roles and section marks) as a conversation.

    Turns of one role that follow each other become one. A last turn of the assistant is the beginning of its answer.
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    messages: Messages = []
    for item in prompt:
        # Strings separate examples; marks of sections have no text.
        if not isinstance(item, Mapping) or "prompt" not in item:
            continue
        role = ROLES.get(item["role"]) or ROLES[item["fallback_role"]]
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += "\n" + item["prompt"]
        else:
            messages.append({"role": role, "content": item["prompt"]})
    return messages


def _seed_of(seed: int, key: str, *salt: int) -> int:
    return derive_seed(seed, int(key[:15], 16), *salt)


def live_model(asker: Asker) -> Any:
    """An OpenCompass model that asks the policy itself; needs OpenCompass."""
    import numpy as np
    from opencompass.models.base import BaseModel

    class LivePolicy(BaseModel):
        def __init__(self) -> None:
            super().__init__(path="")

        def generate(self, inputs: Sequence[Any], max_out_len: int) -> list[str]:
            answers = asker.answers(inputs)
            if len(answers) != len(inputs):
                raise ValueError(f"{len(answers)} answers to {len(inputs)} questions; there must be one each")
            return answers

        def get_ppl_from_template(self, templates: Sequence[Any], mask_length: Any = None) -> Any:
            return np.array(asker.losses(templates))

        def get_token_len(self, prompt: str) -> int:
            return asker.count_tokens(prompt)

        def parse_template(self, prompt_template: Any, mode: str) -> Any:
            # A batch of prompts comes as a plain list or tuple, one prompt as text or a list class of its own.
            if type(prompt_template) in (list, tuple):
                return [self.parse_template(prompt, mode) for prompt in prompt_template]
            # The inferencer of likelihoods handles text.
            return str(prompt_template) if mode == "ppl" else prompt_template

    return LivePolicy()


def verifying_evaluator(benchmark: Benchmark) -> type:
    """An OpenCompass evaluator class that asks a benchmark's verifier; needs OpenCompass.

    Raises:
        ValueError: the benchmark has none.
    """
    from opencompass.openicl.icl_evaluator import BaseEvaluator

    found = benchmark.verifier()
    if found is None:
        raise ValueError(f"{benchmark.name} has no verifier")
    verifier: Reward = found

    class Verifying(BaseEvaluator):
        def score(self, predictions: Sequence[str], references: Sequence[Any], test_set: Any) -> dict[str, Any]:
            rows = [dict(row) for row in test_set]
            examples = [benchmark.example(row, index) for index, row in enumerate(rows)]
            answers = [benchmark.answer(text, row) for text, row in zip(predictions, rows, strict=True)]
            verdicts = verifier(answers, examples)
            details = [
                {
                    "pred": verdict.answer,
                    "answer": example.ground_truth,
                    "correct": verdict.status == "right",
                    "status": verdict.status,
                }
                for example, verdict in zip(examples, verdicts, strict=True)
            ]
            share = sum(verdict.status == "right" for verdict in verdicts) / max(len(verdicts), 1)
            return {"accuracy": 100 * share, "details": details}

    return Verifying
