"""What the documents promise: links lead somewhere, commands compose, YAML examples build."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import open_dict

from dare_lightning.cli.arguments import parse
from dare_lightning.cli.checks import check
from dare_lightning.cli.compose import compose, expand_sweep
from tests.shared import ROOT

DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("docker/*.md")])
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")
YAML = re.compile(r"^```yaml\n# FOLDER/(\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def commands() -> Iterator[tuple[str, str]]:
    """Every command line of the program in a document, once, with the document that first gives it."""
    seen = set()
    for path in DOCUMENTS:
        for line in path.read_text(encoding="utf-8").splitlines():
            for found in re.findall(r"python -m dare_lightning ([^`&#|)]+)", line):
                # Examples of CONTRIBUTING.md that are not in conf/ are run by test_contributing.
                if found.strip() not in seen and "=reinforce" not in found:
                    seen.add(found.strip())
                    yield name(path), found.strip()


def enough(jobs: Sequence[list[str]]) -> list[list[str]]:
    """As few jobs of a sweep as hold every word of it; whether a word is accepted is no matter of the others.

    All jobs have their words in the same places, so that from one place to the next the values can advance together.
    """
    values = [list(dict.fromkeys(words)) for words in zip(*jobs, strict=True)]
    count = max(map(len, values), default=1)
    return [[each[number % len(each)] for each in values] for number in range(count)]


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_links_lead_to_files(path: Path) -> None:
    targets = LINK.findall(path.read_text(encoding="utf-8"))
    assert [target for target in targets if not (path.parent / target).exists()] == []


@pytest.mark.parametrize(("document", "command"), list(commands()), ids=lambda value: value)
def test_commands_are_accepted(document: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = tmp_path / "runs" / "fit" / "DATE_TIME" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "step-00000001.ckpt").touch()
    (tmp_path / "FOLDER").mkdir()
    (tmp_path / "FILE.parquet").touch()
    # The policy inside the package is the business of other tests.
    for policy in ("tiny_sudoku", "tiny_sudoku_block"):
        (tmp_path / "assets" / policy).mkdir(parents=True)
    monkeypatch.setattr("dare_lightning.cli.compose.ASSETS", tmp_path / "assets")
    monkeypatch.chdir(tmp_path)
    arguments = parse(shlex.split(command))
    if arguments.help or arguments.rerun_failed or arguments.command in (None, "completion"):
        return
    jobs = enough(expand_sweep(arguments.overrides)) if arguments.multirun else [arguments.overrides]
    for overrides in jobs:
        cfg = compose(str(arguments.command), overrides)
        with open_dict(cfg):
            cfg.pop("hydra")
        if not arguments.cfg:
            check(str(arguments.command), cfg)


@pytest.mark.parametrize("path", [p for p in DOCUMENTS if YAML.search(p.read_text())], ids=name)
def test_yaml_examples_compose(path: Path, tmp_path: Path) -> None:
    for place, content in YAML.findall(path.read_text(encoding="utf-8")):
        file = tmp_path / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content.replace("my_package.my_module:score", "dare_lightning.rewards.text:unused"))
        group, option = file.parent.name, file.stem
        chosen = f"{group}={option}" if group != "reward" else f"reward@data.reward={option}"
        cfg = compose("fit", [chosen], [tmp_path])
        if group == "reward" and "FunctionReward" not in content:
            assert instantiate(cfg.data.reward)(["<answer>1</answer>"], [_example()])[0].status == "right"


def _example() -> object:
    from dare_lightning.rewards.base import Example

    return Example([{"role": "user", "content": "1?"}], "1")


def test_a_sweep_is_tried_with_every_word_of_it() -> None:
    jobs = expand_sweep(["seed=1,2", "method=d1,sft,espo", "run_root=x"])
    tried = enough(jobs)
    assert len(tried) == 3
    assert all(job in jobs for job in tried)
    assert {word for job in tried for word in job} == {word for job in jobs for word in job}


def test_the_first_screen_of_the_readme_has_the_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert ["python -m dare_lightning fit -m" in text.split("\n## ")[0], "python -m benchmarks" in text] == [True, True]
    assert "python -m dare_lightning fit" in text.split("\n## ")[0]


def test_every_page_is_in_the_index_and_in_the_site() -> None:
    pages = {str(path.relative_to(ROOT / "docs")) for path in ROOT.glob("docs/**/*.md")}
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert set(re.findall(r": (\S+\.md)$", site, flags=re.MULTILINE)) == pages
    assert {target for target in LINK.findall((ROOT / "docs" / "README.md").read_text()) if "../" not in target} == (
        pages - {"README.md"}
    )
