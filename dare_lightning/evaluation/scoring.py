"""OpenCompass's evaluators on recorded predictions: in this process, or in another Python."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dare_lightning.evaluation.benchmark import Description

MODEL = "policy"
_ASKED = """
import importlib.metadata as m, json, platform
print(json.dumps({"python": platform.python_version(), "opencompass": m.version("opencompass")}))
"""
# What belongs to our own ranks and packages must not reach a Python that has others.
_OWN_VARIABLES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONHOME", "PYTHONPATH", "RANK")
_OWN_PREFIXES = ("GROUP_", "ROLE_", "TORCHELASTIC_", "WORLD_SIZE")
_TAIL = 2000


def task(descriptions: Sequence[Description], work_dir: Path, **model: Any) -> Any:
    """An OpenCompass task's configuration; needs OpenCompass."""
    from mmengine.config import ConfigDict

    details = {"eval": {"runner": {"task": {"dump_details": True}}}}
    models = [{"abbr": MODEL, "type": MODEL, "path": "", "max_out_len": 0, **model}]
    return ConfigDict(models=models, datasets=[list(descriptions)], work_dir=str(work_dir), **details)


def left_by_task(work_dir: Path, kind: str, part: str) -> dict[str, Any]:
    """The `predictions` or `results` of a data set.

    Raises:
        RuntimeError: there are none.
    """
    file = work_dir / kind / MODEL / f"{part}.json"
    if not file.is_file():
        raise RuntimeError(f"OpenCompass left no {kind} of {part}")
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def score_here(descriptions: Sequence[Description], work_dir: Path) -> None:
    """Run the evaluators of data sets whose predictions lie in `work_dir`; needs OpenCompass."""
    from opencompass.tasks import OpenICLEvalTask

    OpenICLEvalTask(task(descriptions, work_dir)).run()


def score_elsewhere(python: str, descriptions: Sequence[Description], work_dir: Path) -> None:
    """The same in a process of another Python: one for all data sets, since OpenCompass takes long to import.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    # Inference is over, and what it added to its settings, the live policy among it, cannot be written down.
    described = [{**description, "infer_cfg": {}} for description in descriptions]
    file = work_dir / "score.json"
    file.write_text(json.dumps(_written(task(described, work_dir))), encoding="utf-8")
    command = [python, "-m", "opencompass.tasks.openicl_eval", str(file)]
    done = subprocess.run(command, cwd=work_dir, env=_environment(), capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, sep="\n")
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()[-_TAIL:]
        raise RuntimeError(f"eval.scoring_python={python} ended with status {done.returncode}: {said}")


def versions_elsewhere(python: str) -> dict[str, str]:
    """Versions of another Python and of its OpenCompass.

    Raises:
        ImportError: it does not run, or has none.
    """
    try:
        done = subprocess.run([python, "-c", _ASKED], env=_environment(), capture_output=True, text=True, check=False)
    except OSError as error:
        raise ImportError(f"eval.scoring_python={python} does not run: {error}") from error
    if done.returncode != 0:
        why = (done.stderr.strip() or "no message").splitlines()[-1]
        raise ImportError(
            f"eval.scoring_python={python} has no OpenCompass ({why}): {python} -m pip install opencompass==0.5.4"
            " 'pyarrow<26'"
        )
    found: Mapping[str, str] = json.loads(done.stdout)
    return dict(found)


def _written(value: Any) -> Any:
    """A configuration with classes and functions as OpenCompass reads them from a file: by their dotted names."""
    if isinstance(value, Mapping):
        return {key: _written(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_written(item) for item in value]
    return f"{value.__module__}.{value.__qualname__}" if callable(value) else value


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _OWN_VARIABLES}
    kept = {name: value for name, value in kept.items() if not name.startswith(_OWN_PREFIXES)}
    # Scoring needs neither a GPU nor the network.
    return kept | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
