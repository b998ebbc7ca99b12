"""Tokenizers from a folder, and the ids that a policy reads from them."""

from __future__ import annotations

import json

import pytest

from dare_lightning.families import tokenizer as tokens
from tests.shared import fixture_model, golden_files
from tests.tiny import tiny_tokenizer


@pytest.mark.parametrize("golden", golden_files("models/*.json"))
def test_every_layout_gives_the_reference_ids(golden):
    folder = fixture_model(golden.stem)
    reference = json.loads(golden.read_text())["tokenizer"]
    tokenizer = tokens.load_tokenizer(folder)
    for case in reference.get("texts", []):
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids"]
    # The block families' goldens hold one chat, with its prompt under another name.
    chats = reference.get("chats") or [reference | {"add_generation_prompt": True, "rendered": reference["prompt"]}]
    for case in chats:
        rendered = tokenizer.apply_chat_template(
            case["messages"], add_generation_prompt=case["add_generation_prompt"], tokenize=False
        )
        assert rendered == case["rendered"]
        assert tokenizer.encode(rendered, add_special_tokens=False) == case["ids"]


def test_the_mask_token_comes_from_the_config_then_the_tokenizer_then_a_known_name():
    tokenizer = tiny_tokenizer()
    assert tokenizer.mask_token_id is None
    assert tokens.mask_token_id({"mask_token_id": 9}, tokenizer) == 9
    assert tokens.mask_token_id({}, tokenizer) == 4
    tokenizer.mask_token = "a"
    assert tokens.mask_token_id({"mask_token_id": None}, tokenizer) == tokenizer.convert_tokens_to_ids("a")


def test_a_tokenizer_without_a_mask_token_is_refused():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    plain = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?")), pad_token="?", eos_token="?"
    )
    with pytest.raises(ValueError, match="no mask token.*<|mdm_mask|>"):
        tokens.mask_token_id({}, plain)


def test_the_mask_token_must_not_be_the_padding():
    with pytest.raises(ValueError, match="both id 7"):
        tokens.mask_token_id({"mask_token_id": 7, "pad_token_id": 7}, tiny_tokenizer())


def test_missing_end_and_padding_tokens_are_named():
    tokenizer = tiny_tokenizer()
    assert tokens.eos_token_id({}, tokenizer) == 2
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="eos_token_id=None"):
        tokens.eos_token_id({}, tokenizer)


def test_answers_end_at_the_end_of_the_text_or_of_the_turn():
    assert tokens.stop_token_ids(2, tiny_tokenizer()) == (2, 3)
    assert tokens.stop_token_ids(3, tiny_tokenizer()) == (3,)


def test_special_tokens_outside_the_embedding_are_refused():
    tokens.check_ids([0, 39], 40)
    with pytest.raises(ValueError, match=r"\[40\].*40 rows"):
        tokens.check_ids([0, 40], 40)


def test_an_empty_folder_has_no_tokenizer(tmp_path):
    with pytest.raises(FileNotFoundError, match="tokenizer.json, or vocab.json with merges.txt"):
        tokens.load_tokenizer(tmp_path)


def test_code_in_the_folder_is_never_run(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(str(tmp_path))
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings |= {
        "auto_map": {"AutoTokenizer": ["evil.Evil", None]},
        "tokenizer_class": "Evil",
        "trust_remote_code": True,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "evil.py").write_text("raise SystemExit('code from the checkpoint was run')")
    assert tokens.load_tokenizer(tmp_path).get_vocab() == tokenizer.get_vocab()


def test_named_chat_templates_give_the_default_one(tmp_path):
    tiny_tokenizer().save_pretrained(str(tmp_path))
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["chat_template"] = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert tokens.load_tokenizer(tmp_path).chat_template == "d"
