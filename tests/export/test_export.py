"""Exports that work without this project."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dare_lightning.export import export_policy, load_policy_state
from dare_lightning.families import checkpoint
from dare_lightning.families.adapters import LoRA, has_adapter
from dare_lightning.families.llada import LLaDA
from dare_lightning.families.load import load_policy
from tests.tiny import tiny_llada

IDS = torch.tensor([[7, 4, 9, 11, 4, 30]])
ODD_SETTINGS = {"do_sample": False, "temperature": 0.0, "top_p": 3, "alg": "origin"}

# Rebuilds the answer from the exported files with torch and safetensors alone, in a process that never sees us.
READER = """
import json, sys
import torch
from safetensors.torch import load_file
folder = sys.argv[1]
config = json.load(open(f"{folder}/config.json"))
weights = load_file(f"{folder}/model.safetensors")
assert config["architectures"] == ["LLaDAModelLM"] and config["model_type"] == "llada"
assert "dare_lightning" not in sys.modules and json.load(open(f"{folder}/tokenizer.json"))
heads, size = config["n_heads"], config["d_model"] // config["n_heads"]
def norm(x, name):
    return x * (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).rsqrt() * weights[name + ".weight"]
def linear(x, name):
    return x @ weights[name + ".weight"].T
def turn(x):
    angle = torch.arange(x.shape[-2])[:, None] * config["rope_theta"] ** -(torch.arange(0, size, 2) / size)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)
ids = torch.tensor(json.loads(sys.argv[2]))
x = weights["model.transformer.wte.weight"][ids]
for i in range(config["n_layers"]):
    at = f"model.transformer.blocks.{i}."
    h = norm(x, at + "attn_norm")
    q, k, v = (linear(h, at + n).view(len(ids), heads, size).transpose(0, 1) for n in ("q_proj", "k_proj", "v_proj"))
    mix = (turn(q) @ turn(k).transpose(1, 2) / size ** 0.5).softmax(-1) @ v
    x = x + linear(mix.transpose(0, 1).flatten(1), at + "attn_out")
    h = norm(x, at + "ff_norm")
    x = x + linear(torch.nn.functional.silu(linear(h, at + "ff_proj")) * linear(h, at + "up_proj"), at + "ff_out")
print(json.dumps(linear(norm(x, "model.transformer.ln_f"), "model.transformer.ff_out").tolist()))
"""


@pytest.fixture(params=[None, ODD_SETTINGS], ids=["no_generation_settings", "odd_generation_settings"])
def base(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A base model with a code file, and with or without generation settings."""
    folder = tmp_path / "base"
    tiny_llada().save_pretrained(folder)
    (folder / "modeling_llada.py").write_text("# upstream code\n")
    if request.param is not None:
        (folder / "generation_config.json").write_text(json.dumps(request.param))
    return folder


def adapted(base: Path, dtype: str | None = None) -> LLaDA:
    """The base with an adapter trained for three steps."""
    policy = LLaDA.from_pretrained(str(base), dtype=dtype)
    LoRA(rank=4, alpha=8).apply(policy)
    optimizer = torch.optim.AdamW([weight for weight in policy.parameters() if weight.requires_grad], lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        policy(IDS).float().square().mean().backward()
        optimizer.step()
    return policy


def test_a_merged_export_holds_a_complete_model_and_no_adapter(base, tmp_path):
    policy = adapted(base)
    report = export_policy(policy, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {path.name for path in base.iterdir()} == set(report.files)
    assert {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja", "modeling_llada.py"} <= names
    if (base / "generation_config.json").exists():
        assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == ODD_SETTINGS
    merged = LLaDA.from_pretrained(str(tmp_path / "out"))
    torch.testing.assert_close(merged(IDS), policy(IDS), atol=1e-5, rtol=0)
    assert (merged(IDS) - LLaDA.from_pretrained(str(base))(IDS)).abs().max() > 1e-2
    assert report.merge_difference is not None
    assert report.merge_difference < 1e-5
    assert has_adapter(policy)


def test_an_export_answers_the_same_in_a_process_without_us(tmp_path):
    tiny_llada().save_pretrained(tmp_path / "base")
    policy = adapted(tmp_path / "base")
    export_policy(policy, tmp_path / "out")
    command = [sys.executable, "-I", "-c", READER, str(tmp_path / "out"), json.dumps(IDS[0].tolist())]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    torch.testing.assert_close(torch.tensor(json.loads(printed)), policy(IDS)[0].detach(), atol=1e-5, rtol=1e-5)


def test_base_adapter_and_merged_are_all_loaded_and_the_last_two_agree(base, tmp_path):
    policy = adapted(base)
    export_policy(policy, tmp_path / "merged")
    report = export_policy(policy, tmp_path / "adapter", adapter="keep")
    assert report.files == ("adapter_config.json", "adapter_model.safetensors")
    assert report.merge_difference is None
    plain, kept, merged = (load_policy(str(tmp_path / name))(IDS) for name in ("base", "adapter", "merged"))
    torch.testing.assert_close(kept, merged, atol=1e-5, rtol=0)
    assert (kept - plain).abs().max() > 1e-2


def test_the_rounding_of_a_bfloat16_merge_is_measured(base, tmp_path):
    policy = adapted(base, dtype="bfloat16")
    report = export_policy(policy, tmp_path / "out")
    merged = LLaDA.from_pretrained(str(tmp_path / "out"))
    assert next(merged.parameters()).dtype == torch.bfloat16
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert report.merge_difference is not None
    assert report.logit_scale is not None
    assert 0 < report.merge_difference < 0.2 * report.logit_scale
    assert "merging changed logits by at most" in str(report)


def test_a_second_export_to_the_same_folder_needs_force(base, tmp_path):
    policy = adapted(base)
    export_policy(policy, tmp_path / "out", adapter="keep")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="not empty.*force"):
        export_policy(policy, tmp_path / "out")
    export_policy(policy, tmp_path / "out", force=True)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert "model.safetensors" in names
    assert "notes.txt" in names
    assert not any(name.startswith("adapter_") for name in names)
    first = (tmp_path / "out" / "model.safetensors").read_bytes()
    export_policy(policy, tmp_path / "out", force=True)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == first


def test_a_file_in_the_way_is_an_error(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(FileExistsError, match="is a file"):
        export_policy(tiny_llada(), tmp_path / "out", force=True)


def test_impossible_exports_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no adapter"):
        export_policy(tiny_llada(), tmp_path / "out", adapter="keep")
    with pytest.raises(ValueError, match="choose merge"):
        export_policy(tiny_llada(), tmp_path / "out", adapter="both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dtype='int4'"):
        export_policy(tiny_llada(), tmp_path / "out", dtype="int4")
    assert not (tmp_path / "out").exists()


def test_a_policy_without_an_adapter_is_exported_as_it_is(tmp_path):
    policy = tiny_llada()
    report = export_policy(policy, tmp_path / "out", dtype="bfloat16")
    assert report.merge_difference is None
    exported = LLaDA.from_pretrained(str(tmp_path / "out")).state_dict()
    torch.testing.assert_close(exported, policy.to(torch.bfloat16).state_dict(), rtol=0, atol=0)


def test_an_export_that_fails_leaves_the_previous_one(tmp_path, monkeypatch):
    export_policy(tiny_llada(seed=1), tmp_path / "out")

    def broken(path: Path, tensors: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_tensors", broken)
    with pytest.raises(OSError, match="untouched"):
        export_policy(tiny_llada(seed=2), tmp_path / "out", force=True)
    kept = LLaDA.from_pretrained(str(tmp_path / "out")).state_dict()
    torch.testing.assert_close(kept, tiny_llada(seed=1).state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("lora", [False, True], ids=["plain", "adapter"])
def test_a_training_checkpoint_fills_a_policy(lora):
    trained, fresh = tiny_llada(seed=1), tiny_llada(seed=2)
    for policy, seed in ((trained, 1), (fresh, 2)):
        if lora:
            LoRA(rank=2, alpha=4, seed=seed).apply(policy)
    saved = {f"policy.{name}": value for name, value in trained.state_dict().items()}
    load_policy_state(fresh, saved | {"ref_policy.x": torch.zeros(1)})
    torch.testing.assert_close(fresh.state_dict(), trained.state_dict(), rtol=0, atol=0)
    load_policy_state(tiny_or_adapted(lora), trained.state_dict())


def tiny_or_adapted(lora: bool) -> LLaDA:
    policy = tiny_llada()
    if lora:
        LoRA(rank=2, alpha=4).apply(policy)
    return policy


def test_a_training_checkpoint_of_another_model_is_refused():
    adapted_state = {f"policy.{name}": value for name, value in tiny_or_adapted(True).state_dict().items()}
    with pytest.raises(ValueError, match="missing.*unexpected.*peft setting"):
        load_policy_state(tiny_llada(), adapted_state)
    with pytest.raises(ValueError, match="wrong shape"):
        load_policy_state(tiny_llada(width=64), tiny_llada().state_dict())
