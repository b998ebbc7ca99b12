"""Paths as a shell pastes them, whatever characters they hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from omegaconf import DictConfig

from dare_lightning.cli.compose import compose, expand_sweep
from dare_lightning.cli.quoting import quote_path
from tests.cli.conftest import Finished

NAMES = [
    "epoch=1-step=20.ckpt",
    "with space.ckpt",
    "a(1), b [2] {3}.ckpt",
    "it's.ckpt",
    "back\\slash.ckpt",
    "ends\\",
    "2024",
    "true",
    'double"quote',
    "ünï:cødé#%.ckpt",
]


@pytest.fixture(scope="module")
def composed() -> DictConfig:
    """Every name as two pasted values of one configuration, which takes a while to compose."""
    words = [f"+data.n{n}_{kind}={name}" for n, name in enumerate(NAMES) for kind in ("path", "dir")]
    return compose("fit", [*map(quote_path, words)])


@pytest.mark.parametrize("number", range(len(NAMES)), ids=NAMES)
def test_a_pasted_path_means_itself(number: int, composed: DictConfig) -> None:
    assert composed.data[f"n{number}_path"] == NAMES[number]
    assert composed.data[f"n{number}_dir"] == NAMES[number]


def test_pasted_paths_mean_themselves_in_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        Path(name).touch()
    words = [quote_path(f"+data.n{n}_path={name}", sweep=True) for n, name in enumerate(NAMES)]
    for job in expand_sweep([*words, "seed=1,2"]):
        data = compose("fit", job).data
        assert [data[f"n{n}_path"] for n in range(len(NAMES))] == NAMES


def test_keys_of_the_program_take_pasted_paths() -> None:
    cfg = compose("fit", [quote_path(f"ckpt_path={NAMES[0]}"), quote_path(f"run_dir={NAMES[1]}")])
    assert (cfg.ckpt_path, cfg.run_dir) == (NAMES[0], NAMES[1])


def test_null_quotes_and_interpolations_keep_their_meaning() -> None:
    words = ["ckpt_path=null", "run_root='a b'", "run_dir=${run_root}/x"]
    cfg = compose("fit", [quote_path(word) for word in words])
    assert cfg.ckpt_path is None
    assert cfg.run_dir == "a b/x"


def test_paths_are_swept_over_and_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    swept = expand_sweep([quote_path("model.path=a=1,b c", sweep=True)])
    assert [compose("fit", job).model.path for job in swept] == ["a=1", "b c"]
    assert compose("fit", [quote_path("+data.path=[a=1.parquet, b (2).parquet]")]).data.path == [
        "a=1.parquet",
        "b (2).parquet",
    ]


def test_other_keys_are_left_to_the_grammar() -> None:
    assert quote_path("seed=1,2") == "seed=1,2"
    assert quote_path("method.mask_ratio=[0.1,0.9]") == "method.mask_ratio=[0.1,0.9]"


def test_a_pasted_checkpoint_reaches_the_run(tiny: Callable[..., Finished], tmp_path: Path) -> None:
    (tmp_path / "epoch=1 (best).ckpt").touch()
    result = tiny("ckpt_path=epoch=1 (best).ckpt", "run_dir=out=1")
    assert result.returncode == 0
    assert yaml.safe_load((tmp_path / "out=1" / "config.yaml").read_text())["ckpt_path"] == "epoch=1 (best).ckpt"
