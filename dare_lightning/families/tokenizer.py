"""Tokenizers read from a checkpoint folder, without the network, remote code or a question on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dare_lightning.families.checkpoint import read_json

MASK_NAMES = ("<|mdm_mask|>", "<|mask|>")
END_OF_TURN_NAMES = ("<|eot_id|>", "<|im_end|>", "<|role_end|>")
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class SpecialIds(NamedTuple):
    """Ids of the tokens with a role: mask, padding, end of text, and all that end an answer."""

    mask: int
    pad: int
    eos: int
    stop: tuple[int, ...]


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a checkpoint folder.

    `tokenizer.json` is read as it is, with special tokens from special_tokens_map.json and tokenizer_config.json;
    a folder with only vocab.json and merges.txt is a Qwen2 tokenizer. Code in the folder is never run.

    Returns:
        a `PreTrainedTokenizerFast` or `Qwen2Tokenizer` of transformers.

    Raises:
        FileNotFoundError: the folder holds neither layout.
        ValueError: a tokenizer file cannot be read.
    """
    from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

    settings = _settings(folder)
    if (folder / "tokenizer.json").is_file():
        read_json(folder / "tokenizer.json")
        return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **settings)
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        tokenizer = Qwen2Tokenizer.from_pretrained(str(folder), local_files_only=True)
        tokenizer.chat_template = settings.get("chat_template")
        return tokenizer
    raise FileNotFoundError(f"no tokenizer in {folder}: expected tokenizer.json, or vocab.json with merges.txt")


def mask_token_id(config: dict[str, Any], tokenizer: Any) -> int:
    """The mask token: config.json's id, else the tokenizer's mask token, else an added token of a known name.

    Raises:
        ValueError: none of them exists, or it is the padding token.
    """
    added = tokenizer.get_added_vocab()
    candidates = [config.get("mask_token_id"), tokenizer.mask_token_id, *(added.get(name) for name in MASK_NAMES)]
    found = next((candidate for candidate in candidates if candidate is not None), None)
    if found is None:
        raise ValueError(
            f"no mask token: config.json has no mask_token_id, the tokenizer declares no mask_token, and none of "
            f"{', '.join(MASK_NAMES)} is among its added tokens; a diffusion language model needs one"
        )
    if found == pad_token_id(config, tokenizer):
        raise ValueError(f"the mask token and the padding token are both id {found}; they must differ")
    return int(found)


def eos_token_id(config: dict[str, Any], tokenizer: Any) -> int:
    """The end-of-text token: config.json's id, else the tokenizer's.

    Raises:
        ValueError: neither has one.
    """
    return _declared("eos_token", config, tokenizer)


def pad_token_id(config: dict[str, Any], tokenizer: Any) -> int:
    """The padding token: config.json's id, else the tokenizer's.

    Raises:
        ValueError: neither has one.
    """
    return _declared("pad_token", config, tokenizer)


def stop_token_ids(eos: int, tokenizer: Any) -> tuple[int, ...]:
    """Ids that end an answer: end of text, then every end-of-turn token that the tokenizer knows by name."""
    added = tokenizer.get_added_vocab()
    turns = [added[name] for name in END_OF_TURN_NAMES if name in added]
    return tuple(dict.fromkeys([eos, *turns]))


def special_ids(config: dict[str, Any], tokenizer: Any, rows: int, mask: int | None = None) -> SpecialIds:
    """The special tokens of a policy whose embedding has `rows` rows.

    Args:
        mask: the mask token, where the user names it; None for the checkpoint's.

    Raises:
        ValueError: one of them is not declared, lies outside the embedding, or the mask token is also padding or an
            end token.
    """
    eos = eos_token_id(config, tokenizer)
    stated = config if mask is None else config | {"mask_token_id": mask}
    found = SpecialIds(
        mask_token_id(stated, tokenizer), pad_token_id(config, tokenizer), eos, stop_token_ids(eos, tokenizer)
    )
    check_ids([found.mask, found.pad, *found.stop], rows)
    if found.mask in found.stop:
        raise ValueError(f"the mask token is id {found.mask}, which also ends an answer; they must differ")
    return found


def check_ids(ids: Sequence[int], rows: int) -> None:
    """Raise ValueError where a special token has no row in an embedding of `rows` rows."""
    outside = sorted({token for token in ids if not 0 <= token < rows})
    if outside:
        raise ValueError(
            f"special tokens {outside} lie outside the embedding's {rows} rows; config.json and the tokenizer "
            "belong to different models"
        )


def _declared(name: str, config: dict[str, Any], tokenizer: Any) -> int:
    found = config.get(f"{name}_id")
    if found is None:
        found = {"eos_token": tokenizer.eos_token_id, "pad_token": tokenizer.pad_token_id}[name]
    if not isinstance(found, int):
        raise ValueError(f"no {name}: config.json says {name}_id={found!r} and the tokenizer declares none")
    return found


def _settings(folder: Path) -> dict[str, Any]:
    """Special tokens, chat template and lengths as constructor arguments."""
    merged: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            merged |= {key: value for key, value in read_json(folder / name).items() if value is not None}
    settings: dict[str, Any] = {name: _content(merged[name]) for name in _SPECIAL_NAMES if name in merged}
    extra = merged.get("additional_special_tokens", merged.get("extra_special_tokens"))
    if isinstance(extra, list):
        settings["additional_special_tokens"] = [_content(token) for token in extra]
    for name in ("model_max_length", "clean_up_tokenization_spaces", "model_input_names"):
        if name in merged:
            settings[name] = merged[name]
    template = _chat_template(folder, merged.get("chat_template"))
    if template is not None:
        settings["chat_template"] = template
    return settings


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _chat_template(folder: Path, declared: str | list[dict[str, str]] | None) -> str | None:
    """The template file wins over tokenizer_config.json, as it does for the upstream loaders."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if isinstance(declared, list):
        return {entry["name"]: entry["template"] for entry in declared}.get("default")
    return declared
