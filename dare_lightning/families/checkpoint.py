"""Checkpoints in the published layout: config.json and safetensors weights, sharded or not.

Reading is strict and checks every file before it fills anything. Writing is staged: a failure at any moment of it
leaves the folder's previous content as it was.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dare_lightning.families.experts import ExpertPlaces, split_experts, split_shapes

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5_000_000_000
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
# Copied byte for byte from the source: generation settings and code are the publisher's, we never interpret them.
COPIED_FILES = (*TOKENIZER_FILES, "generation_config.json", "*.py")
# What a new checkpoint in the same folder must not leave behind.
STALE_FILES = (*TOKENIZER_FILES, "*.safetensors", "*.safetensors.index.json", "adapter_config.json")


def resolve_folder(path: str) -> Path:
    """The folder at `path`; where there is none, `path` is taken as a hub name and downloaded to the hub's cache.

    Raises:
        FileNotFoundError: neither a folder nor something that the hub gives us.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path):
        raise FileNotFoundError(f"{path!r} is not a folder, nor a hub name such as GSAI-ML/LLaDA-8B-Instruct")
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.py"]
    try:
        return Path(snapshot_download(path, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"there is no folder {path!r}, and the hub did not give a model of this name ({error}); "
            "check the spelling, or download the model and pass its folder"
        ) from error


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is not JSON.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; {path.parent} is not a complete checkpoint folder")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); the file is damaged, fetch it again") from error


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as it is.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is not a JSON object.
    """
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise ValueError(f"{folder / 'config.json'} holds a {type(config).__name__}; expected a JSON object")
    return config


def load_weights(module: nn.Module, folder: Path, dtype: str | None = None) -> None:
    """Fill a module, built on the meta device, with the folder's weights.

    Args:
        module: its state dict has the published names, but for stacked experts (`split_experts`), which files may hold
            stacked or one by one.
        folder: holds model.safetensors, or model.safetensors.index.json and its shards.
        dtype: "float32", "bfloat16" or "float16"; None or "auto" keeps what the files hold. Buffers are not made
            narrower than that: the bias of a router would choose other experts.

    Raises:
        FileNotFoundError: no weights, or a shard is missing.
        ValueError: a damaged file, missing or unexpected tensors, wrong shapes, an unknown dtype, or several of them
            where none is asked for.
    """
    wanted = parse_dtype(dtype)
    files = _weight_files(folder)
    found: dict[str, tuple[int, ...]] = {}
    for path, listed in files.items():
        found |= _shapes(path, listed)
    own = module.state_dict()
    expected = {name: tuple(value.shape) for name, value in split_experts(own).items()}
    check_keys(expected, split_shapes(found), str(folder))
    buffers = {name for name, _ in module.named_buffers()}
    state: dict[str, Tensor] = {}
    places = ExpertPlaces(own)
    for path in files:
        with _opened(path) as reader:
            for name in reader.keys():  # noqa: SIM118
                value = reader.get_tensor(name)
                if wanted is not None:
                    value = value.to(torch.promote_types(value.dtype, wanted) if name in buffers else wanted)
                places.put(state, name, value)
    _check_one_dtype(module, state, folder)
    module.load_state_dict(state, strict=True, assign=True)


def _check_one_dtype(module: nn.Module, state: Mapping[str, Tensor], folder: Path) -> None:
    """Layers multiply what others hand them: weights of two dtypes would fail in the first forward pass.

    Parameters of modules with `own_precision` are left out: these convert what they read.

    Raises:
        ValueError: naming an example of each dtype.
    """
    examples: dict[torch.dtype, str] = {}
    for prefix, part in module.named_modules():
        if getattr(part, "own_precision", False):
            continue
        for name, _ in part.named_parameters(prefix, recurse=False):
            if name in state:
                examples.setdefault(state[name].dtype, name)
    if len(examples) > 1:
        kinds = ", ".join(f"{name} in {str(kind).removeprefix('torch.')}" for kind, name in examples.items())
        raise ValueError(f"{folder} holds weights of several dtypes ({kinds}): set model.dtype to one, such as float32")


def save_checkpoint(
    folder: Path,
    state: Mapping[str, Tensor],
    config: dict[str, Any],
    tokenizer: Any,
    source: Path | None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a checkpoint in the published layout.

    Tokenizer, generation settings and code files are copied from `source`; without one, the tokenizer is written
    from memory. Files in `folder` that belong to no checkpoint stay.

    Args:
        folder: created where needed.
        state: tensors by published name, on any device; stacked experts are written one by one.
        config: content of config.json; only its dtype key is changed, to the dtype of the tensors.
        tokenizer: used where there is no source.
        source: folder the checkpoint was read from.
        max_shard_bytes: larger models are split into shards with an index.

    Raises:
        ValueError: the tensors are those of a policy with an adapter.
        OSError: the folder cannot be written; what it held before is still there.
    """
    if any(".base_layer." in name for name in state):
        raise ValueError("the policy carries an adapter; merge it first, or save the adapter alone")
    with staged(folder, STALE_FILES) as scratch:
        _write_weights(scratch, split_experts(state), max_shard_bytes)
        write_json(scratch / "config.json", _with_dtype(config, state))
        if source is not None and source.is_dir():
            for path in _matching(source, COPIED_FILES):
                shutil.copyfile(path, scratch / path.name)
        else:
            tokenizer.save_pretrained(str(scratch))


@contextmanager
def staged(folder: Path, stale: Sequence[str]) -> Iterator[Path]:
    """A scratch folder whose files become those of `folder` when the body ends without an error.

    A new folder appears complete, in one rename. In an existing one each file is replaced by a rename, after all
    of them are on the disk; a weight index goes last and its predecessor first, so that a torn folder never loads.

    Args:
        folder: the target.
        stale: file patterns; what matches in the target and is not replaced is deleted.

    Raises:
        OSError: the target cannot be written; its content is untouched.
    """
    existed = folder.is_dir()
    home = folder if existed else folder.parent
    scratch = home / f".{folder.name}.{uuid.uuid4().hex[:8]}"
    try:
        scratch.mkdir(parents=True)
        yield scratch
        for path in [*scratch.iterdir(), scratch]:
            sync_to_disk(path)
        if existed:
            _replace_files(scratch, folder, stale)
        else:
            scratch.rename(folder)
        sync_to_disk(home)
    except OSError as error:
        state = "what it held before is untouched" if existed else "nothing was left there"
        raise OSError(error.errno, f"could not write {folder} ({error}); {state}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def check_keys(
    expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], where: str, hint: str = ""
) -> None:
    """Compare names and shapes of tensors.

    Raises:
        ValueError: lists what is missing, unexpected, or of a wrong shape.
    """
    wrong = [n for n in expected if n in found and found[n] != expected[n]]
    problems = {
        "missing": [n for n in expected if n not in found],
        "unexpected": [n for n in found if n not in expected],
        "wrong shape": [f"{n} {list(found[n])} instead of {list(expected[n])}" for n in wrong],
    }
    said = [f"{len(names)} {kind}: {_shorten(names)}" for kind, names in problems.items() if names]
    if said:
        raise ValueError(f"the weights in {where} do not fit the model: {'; '.join(said)}{hint}")


def parse_dtype(name: str | None) -> torch.dtype | None:
    """The dtype of this name; None for None and "auto".

    Raises:
        ValueError: another name.
    """
    if name is None or name == "auto":
        return None
    if name not in DTYPES:
        raise ValueError(f"dtype={name!r} is unknown; choose auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def write_json(path: Path, content: Any) -> None:
    """Write readable JSON."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one safetensors file; tensors may be on any device."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    ready = {name: value.detach().to("cpu").contiguous() for name, value in tensors.items()}
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(ready, str(path), metadata={"format": "pt"})
        path.chmod(mode)  # safetensors makes files that only their owner can read
    except SafetensorError as error:
        raise OSError(f"could not write {path.name}: {error}") from error


def _weight_files(folder: Path) -> dict[Path, set[str] | None]:
    """Weight files with the tensors that the index expects in each; None without an index."""
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{folder / INDEX} has no weight_map; the file is damaged, fetch it again")
        files: dict[Path, set[str] | None] = {}
        for name, file in weight_map.items():
            listed = files.setdefault(folder / file, set())
            assert listed is not None
            listed.add(name)
        missing = [path.name for path in files if not path.is_file()]
        if missing:
            raise FileNotFoundError(
                f"{folder} lacks {_shorten(sorted(missing))}, which {INDEX} names; fetch them again"
            )
        return files
    if (folder / WEIGHTS).is_file():
        return {folder / WEIGHTS: None}
    raise FileNotFoundError(f"no weights in {folder}: expected {WEIGHTS}, or {INDEX} with its shards")


def _shapes(path: Path, listed: set[str] | None) -> dict[str, tuple[int, ...]]:
    with _opened(path) as reader:
        shapes = {name: tuple(reader.get_slice(name).get_shape()) for name in reader.keys()}  # noqa: SIM118
    if listed is not None and listed != set(shapes):
        odd = _shorten(sorted(listed ^ set(shapes)))
        raise ValueError(f"{path} and {INDEX} disagree about {odd}; they come from different saves, fetch both again")
    return shapes


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt", device="cpu") as reader:
            yield reader
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or cut short ({error}); fetch it again") from error


def _write_weights(folder: Path, state: Mapping[str, Tensor], max_shard_bytes: int) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    total = filled = 0
    for name, value in state.items():
        size = value.numel() * value.element_size()
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = value
        filled += size
        total += size
    if len(shards) == 1:
        write_tensors(folder / WEIGHTS, shards[0])
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(folder / file, shard)
        weight_map |= dict.fromkeys(shard, file)
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _with_dtype(config: dict[str, Any], state: Mapping[str, Tensor]) -> dict[str, Any]:
    """The config with its dtype key set to the tensors' dtype; newer files call the key `dtype`."""
    dtype = str(next(iter(state.values())).dtype).removeprefix("torch.")
    keys = [key for key in ("torch_dtype", "dtype") if key in config]
    return config | dict.fromkeys(keys or ["torch_dtype"], dtype)


def _replace_files(scratch: Path, folder: Path, stale: Sequence[str]) -> None:
    written = sorted(scratch.iterdir(), key=lambda path: path.name == INDEX)
    (folder / INDEX).unlink(missing_ok=True)
    for path in written:
        path.replace(folder / path.name)
    names = {path.name for path in written}
    for path in _matching(folder, stale):
        if path.name not in names:
            path.unlink()


def _matching(folder: Path, patterns: Sequence[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def sync_to_disk(path: Path) -> None:
    """Have the disk hold this file, or this folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _shorten(names: Sequence[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
