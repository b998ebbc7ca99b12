"""Reading checkpoints strictly, and writing them so that a failure loses nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dare_lightning.families import checkpoint
from dare_lightning.families.llada import LLaDA
from dare_lightning.families.load import load_policy
from tests.tiny import CHAT_TEMPLATE, tiny_llada


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of a tiny policy in one file."""
    tiny_llada().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """The same policy in several files with an index."""
    policy = tiny_llada()
    checkpoint.save_checkpoint(
        tmp_path / "sharded", policy.state_dict(), policy.config, policy.tokenizer, None, max_shard_bytes=10_000
    )
    return tmp_path / "sharded"


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("limit", [10**9, 10_000], ids=["one_file", "sharded"])
def test_a_round_trip_is_bit_exact(tmp_path, tied, dtype, limit):
    policy = tiny_llada(dtype=dtype, weight_tying=tied)
    checkpoint.save_checkpoint(tmp_path / "a", policy.state_dict(), policy.config, policy.tokenizer, None, limit)
    again = LLaDA.from_pretrained(str(tmp_path / "a"))
    torch.testing.assert_close(again.state_dict(), policy.state_dict(), rtol=0, atol=0)
    files = {path.name for path in (tmp_path / "a").glob("*.safetensors")}
    assert (files == {"model.safetensors"}) is (limit == 10**9)
    assert again.config == policy.config | {"torch_dtype": str(dtype).removeprefix("torch.")}
    assert again.tokenizer.get_vocab() == policy.tokenizer.get_vocab()
    assert again.tokenizer.chat_template == CHAT_TEMPLATE
    assert (again.mask_token_id, again.stop_token_ids) == (policy.mask_token_id, policy.stop_token_ids)
    assert all(weight.requires_grad for weight in again.parameters())


def test_shards_are_read_in_any_order_through_the_index(sharded):
    index = json.loads((sharded / checkpoint.INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    index["weight_map"] = dict(reversed(index["weight_map"].items()))
    (sharded / files[0]).rename(sharded / "odd-name.safetensors")
    index["weight_map"] = {k: "odd-name.safetensors" if v == files[0] else v for k, v in index["weight_map"].items()}
    (sharded / checkpoint.INDEX).write_text(json.dumps(index))
    torch.testing.assert_close(
        LLaDA.from_pretrained(str(sharded)).state_dict(), tiny_llada().state_dict(), rtol=0, atol=0
    )


def test_the_dtype_option_casts_on_load(folder):
    assert next(LLaDA.from_pretrained(str(folder)).parameters()).dtype == torch.float32
    assert next(LLaDA.from_pretrained(str(folder), dtype="auto").parameters()).dtype == torch.float32
    policy = LLaDA.from_pretrained(str(folder), dtype="bfloat16")
    assert {weight.dtype for weight in policy.parameters()} == {torch.bfloat16}
    with pytest.raises(ValueError, match="'int8'.*float32, bfloat16"):
        LLaDA.from_pretrained(str(folder), dtype="int8")


def test_weights_of_several_dtypes_need_one_to_be_chosen(folder):
    state = load_file(folder / "model.safetensors")
    norms = {name: value for name, value in state.items() if value.dim() == 1}
    save_file({name: value.bfloat16() for name, value in state.items()} | norms, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"several dtypes \(.*wte.weight in bfloat16, .*norm.* in float32\): set mo"):
        LLaDA.from_pretrained(str(folder))
    assert torch.isfinite(LLaDA.from_pretrained(str(folder), dtype="bfloat16")(torch.tensor([[5, 6]]))).all()


def test_a_missing_shard_is_named(sharded):
    next(iter(sorted(sharded.glob("model-00002*")))).unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of"):
        LLaDA.from_pretrained(str(sharded))


@pytest.mark.parametrize("keep", [0, 5, 200, -1], ids=["empty", "header", "early", "last_byte"])
def test_a_truncated_file_is_named(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match="model.safetensors is damaged or cut short"):
        LLaDA.from_pretrained(str(folder))


def test_wrong_tensors_are_all_listed(folder):
    state = load_file(folder / "model.safetensors")
    state["model.transformer.extra.weight"] = state.pop("model.transformer.ln_f.weight")
    state["model.transformer.wte.weight"] = torch.zeros(41, 32)
    save_file(state, folder / "model.safetensors")
    with pytest.raises(ValueError, match="do not fit") as error:
        LLaDA.from_pretrained(str(folder))
    assert "1 missing: model.transformer.ln_f.weight" in str(error.value)
    assert "1 unexpected: model.transformer.extra.weight" in str(error.value)
    assert "1 wrong shape: model.transformer.wte.weight [41, 32] instead of [40, 32]" in str(error.value)


def test_an_index_of_another_save_is_refused(sharded):
    path = sorted(sharded.glob("*.safetensors"))[0]
    save_file(load_file(path) | {"model.transformer.extra.weight": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="disagree about model.transformer.extra.weight"):
        LLaDA.from_pretrained(str(sharded))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        LLaDA.from_pretrained(str(folder))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_damaged_json_is_named(folder, name):
    (folder / name).write_text('{"model_type": "lla')
    with pytest.raises(ValueError, match=f"{name} is not valid JSON"):
        LLaDA.from_pretrained(str(folder))


@pytest.mark.parametrize("path", ["/no/such/folder", "./no_such_folder", "plain"])
def test_a_path_that_is_neither_folder_nor_hub_name_is_an_error(path):
    with pytest.raises(FileNotFoundError, match="not a folder, nor a hub name"):
        LLaDA.from_pretrained(path)


def test_a_hub_name_offline_names_the_path(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="no folder 'owner/missing-model'"):
        LLaDA.from_pretrained("owner/missing-model")


def test_any_family_is_found_by_its_config(folder):
    assert isinstance(load_policy(str(folder), attention="eager"), LLaDA)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "other"}))
    with pytest.raises(ValueError, match="model_type='other'.*there are .*LLaDA"):
        load_policy(str(folder))


def test_what_the_source_held_is_copied(folder, tmp_path):
    odd = '{"do_sample": false, "temperature": 0.0, "top_p": 7, '  # not even JSON
    (folder / "generation_config.json").write_text(odd)
    (folder / "modeling_llada.py").write_text("raise SystemExit")
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    LLaDA.from_pretrained(str(folder)).save_pretrained(tmp_path / "copy")
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            assert (tmp_path / "copy" / path.name).read_bytes() == path.read_bytes(), path.name
    assert LLaDA.from_pretrained(str(tmp_path / "copy")).tokenizer.chat_template == "{{ messages[0]['content'] }}"


def test_a_policy_can_be_saved_where_it_came_from_and_after_its_source_is_gone(folder, tmp_path):
    policy = LLaDA.from_pretrained(str(folder))
    with torch.no_grad():
        policy.model["transformer"].ln_f.weight.mul_(2)
    policy.save_pretrained(folder)
    torch.testing.assert_close(LLaDA.from_pretrained(str(folder)).state_dict(), policy.state_dict(), rtol=0, atol=0)
    kept = {name: value.clone() for name, value in policy.state_dict().items()}
    shutil.rmtree(folder)
    policy.save_pretrained(tmp_path / "elsewhere")
    torch.testing.assert_close(LLaDA.from_pretrained(str(tmp_path / "elsewhere")).state_dict(), kept, rtol=0, atol=0)


def test_one_layout_replaces_the_other_and_foreign_files_stay(sharded):
    (sharded / "notes.txt").write_text("mine")
    (sharded / "adapter_model.safetensors").write_text("old")
    policy = tiny_llada(seed=1)
    policy.save_pretrained(sharded)
    tokenizer = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert {path.name for path in sharded.iterdir()} == {"config.json", "model.safetensors", "notes.txt"} | tokenizer
    torch.testing.assert_close(LLaDA.from_pretrained(str(sharded)).state_dict(), policy.state_dict(), rtol=0, atol=0)


class FullDisk:
    """Stands in for a file-writing function: the n-th call fails half-way, as a full disk does."""

    def __init__(self, real, calls: int) -> None:
        self.real, self.left = real, calls

    def __call__(self, path: Path, content) -> None:
        self.left -= 1
        self.real(path, content)
        if self.left == 0:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
            raise OSError(28, "No space left on device")


@pytest.mark.parametrize("call", [1, 3, 5])
def test_a_disk_that_fills_up_while_saving_leaves_the_last_good_checkpoint(sharded, monkeypatch, call):
    before = {path.name: path.read_bytes() for path in sharded.iterdir()}
    monkeypatch.setattr(checkpoint, "write_tensors", FullDisk(checkpoint.write_tensors, call))
    policy = tiny_llada(seed=1)
    with pytest.raises(OSError, match="No space left.*what it held before is untouched"):
        checkpoint.save_checkpoint(sharded, policy.state_dict(), policy.config, policy.tokenizer, None, 10_000)
    assert {path.name: path.read_bytes() for path in sharded.iterdir()} == before


def test_a_first_save_that_fails_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "write_json", FullDisk(checkpoint.write_json, 1))
    with pytest.raises(OSError, match="nothing was left there"):
        tiny_llada().save_pretrained(tmp_path / "deep" / "model")
    assert list((tmp_path / "deep").iterdir()) == []


def test_saved_files_can_be_read_by_whoever_can_read_the_config(folder):
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode
