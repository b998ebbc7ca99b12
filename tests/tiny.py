"""Tiny real policies that tests build in memory, in milliseconds."""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable
from typing import Any

import torch

from dare_lightning.families import tiny
from dare_lightning.families.llada import LLaDA
from dare_lightning.families.tiny import BOS, END_OF_TURN, EOS, MASK, PAD, character_tokenizer, llada_config

__all__ = [
    "BOS",
    "END_OF_TURN",
    "EOS",
    "MASK",
    "PAD",
    "TINY_BUILDERS",
    "tiny_config",
    "tiny_llada",
    "tiny_tokenizer",
]

# One for each family, by its name; all take `layers`, `width`, `heads` and `seed`.
TINY_BUILDERS: dict[str, Callable[..., Any]] = {
    name.removeprefix("new_tiny_"): builder
    for name, builder in inspect.getmembers(tiny, inspect.isfunction)
    if name.startswith("new_tiny_")
}

SPECIAL_TOKENS = ("<|pad|>", "<|startoftext|>", "<|endoftext|>", "<|eot_id|>", "<|mdm_mask|>")

# The first 35 spell puzzles, sums and the names of the chat roles.
_LETTERS = "0123456789 \n?+-*/()=.:etaoinshrdluc"
ALPHABET = _LETTERS + "".join(c for c in string.printable if c not in _LETTERS and c not in "\r\x0b\x0c")

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] ~ ':' ~ message['content'] ~ '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def tiny_tokenizer(vocab: int = 40) -> Any:
    """One token for each character, ids 0 to 4 pad, bos, eos, end of turn, mask; unknown characters read as `?`."""
    ordinary = vocab - len(SPECIAL_TOKENS)
    names = [*ALPHABET[:ordinary], *(f"<|extra_{i}|>" for i in range(ordinary - len(ALPHABET)))]
    return character_tokenizer(SPECIAL_TOKENS, names, CHAT_TEMPLATE)


def tiny_config(vocab: int = 40, layers: int = 2, width: int = 32, heads: int = 2, **changes: Any) -> dict[str, Any]:
    """A complete config.json of a small LLaDA model, with these changes."""
    config = llada_config(layers, width, heads, vocab) | {"rope_theta": 10000.0, "mlp_ratio": 4}
    return config | changes


def tiny_llada(
    seed: int = 0,
    vocab: int = 40,
    layers: int = 2,
    width: int = 32,
    heads: int = 2,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> LLaDA:
    """A LLaDA policy with random weights that depend on `seed` alone; `changes` go to its config.json."""
    config = tiny_config(vocab, layers, width, heads, **changes)
    return LLaDA.from_config(config, tiny_tokenizer(vocab), seed).to(dtype)
