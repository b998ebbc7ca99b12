"""Low-rank adapters: what they match, what they train, how they are switched off, merged and stored."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from dare_lightning.families.adapters import (
    LoRA,
    adapters_disabled,
    has_adapter,
    load_adapter,
    match_targets,
    merge,
    merged_state_dict,
    save_adapter,
)
from dare_lightning.families.llada import LLaDA
from dare_lightning.families.load import load_policy
from tests.tiny import tiny_llada

IDS = torch.tensor([[7, 4, 9, 11, 4, 30]])


class PlainModel(nn.Module):
    """A model class that can generate nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.ff_out = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ff_out(self.q_proj(x))


def adapted(seed: int = 0, dtype: torch.dtype = torch.float32, **options) -> LLaDA:
    """A tiny policy whose adapter was trained for three steps."""
    policy = tiny_llada(dtype=dtype)
    LoRA(rank=4, alpha=8, seed=seed, **options).apply(policy)
    train(policy, IDS)
    return policy


def train(model: nn.Module, x: torch.Tensor) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()


def test_targets_that_match_nothing_stop_and_are_named_with_what_exists():
    policy = tiny_llada()
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
    with pytest.raises(ValueError, match="match no linear layer") as error:
        LoRA(rank=2, alpha=4, targets=targets).apply(policy)
    assert "targets o_proj, gate_proj, down_proj match" in str(error.value)
    assert "called attn_out, ff_out, ff_proj, k_proj, q_proj, up_proj, v_proj" in str(error.value)
    assert not has_adapter(policy)
    assert all(weight.requires_grad for weight in policy.parameters())


def test_an_empty_target_list_is_an_error():
    with pytest.raises(ValueError, match="none given"):
        LoRA(rank=2, alpha=4, targets=[]).apply(tiny_llada())


def test_the_family_list_matches_every_entry_and_not_the_head():
    policy = tiny_llada(layers=4)
    report = LoRA(rank=2, alpha=4).apply(policy)
    assert len(report.layers) == 4 * len(policy.lora_targets)
    assert {name.rsplit(".", 1)[-1] for name in report.layers} == set(policy.lora_targets)
    assert "model.transformer.ff_out" not in report.layers


def test_the_report_counts_what_trains():
    policy = tiny_llada()
    plain = sum(weight.numel() for weight in policy.parameters())
    report = LoRA(rank=2, alpha=4, targets=["q_proj"]).apply(policy)
    assert report.trainable == 2 * 2 * (32 + 32)  # two layers, two factors of rank 2
    assert report.total == plain + report.trainable
    assert str(report).startswith("2 adapted layers; 256 of ")
    assert {name for name, weight in policy.named_parameters() if weight.requires_grad} == {
        name for name, _ in policy.named_parameters() if ".lora_" in name
    }


@pytest.mark.parametrize(
    ("target", "names"),
    [
        ("ff_out", ["model.transformer.blocks.0.ff_out", "model.transformer.blocks.1.ff_out"]),
        ("model.transformer.ff_out", ["model.transformer.ff_out"]),
        ("blocks.1.q_proj", ["model.transformer.blocks.1.q_proj"]),
    ],
)
def test_the_head_is_only_matched_by_its_full_name(target, names):
    assert match_targets(tiny_llada(), [target]) == names
    policy = tiny_llada()
    assert LoRA(rank=1, alpha=1, targets=[target]).apply(policy).layers == tuple(names)


def test_a_model_that_cannot_generate_is_adapted_trained_and_saved(tmp_path):
    model = PlainModel()
    before = model.q_proj.weight.clone()
    assert LoRA(rank=1, alpha=1, targets=["q_proj", "ff_out"]).apply(model).layers == ("q_proj", "ff_out")
    x = torch.randn(3, 4)
    start = model(x)
    train(model, x)
    assert not torch.equal(model(x), start)
    torch.testing.assert_close(model.q_proj.base_layer.weight, before, rtol=0, atol=0)
    model.source = None
    save_adapter(model, tmp_path / "adapter")
    other = PlainModel()
    other.load_state_dict(merged_base(model))
    load_adapter(other, tmp_path / "adapter")
    torch.testing.assert_close(other(x), model(x))


def merged_base(model: nn.Module) -> dict[str, torch.Tensor]:
    """The base weights under their plain names."""
    return {k.replace(".base_layer", ""): v for k, v in model.state_dict().items() if ".lora_" not in k}


def test_a_new_adapter_changes_nothing_and_leaves_the_global_generator_alone():
    policy = tiny_llada()
    plain, state = policy(IDS), torch.random.get_rng_state()
    LoRA(rank=4, alpha=8).apply(policy)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.testing.assert_close(policy(IDS), plain, rtol=0, atol=0)


def test_the_random_half_depends_on_the_seed_alone():
    def down(seed: int) -> torch.Tensor:
        torch.manual_seed(torch.seed() % 1000)
        policy = tiny_llada()
        LoRA(rank=4, alpha=8, seed=seed).apply(policy)
        return next(weight for name, weight in policy.named_parameters() if ".lora_A" in name)

    assert torch.equal(down(1), down(1))
    assert not torch.equal(down(1), down(2))


def test_the_reference_is_the_base_and_the_adapter_comes_back():
    policy = adapted()
    base, trained = tiny_llada()(IDS), policy(IDS)
    assert (trained - base).abs().max() > 1e-2
    flags = [weight.requires_grad for weight in policy.parameters()]
    with adapters_disabled(policy):
        torch.testing.assert_close(policy(IDS), base, rtol=0, atol=0)
    torch.testing.assert_close(policy(IDS), trained, rtol=0, atol=0)
    assert [weight.requires_grad for weight in policy.parameters()] == flags


def test_the_adapter_comes_back_after_an_error():
    policy = adapted()
    trained = policy(IDS)
    with pytest.raises(IndexError), adapters_disabled(policy):
        policy(torch.tensor([[400]]))
    torch.testing.assert_close(policy(IDS), trained, rtol=0, atol=0)


def test_a_frozen_policy_stays_frozen_after_its_reference_was_used():
    policy = adapted().requires_grad_(False)
    with adapters_disabled(policy):
        policy(IDS)
    assert not any(weight.requires_grad for weight in policy.parameters())


def test_a_policy_without_an_adapter_has_no_reference_to_switch_to():
    with pytest.raises(ValueError, match="no adapter"), adapters_disabled(tiny_llada()):
        pass
    with pytest.raises(ValueError, match="no adapter"):
        merge(tiny_llada())


def test_a_second_adapter_is_refused():
    with pytest.raises(ValueError, match="adapter already"):
        LoRA(rank=1, alpha=1).apply(adapted())


@pytest.mark.parametrize("options", [{"rank": 0}, {"rank": 1, "dropout": 1.0}])
def test_impossible_settings_are_refused(options):
    with pytest.raises(ValueError, match="rank must be 1 or more"):
        LoRA(alpha=1, **options)


def test_merged_weights_answer_like_base_and_adapter():
    policy = adapted(dtype=torch.float64)
    trained = policy(IDS)
    plain = tiny_llada(dtype=torch.float64)
    plain.load_state_dict(merged_state_dict(policy), strict=True)
    torch.testing.assert_close(plain(IDS), trained)
    torch.testing.assert_close(policy(IDS), trained, rtol=0, atol=0)
    merge(policy)
    assert not has_adapter(policy)
    torch.testing.assert_close(policy.state_dict(), plain.state_dict(), rtol=0, atol=0)
    assert all(weight.requires_grad for weight in policy.parameters())
    LoRA(rank=1, alpha=1).apply(policy)


def test_an_adapter_of_a_bfloat16_policy_trains_in_float32():
    policy = adapted(dtype=torch.bfloat16)
    assert {w.dtype for name, w in policy.named_parameters() if ".lora_" in name} == {torch.float32}
    assert {w.dtype for w in merged_state_dict(policy).values()} == {torch.bfloat16}


def test_a_saved_adapter_loads_again_here_and_in_peft(tmp_path):
    from peft import PeftModel

    policy = adapted()
    save_adapter(policy, tmp_path / "adapter")
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    again = tiny_llada()
    assert load_adapter(again, tmp_path / "adapter").trainable == 2 * 4 * (6 * 32 * 2 + 3 * (32 + 64) - 2 * 32 * 2)
    torch.testing.assert_close(again(IDS), policy(IDS), rtol=0, atol=0)
    wrapped = PeftModel.from_pretrained(tiny_llada(), str(tmp_path / "adapter"))
    torch.testing.assert_close(wrapped(IDS), policy(IDS), rtol=0, atol=0)


def test_a_many_layer_adapter_survives_the_round_trip(tmp_path):
    policy = tiny_llada(layers=4)
    layers = LoRA(rank=2, alpha=4).apply(policy).layers
    train(policy, IDS)
    save_adapter(policy, tmp_path / "adapter")
    again = tiny_llada(layers=4)
    assert load_adapter(again, tmp_path / "adapter").layers == layers
    torch.testing.assert_close(again(IDS), policy(IDS), rtol=0, atol=0)


def test_an_adapter_folder_loads_with_the_base_that_it_names(tmp_path):
    tiny_llada().save_pretrained(tmp_path / "base")
    policy = LLaDA.from_pretrained(str(tmp_path / "base"))
    LoRA(rank=4, alpha=8).apply(policy)
    train(policy, IDS)
    save_adapter(policy, tmp_path / "adapter")
    torch.testing.assert_close(load_policy(str(tmp_path / "adapter"))(IDS), policy(IDS), rtol=0, atol=0)


def test_an_adapter_of_another_shape_or_kind_is_refused(tmp_path):
    save_adapter(adapted(), tmp_path / "adapter")
    with pytest.raises(ValueError, match="wrong shape"):
        load_adapter(tiny_llada(width=64), tmp_path / "adapter")
    with pytest.raises(ValueError, match="layers that PlainModel lacks"):
        load_adapter(PlainModel(), tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(ValueError, match="not a plain LoRA"):
        load_adapter(tiny_llada(), tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_config.json").unlink()
    with pytest.raises(FileNotFoundError, match="adapter_config.json"):
        load_adapter(tiny_llada(), tmp_path / "adapter")


def test_an_adapted_policy_is_not_saved_as_if_it_were_plain(tmp_path):
    with pytest.raises(ValueError, match="merge it first"):
        adapted().save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_gradient_checkpointing_reaches_the_adapter():
    gradients = []
    for flag in (False, True):
        policy = tiny_llada(dtype=torch.float64)
        LoRA(rank=2, alpha=4).apply(policy)
        policy.gradient_checkpointing = flag
        policy(IDS).square().mean().backward()
        gradients.append({name: weight.grad for name, weight in policy.named_parameters() if weight.requires_grad})
    assert any(gradient.abs().max() > 0 for gradient in gradients[0].values())
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)
