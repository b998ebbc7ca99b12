"""Fine-tuning supervises the whole answer and nothing else; prompts are the same ids everywhere."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from dare_lightning.datamodules.chat import (
    ANSWER_CUT_OFF,
    EMPTY_ANSWER,
    PROMPT_TOO_LONG,
    EncodedDialogue,
    TemplateError,
    encode_dialogue,
    encode_prompt,
    render,
    use_template,
)
from dare_lightning.families.tokenizer import load_tokenizer
from tests.shared import FIXTURES, fixture_model, golden_files
from tests.tiny import BOS, END_OF_TURN, EOS, tiny_tokenizer

PLAIN = (
    "{{ bos_token }}{% for m in messages %}{{ m.role ~ '\n\n' ~ m.content ~ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant\n\n' }}{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ 'assistant\n\n' }}"
    "{% generation %}{{ m.content ~ '<|eot_id|>' }}{% endgeneration %}"
    "{% else %}{{ m.role ~ '\n\n' ~ m.content ~ '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant\n\n' }}{% endif %}"
)
WORDY = PLAIN.replace("m.role ~", "('the answer is' if m.role == 'assistant' else m.role) ~").replace(
    "{{ 'assistant\n\n' }}", "{{ 'the answer is\n\n' }}"
)
HEADER_ALWAYS = PLAIN.replace("{% if add_generation_prompt %}", "").replace(
    "'assistant\n\n' }}{% endif %}", "'assistant\n\n' }}"
)
NEWLINE_BEHIND = PLAIN.replace("'<|eot_id|>'", "'<|eot_id|>\n'")
TEMPLATES = {
    "markers": MARKED,
    "no_markers": PLAIN,
    "word_in_header": WORDY,
    "header_always": HEADER_ALWAYS,
    "newline_behind_turn": NEWLINE_BEHIND,
}

CHAT = [
    {"role": "user", "content": "sum {1} and 50%?\n"},
    {"role": "assistant", "content": "the answer is\n\nassistant {3}"},
    {"role": "user", "content": "and %s?"},
    {"role": "assistant", "content": "100% x"},
]


@pytest.fixture(params=list(TEMPLATES.values()), ids=list(TEMPLATES))
def tokenizer(request: pytest.FixtureRequest) -> Any:
    made = tiny_tokenizer(110)
    made.chat_template = request.param
    return made


def plain_tokenizer(template: str = PLAIN) -> Any:
    made = tiny_tokenizer(110)
    made.chat_template = template
    return made


def supervised_texts(tokenizer: Any, encoded: EncodedDialogue) -> list[str]:
    runs = groupby(zip(encoded.ids, encoded.supervised, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in run]) for taught, run in runs if taught]


def test_supervised_positions_decode_to_each_answer_and_its_end_of_turn(tokenizer: Any) -> None:
    encoded = encode_dialogue(tokenizer, CHAT, 4096)
    assert supervised_texts(tokenizer, encoded) == [
        f"{CHAT[1]['content']}<|eot_id|>",
        f"{CHAT[3]['content']}<|eot_id|>",
    ]


def test_the_end_of_text_token_is_supervised_once_behind_the_last_turn(tokenizer: Any) -> None:
    encoded = encode_dialogue(tokenizer, CHAT, 4096, eos_token_id=EOS)
    assert encoded.ids[-2:] == (END_OF_TURN, EOS)
    assert encoded.supervised[-1]
    assert encoded.ids.count(EOS) == 1


def test_the_beginning_of_text_token_is_there_once(tokenizer: Any) -> None:
    assert encode_dialogue(tokenizer, CHAT, 4096).ids.count(BOS) == 1
    assert encode_prompt(tokenizer, CHAT[:1]).count(BOS) == 1


@pytest.mark.parametrize("turns", [1, 3])
def test_prompt_ids_are_the_same_in_fine_tuning_and_rollout(tokenizer: Any, turns: int) -> None:
    prompt = encode_prompt(tokenizer, CHAT[:turns])
    encoded = encode_dialogue(tokenizer, CHAT[: turns + 1], 4096, context=turns)
    assert list(encoded.ids[: encoded.prompt_length]) == prompt


def test_a_prompt_that_ends_in_an_answers_beginning_stays_open(tokenizer: Any) -> None:
    whole = encode_dialogue(tokenizer, [CHAT[0], {"role": "assistant", "content": "[BEGIN]\n more"}], 4096)
    prompt = encode_prompt(tokenizer, [CHAT[0], {"role": "assistant", "content": "[BEGIN]\n"}])
    assert list(whole.ids[: len(prompt)]) == prompt
    assert tokenizer.decode(prompt).endswith("[BEGIN]\n")


def test_newline_braces_and_percent_signs_survive(tokenizer: Any) -> None:
    assert "sum {1} and 50%?\n<|eot_id|>" in tokenizer.decode(encode_prompt(tokenizer, CHAT[:1]))


def test_an_answer_made_of_the_letters_of_the_probe_is_kept_whole() -> None:
    tokenizer = plain_tokenizer()
    for answer in ("x", "y x ", "xyz", "zyx\n"):
        chat = [CHAT[0], {"role": "assistant", "content": answer}]
        assert supervised_texts(tokenizer, encode_dialogue(tokenizer, chat, 4096)) == [f"{answer}<|eot_id|>"]


def test_answers_in_the_given_context_are_not_supervised(tokenizer: Any) -> None:
    encoded = encode_dialogue(tokenizer, CHAT, 4096, context=3)
    assert supervised_texts(tokenizer, encoded) == [f"{CHAT[3]['content']}<|eot_id|>"]


def test_turns_after_the_last_answer_are_ignored(tokenizer: Any) -> None:
    longer = [*CHAT, {"role": "user", "content": "thanks"}]
    assert encode_dialogue(tokenizer, longer, 4096) == encode_dialogue(tokenizer, CHAT, 4096)


def test_a_cut_answer_gets_no_end_token(tokenizer: Any) -> None:
    whole = encode_dialogue(tokenizer, CHAT[:2], 4096, EOS)
    cut = encode_dialogue(tokenizer, CHAT[:2], len(whole.ids) - 4, EOS)
    assert cut.ids == whole.ids[:-4]
    assert not cut.complete
    assert not {END_OF_TURN, EOS} & {t for t, taught in zip(cut.ids, cut.supervised, strict=True) if taught}


def test_a_limit_inside_the_second_prompt_keeps_the_first_turn_alone(tokenizer: Any) -> None:
    first = encode_dialogue(tokenizer, CHAT[:2], 4096)
    cut = encode_dialogue(tokenizer, CHAT, len(first.ids) + 3, EOS)
    assert (cut.ids, cut.supervised, cut.complete) == (first.ids, first.supervised, False)


def test_an_exactly_fitting_answer_is_complete_without_the_end_of_text_token() -> None:
    tokenizer = plain_tokenizer()
    whole = encode_dialogue(tokenizer, CHAT[:2], 4096)
    assert encode_dialogue(tokenizer, CHAT[:2], len(whole.ids), EOS) == whole


def test_a_limit_that_leaves_no_answer_drops_the_sample_with_the_reason() -> None:
    tokenizer = plain_tokenizer()
    prompt = len(encode_prompt(tokenizer, CHAT[:1]))
    assert encode_dialogue(tokenizer, CHAT[:2], prompt).dropped == ANSWER_CUT_OFF
    assert encode_dialogue(tokenizer, CHAT[:2], prompt - 1).dropped == PROMPT_TOO_LONG
    assert encode_dialogue(tokenizer, CHAT[:2], prompt + 1).dropped is None


@pytest.mark.parametrize("answer", ["", " \n"])
def test_an_empty_answer_is_dropped_with_the_reason(tokenizer: Any, answer: str) -> None:
    encoded = encode_dialogue(tokenizer, [CHAT[0], {"role": "assistant", "content": answer}], 4096)
    assert encoded == EncodedDialogue((), (), dropped=EMPTY_ANSWER)


def test_an_empty_answer_between_others_is_not_supervised(tokenizer: Any) -> None:
    chat = [CHAT[0], {"role": "assistant", "content": ""}, *CHAT[2:]]
    assert supervised_texts(tokenizer, encode_dialogue(tokenizer, chat, 4096)) == [f"{CHAT[3]['content']}<|eot_id|>"]


def test_a_template_that_ends_in_the_end_of_text_token_does_not_get_it_twice() -> None:
    tokenizer = plain_tokenizer(PLAIN.replace("<|eot_id|>", "<|endoftext|>"))
    encoded = encode_dialogue(tokenizer, CHAT[:2], 4096, EOS)
    assert encoded.ids[-1] == EOS
    assert encoded.ids[-2] != EOS


def test_a_template_without_end_of_turn_token_supervises_the_answer_alone() -> None:
    tokenizer = plain_tokenizer(PLAIN.replace("<|eot_id|>", "\n"))
    encoded = encode_dialogue(tokenizer, CHAT, 4096)
    assert supervised_texts(tokenizer, encoded) == [CHAT[1]["content"], CHAT[3]["content"]]


def test_a_template_whose_prompt_changes_with_the_answer_is_an_error() -> None:
    tokenizer = plain_tokenizer("{{ messages | length }} turns\n" + PLAIN)
    with pytest.raises(TemplateError, match="before turn 2 changes.*data.chat_template"):
        encode_dialogue(tokenizer, CHAT[:2], 4096)


def test_a_tokenizer_without_template_is_an_error_that_says_how_to_set_one() -> None:
    tokenizer = plain_tokenizer("")
    with pytest.raises(TemplateError, match=r"data\.chat_template=<file>"):
        encode_prompt(tokenizer, CHAT[:1])


def test_a_template_file_replaces_the_tokenizers(tmp_path: Path) -> None:
    tokenizer = plain_tokenizer("")
    (tmp_path / "chat.jinja").write_text(WORDY)
    use_template(tokenizer, str(tmp_path / "chat.jinja"))
    assert render(tokenizer, CHAT[:1], True).endswith("the answer is\n\n")


def test_a_template_that_refuses_the_roles_is_an_error_that_names_them() -> None:
    tokenizer = plain_tokenizer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TemplateError, match=r"\(user, assistant\): roles must alternate"):
        render(tokenizer, CHAT[:2], False)


ENDS = {"llada-": "<|eot_id|>", "dream-": "<|im_end|>", "llada-moe-": "<|role_end|>", "llada2": "<|role_end|>"}
ENDS["sdar-"] = "<|im_end|>"


def fixture_names() -> list[Any]:
    """Every fixture checkpoint, as pytest parameters."""
    names = [folder.name for folder in sorted((FIXTURES / "models").glob("*-tiny-*"))]
    return names or [pytest.param("", marks=pytest.mark.skip(reason=f"no models under {FIXTURES}"), id="missing")]


@pytest.mark.parametrize("name", fixture_names())
def test_published_templates_supervise_answers_and_ends_of_turn(name: str) -> None:
    tokenizer = load_tokenizer(fixture_model(name))
    end = ENDS[max((prefix for prefix in ENDS if name.startswith(prefix)), key=len)]
    encoded = encode_dialogue(tokenizer, CHAT, 4096, tokenizer.eos_token_id)
    # SDAR writes an empty thinking frame behind the last generation prompt; the policy has to write it too.
    frame = "<think>\n\n</think>\n\n" if name.startswith("sdar") else ""
    expected = [f"{CHAT[1]['content']}{end}", f"{frame}{CHAT[3]['content']}{end}{tokenizer.eos_token}"]
    assert supervised_texts(tokenizer, encoded) == expected
    prompt = encode_prompt(tokenizer, CHAT[:3])
    assert list(encoded.ids[: len(prompt)]) == prompt
    assert tokenizer.bos_token_id is None or encoded.ids.count(tokenizer.bos_token_id) <= 1


@pytest.mark.parametrize("name", fixture_names())
def test_an_answer_that_could_merge_with_the_header_leaves_the_prompt_ids_alone(name: str) -> None:
    tokenizer = load_tokenizer(fixture_model(name))
    chat = [CHAT[0], {"role": "assistant", "content": "\n\n two"}, CHAT[2], CHAT[3]]
    encoded = encode_dialogue(tokenizer, chat, 4096)
    for turns in (1, 3):
        prompt = encode_prompt(tokenizer, chat[:turns])
        assert list(encoded.ids[: len(prompt)]) == prompt
        assert encoded.supervised[len(prompt)]
        assert not encoded.supervised[len(prompt) - 1]


@pytest.mark.parametrize("golden", golden_files("models/*.json"))
def test_prompts_equal_the_golden_ids(golden: Path) -> None:
    known = json.loads(golden.read_text())["tokenizer"]
    chats = known.get("chats", [known | {"rendered": known.get("prompt"), "add_generation_prompt": True}])
    tokenizer = load_tokenizer(fixture_model(golden.stem))
    prompts = [chat for chat in chats if chat["add_generation_prompt"]]
    assert prompts
    for chat in prompts:
        assert render(tokenizer, chat["messages"], True) == chat["rendered"]
        assert encode_prompt(tokenizer, chat["messages"]) == chat["ids"]
