"""Caches of keys and values while decoding: where they approximate nothing, what they read, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dare_lightning.datamodules.chat import encode_prompt
from dare_lightning.evaluation.benchmarks.sudoku import SudokuTask
from dare_lightning.families.attention import KeyValueCache
from dare_lightning.families.load import load_policy
from dare_lightning.families.tiny import new_tiny_dream, new_tiny_llada, new_tiny_llada_moe
from dare_lightning.generation.builtin import BuiltinBackend
from dare_lightning.generation.cached import SureOfStale
from dare_lightning.generation.canvas import masked_canvas
from dare_lightning.generation.layout import even_layout
from dare_lightning.generation.schedule import Place
from dare_lightning.generation.threshold import ConfidenceFactor, ConfidenceThreshold, QuotaThreshold
from dare_lightning.replay.batch import SequenceBatch
from dare_lightning.rewards.sudoku import SudokuReward
from tests.shared import ROOT

POLICIES = {"llada": new_tiny_llada, "dream": new_tiny_dream, "llada_moe": new_tiny_llada_moe}
PROMPTS = [[8, 9, 10], [8, 9, 10], [11, 12, 13, 14, 15, 16], [9]]
KINDS = ["prefix", "dual"]


@pytest.fixture(params=POLICIES, ids=POLICIES)
def policy(request: pytest.FixtureRequest) -> Any:
    return POLICIES[request.param](layers=2, width=32, heads=2).double()


def _answers(policy: Any, prompts: list[list[int]], **settings: Any) -> tuple[SequenceBatch, Any]:
    backend = BuiltinBackend(early_stop=False, eos_policy="keep", **settings)
    backend.update_weights(policy, version=0)
    return backend.generate(prompts, range(len(prompts))), backend.stats


def _assert_equal(one: SequenceBatch, other: SequenceBatch) -> None:
    assert torch.equal(one.ids, other.ids)
    assert one.commit_log_probs is not None
    torch.testing.assert_close(one.commit_log_probs, other.commit_log_probs)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_approximated_where_every_block_takes_one_pass(policy: Any, kind: str) -> None:
    settings = {"max_new_tokens": 12, "block_length": 3, "steps": 4}
    exact, _ = _answers(policy, PROMPTS, **settings)
    cached, _ = _answers(policy, PROMPTS, cache=kind, **settings)
    _assert_equal(cached, exact)


def test_one_layer_under_the_prefix_cache_is_exact(policy: Any) -> None:
    # The prompt's keys and values of one layer hold nothing of the response, and everything else is read again.
    single = type(policy).from_config(_one_layer(policy), policy.tokenizer, 0).double()
    settings = {"max_new_tokens": 8, "steps": 4}
    exact, whole = _answers(single, PROMPTS, **settings)
    cached, part = _answers(single, PROMPTS, cache="prefix", **settings)
    _assert_equal(cached, exact)
    assert part.tokens < whole.tokens


def _one_layer(policy: Any) -> dict[str, Any]:
    config = dict(policy.config)
    key = "n_layers" if "n_layers" in config else "num_hidden_layers"
    config[key] = 1
    if "moe_layer_freq" in config:
        config["moe_layer_freq"] = config["moe_layer_freq"][:1]
    return config


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "schedule",
    [
        {"steps": 6},
        {"schedule": ConfidenceThreshold(0.03)},
        {"schedule": ConfidenceThreshold(0.07), "cache_sure": 0.05},
    ],
    ids=["even", "threshold", "sure"],
)
def test_a_row_gets_what_it_would_get_alone(policy: Any, kind: str, schedule: dict[str, Any]) -> None:
    settings = {"max_new_tokens": 12, "block_length": 4, "cache": kind, "temperature": 0.7} | schedule
    together, _ = _answers(policy, PROMPTS, **settings)
    backend = BuiltinBackend(early_stop=False, eos_policy="keep", **settings)
    backend.update_weights(policy, version=0)
    for row, prompt in enumerate(PROMPTS):
        alone = backend.generate([prompt], [row])
        _assert_equal(together.select(slice(row, row + 1)).trim(), alone)


def test_equal_prompts_are_read_once_in_the_first_pass(policy: Any) -> None:
    _, stats = _answers(policy, [[8, 9]] * 5, max_new_tokens=8, block_length=4, steps=2, cache="dual")
    # One whole canvas for the first block, five for the second.
    assert stats.tokens == 10 + 5 * 10
    assert stats.forwards == 2


def test_the_dual_cache_reads_the_block_alone(policy: Any) -> None:
    _, stats = _answers(policy, [[8, 9, 10]], max_new_tokens=8, block_length=4, steps=8, cache="dual")
    assert stats.forwards == 8
    assert stats.tokens == 2 * 11 + 6 * (4 + policy.left_context)


def test_the_prefix_cache_reads_the_block_and_what_follows(policy: Any) -> None:
    _, stats = _answers(policy, [[8, 9, 10]], max_new_tokens=8, block_length=4, steps=8, cache="prefix")
    assert stats.tokens == 2 * 11 + 3 * (8 + policy.left_context) + 3 * (4 + policy.left_context)


def test_a_cache_filled_anew_in_every_pass_is_exact(policy: Any) -> None:
    settings = {"max_new_tokens": 8, "block_length": 4, "steps": 8}
    exact, whole = _answers(policy, PROMPTS, **settings)
    cached, stats = _answers(policy, PROMPTS, cache="dual", cache_refresh=1, **settings)
    _assert_equal(cached, exact)
    assert stats.tokens == whole.tokens


def test_a_cache_is_filled_anew_after_as_many_passes_as_asked(policy: Any) -> None:
    settings = {"max_new_tokens": 8, "steps": 8, "cache": "dual", "cache_refresh": 3}
    _, stats = _answers(policy, [[8, 9, 10]], **settings)
    # Passes 0, 3 and 6 read everything.
    assert stats.tokens == 3 * 11 + 5 * (8 + policy.left_context)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cached_pass_that_may_never_be_sure_changes_nothing(policy: Any, kind: str) -> None:
    settings = {"max_new_tokens": 12, "block_length": 6, "schedule": ConfidenceThreshold(0.07)}
    exact, whole = _answers(policy, PROMPTS, **settings)
    cached, stats = _answers(policy, PROMPTS, cache=kind, cache_sure=1.0, **settings)
    _assert_equal(cached, exact)
    assert stats.tokens > whole.tokens


def test_what_a_cached_pass_is_unsure_of_waits_for_one_that_reads_everything() -> None:
    policy: Any = load_policy(str(ROOT / "dare_lightning" / "assets" / "tiny_sudoku")).eval()
    examples = SudokuTask(form="compact", empty=8).examples("heldout", 64, seed=42)
    prompts = [encode_prompt(policy.tokenizer, example.messages) for example in examples]

    def answers(**settings: Any) -> tuple[int, int]:
        batch, stats = _answers(policy, prompts, max_new_tokens=17, schedule=ConfidenceFactor(1.0), **settings)
        texts = [policy.tokenizer.decode(row[-17:-1].tolist(), skip_special_tokens=True) for row in batch.ids]
        right = [verdict.status == "right" for verdict in SudokuReward(form="compact")(texts, examples)]
        return sum(right), stats.tokens

    solved, columns = answers()
    careless, _ = answers(cache="dual")
    careful, fewer = answers(cache="dual", cache_sure=0.625)
    assert careless < 0.5 * solved
    assert abs(careful - solved) <= 1
    assert fewer < columns


def test_a_cautious_row_reads_everything_after_a_pass_that_committed_fewer_than_two_tokens() -> None:
    canvas = masked_canvas([[5], [6], [7]], even_layout(6, 6, None), 4, 0, torch.device("cpu"))
    rows, zeros = torch.arange(3), torch.zeros(3, 6)
    assert canvas.fresh(rows).tolist() == [True] * 3
    counts = torch.tensor([0, 1, 2])
    canvas.commit(rows, torch.arange(6) < counts[:, None], zeros.long(), zeros)
    assert canvas.fresh(rows).tolist() == [False] * 3
    canvas.cautious = True
    assert canvas.fresh(rows).tolist() == [True, True, False]
    assert canvas.place(rows).fresh.tolist() == [True, True, False]


def test_a_cached_pass_commits_what_it_is_sure_of_and_nothing_else() -> None:
    zeros = torch.zeros(2, dtype=torch.int64)
    place = Place(zeros, zeros, zeros, zeros, fresh=torch.tensor([True, False]))
    score, open_ = torch.tensor([[0.9, 0.5, 0.4, 0.9]]).expand(2, -1), torch.tensor([[True] * 3 + [False]] * 2)
    found = SureOfStale(ConfidenceThreshold(0.8), sure=0.5).select(score, open_, place)
    assert found.tolist() == [[True, False, False, False], [True, True, False, False]]
    unsure = SureOfStale(ConfidenceThreshold(0.8), sure=0.95).select(score, open_, place)
    assert unsure.tolist() == [[True, False, False, False], [False] * 4]


def test_copied_rows_of_a_cache_hold_the_same() -> None:
    cache = KeyValueCache(3, 4)
    keys = torch.randn(1, 2, 4, 5)
    cache.write(0, torch.tensor([1]), torch.arange(4)[None], keys, 2 * keys)
    cache.copy(torch.tensor([1, 1]), torch.tensor([0, 2]))
    found, values = cache.read(0, torch.tensor([2]))
    assert torch.equal(found, keys)
    assert torch.equal(values, 2 * keys)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cache": "suffix"}, "cache='suffix' is not one of prefix, dual"),
        ({"cache": "dual", "cfg_scale": 1.5}, "cache=dual cannot serve cfg_scale=1.5"),
        ({"cache": "prefix", "tree": [2, 2]}, r"cache=prefix cannot serve tree=\[2, 2\]"),
        ({"cache_refresh": 2}, "cache_refresh=2 says when a cache is filled anew"),
        ({"cache": "dual", "cache_refresh": 0}, "cache_refresh=0 must be at least 1 pass"),
        ({"cache_sure": 0.5}, "cache_sure=0.5 says what a cached pass may commit"),
        ({"cache": "dual", "cache_sure": 1.5, "schedule": ConfidenceFactor()}, r"cache_sure=1.5 must lie in \[0, 1\]"),
        (
            {"cache": "dual", "cache_sure": 0.5, "cache_refresh": 1, "schedule": ConfidenceFactor()},
            "cache_sure=0.5 has no say where cache_refresh=1",
        ),
        ({"cache": "dual", "cache_sure": 0.5}, "use ConfidenceThreshold or ConfidenceFactor"),
        ({"cache": "dual", "cache_sure": 0.5, "schedule": QuotaThreshold()}, "use ConfidenceThreshold"),
        ({"first_column_first": True}, "first_column_first=true is a rule of cached decoding"),
    ],
)
def test_what_a_cache_cannot_serve_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BuiltinBackend(max_new_tokens=8, **settings)


def test_a_cache_records_no_states() -> None:
    backend = BuiltinBackend(max_new_tokens=8, cache="dual")
    assert not backend.capabilities.states
    with pytest.raises(ValueError, match="set cache"):
        backend.generate([[5]], [0], record_states=True)
