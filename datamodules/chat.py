"""Conversations to token ids, with exactly the assistant's words and end-of-turn tokens supervised.

`encode_prompt` is the only way a prompt becomes ids, for fine-tuning, rollouts and evaluation alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dare_lightning.families.base import PolicyModel

Messages = Sequence[Mapping[str, str]]

PROMPT_TOO_LONG = "prompt longer than max_length"
ANSWER_CUT_OFF = "max_length removes the whole answer"
EMPTY_ANSWER = "empty answer"


class TemplateError(ValueError):
    """A chat template is missing, refuses a conversation, or renders it so that answers cannot be located."""


class _Inconsistent(TemplateError):
    """The prompt before an answer cannot be told from the answer."""


@dataclass(frozen=True)
class EncodedDialogue:
    """A conversation as ids.

    Attributes:
        ids: the tokens, nothing after the last supervised one; empty where the conversation was dropped.
        supervised: for each token, whether it is taught.
        complete: the last answer and its end are all there; False where max_length cut something off.
        dropped: why the conversation cannot be used, or None.
    """

    ids: tuple[int, ...]
    supervised: tuple[bool, ...]
    complete: bool = True
    dropped: str | None = None

    @property
    def prompt_length(self) -> int:
        """Tokens before the first supervised one."""
        return self.supervised.index(True) if True in self.supervised else len(self.ids)


def fill_block(encoded: EncodedDialogue, policy: PolicyModel) -> EncodedDialogue:
    """The conversation with taught end-of-text tokens up to the end of its last block, if it is complete.

    A block policy that decodes writes whole blocks, so it must learn what follows the end of an answer.

    Raises:
        ValueError: the policy has no blocks.

    Source: fine-tuning of SDAR, arXiv:2510.06303.
    """
    if policy.block_length is None:
        raise ValueError(f"data.eos_fill=block needs a block-diffusion policy, {type(policy).__name__} has no blocks")
    missing = -len(encoded.ids) % policy.block_length if encoded.complete else 0
    return replace(
        encoded,
        ids=(*encoded.ids, *[policy.eos_token_id] * missing),
        supervised=(*encoded.supervised, *[True] * missing),
    )


def use_template(tokenizer: Any, file: str | None) -> None:
    """Give the tokenizer the chat template of a file; None leaves its own.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if file is not None:
        tokenizer.chat_template = Path(file).expanduser().read_text(encoding="utf-8")


def render(tokenizer: Any, messages: Messages, add_generation_prompt: bool) -> str:
    """The conversation in the tokenizer's chat template.

    Raises:
        TemplateError: the tokenizer has no template, or the template refuses the conversation.
    """
    from jinja2.exceptions import TemplateError as JinjaError

    if not tokenizer.chat_template:
        raise TemplateError(
            f"the tokenizer of {tokenizer.name_or_path or 'this model'} has no chat template;"
            " set one with data.chat_template=<file> (a Jinja file, as published with instruction-tuned checkpoints)"
        )
    try:
        text: str = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except JinjaError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise TemplateError(f"the chat template refuses a conversation of ({roles}): {error}") from error
    return text


def encode_prompt(tokenizer: Any, messages: Messages) -> list[int]:
    """The ids a policy is given before it answers, beginning-of-text token as the template writes it.

    Earlier answers inside the prompt are tokenised apart from what surrounds them, as the policy produced them
    and as `encode_dialogue` does, so the ids do not depend on who asks.

    Raises:
        TemplateError: see `render`.
    """
    if messages and messages[-1]["role"] == "assistant":
        return encode_prompt(tokenizer, messages[:-1]) + _encode(tokenizer, [messages[-1]["content"]])[0]
    text = render(tokenizer, messages, True)
    try:
        spans = _answer_spans(tokenizer, messages, text, True)
    except _Inconsistent:
        # Such a template cannot be fine-tuned on either, so there is nothing to agree with.
        spans = []
    cuts = [0, *(place for span in spans for place in span), len(text)]
    pieces = [text[start:stop] for start, stop in zip(cuts, cuts[1:], strict=False)]
    return [token for piece in _encode(tokenizer, pieces) for token in piece]


def encode_dialogue(
    tokenizer: Any, messages: Messages, max_length: int, eos_token_id: int | None = None, context: int = 0
) -> EncodedDialogue:
    """A whole conversation, with every answer and the end-of-turn token behind it supervised.

    An answer is what the template writes between the generation prompt and the end of the turn, so a thinking
    frame that the template adds there is part of it. The end of the turn is the special token that follows the
    answer; a template without one gives none. What the template writes after the last turn (a newline, the header
    of another turn) is left out. Empty answers are not supervised.

    Args:
        messages: the conversation; turns after the last answer are ignored.
        max_length: most tokens to keep, counted from the start. A cut answer gets no end token.
        eos_token_id: a supervised token to put behind a complete conversation, where it does not end in it anyway
            and fits; None for none.
        context: how many of the first messages are given; answers among them are not taught.

    Raises:
        TemplateError: see `render`; or what comes before an answer is not rendered in the same way with the answer
            and without it.
    """
    last = max((place for place, turn in enumerate(messages) if turn["role"] == "assistant"), default=-1)
    messages = messages[: last + 1]
    answered = [
        place >= context and bool(turn["content"].strip())
        for place, turn in enumerate(messages)
        if turn["role"] == "assistant"
    ]
    if not any(answered):
        return EncodedDialogue((), (), dropped=EMPTY_ANSWER)
    text = render(tokenizer, messages, False)
    spans = _answer_spans(tokenizer, messages, text, False)
    end_of_turn = _end_of_turn(tokenizer, text[spans[-1][1] :])
    pieces = [text[: spans[0][0]]]
    for (start, stop), (following, _) in zip(spans, [*spans[1:], (len(text), 0)], strict=True):
        pieces += [text[start:stop], text[stop:following]]
    pieces[-1] = end_of_turn
    encoded = _encode(tokenizer, [*pieces, end_of_turn])
    end_length = len(encoded.pop())

    ids, supervised = list(encoded[0]), [False] * len(encoded[0])
    for wanted, answer, behind, tail in zip(answered, encoded[1::2], encoded[2::2], pieces[2::2], strict=True):
        ends = end_length if wanted and tail.startswith(end_of_turn) else 0
        ids += [*answer, *behind]
        supervised += [wanted] * len(answer) + [True] * ends + [False] * (len(behind) - ends)
    return _shorten(ids, supervised, max_length, eos_token_id)


def _shorten(ids: list[int], supervised: list[bool], max_length: int, eos_token_id: int | None) -> EncodedDialogue:
    first = supervised.index(True)
    if first > max_length:
        return EncodedDialogue((), (), dropped=PROMPT_TOO_LONG)
    if first == max_length:
        return EncodedDialogue((), (), dropped=ANSWER_CUT_OFF)
    complete = len(ids) <= max_length
    if eos_token_id is not None and ids[-1] != eos_token_id and len(ids) < max_length:
        ids, supervised = [*ids, eos_token_id], [*supervised, True]
    ids, supervised = ids[:max_length], supervised[:max_length]
    used = len(ids) - supervised[::-1].index(True)
    return EncodedDialogue(tuple(ids[:used]), tuple(supervised[:used]), complete)


def _answer_spans(tokenizer: Any, messages: Messages, text: str, add_generation_prompt: bool) -> list[tuple[int, int]]:
    """Where each answer lies in the rendered text.

    It starts where the generation prompt ends, and stops where a different answer would. Nothing is searched for
    in the text, so neither a header with ordinary words in it nor an answer that quotes a header can mislead.
    """
    spans = []
    for place, turn in enumerate(messages):
        if turn["role"] != "assistant":
            continue
        if not place:
            raise _Inconsistent("the conversation begins with an answer; there must be a prompt before it")
        before = render(tokenizer, messages[:place], True)
        if not text.startswith(before):
            raise _Inconsistent(
                f"the chat template does not tell answers from prompts: what comes before turn {place + 1} changes"
                f" once the answer follows ({_difference(before, text)}); set another one with"
                " data.chat_template=<file>"
            )
        swapped = [*messages[:place], {**turn, "content": _unlike(turn["content"])}, *messages[place + 1 :]]
        stop = len(text) - _common_suffix(text, render(tokenizer, swapped, add_generation_prompt))
        spans.append((len(before), max(stop, len(before))))
    return spans


def _unlike(content: str) -> str:
    """A one-letter answer that does not end as `content` does, with or without its trailing blanks."""
    return next(letter for letter in "xyz" if letter not in (content[-1:], content.rstrip()[-1:]))


def _common_suffix(one: str, other: str) -> int:
    shortest = min(len(one), len(other))
    return next((n for n in range(shortest) if one[-1 - n] != other[-1 - n]), shortest)


def _difference(before: str, text: str) -> str:
    place = next((n for n, pair in enumerate(zip(before, text, strict=False)) if pair[0] != pair[1]), len(text))
    return f"at character {place}: {before[place : place + 20]!r} became {text[place : place + 20]!r}"


def _end_of_turn(tokenizer: Any, tail: str) -> str:
    """The special token at the start of `tail`, with blanks before it, or ""."""
    bare = tail.lstrip()
    named = {str(token) for token in tokenizer.added_tokens_decoder.values()} | set(tokenizer.all_special_tokens)
    found = max((token for token in named if token and bare.startswith(token)), key=len, default="")
    return tail[: len(tail) - len(bare) + len(found)] if found else ""


def _encode(tokenizer: Any, pieces: list[str]) -> list[list[int]]:
    ids: list[list[int]] = tokenizer(pieces, add_special_tokens=False, verbose=False)["input_ids"]
    return ids
