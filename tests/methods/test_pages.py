"""Every method has a page that says what the others say, with the values that its file in conf/ has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.methods.matrix import METHODS, configured
from tests.shared import ROOT

PAGES = sorted(path.stem for path in Path(ROOT / "docs" / "methods").glob("*.md"))
SENTENCE = re.compile(r"[.!?](?=\s|$)")
WORDS = {"none": None, "null": None, "true": True, "false": False}


def page(name: str) -> str:
    return (ROOT / "docs" / "methods" / f"{name}.md").read_text(encoding="utf-8")


def said(cell: str) -> tuple[bool, Any]:
    """Whether a table's cell is a value, and which; others explain one in words."""
    bare = cell.strip("`")
    if bare in WORDS:
        return True, WORDS[bare]
    try:
        return True, float(bare)
    except ValueError:
        return re.fullmatch("`[a-z_0-9]+`", cell) is not None, bare


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_every_part(name: str) -> None:
    text = page(name)
    idea = text.split("$$")[0].split("\n\n")[2]
    assert len(SENTENCE.findall(idea)) == 3, idea
    assert text.count("$$") >= 2
    assert f"python -m dare_lightning fit method={name} " in text
    needs = text.split("## What it needs and costs\n")[1].split("\n## ")[0]
    assert "ollout" in needs
    assert re.search(r"forward (and backward )?pass", needs)
    assert "emory" in needs
    deviations = text.split("## Deviations\n")[1]
    assert re.search(r"\*\*(From|Kept from|One row)", deviations)
    assert "DARE" in deviations
    assert re.search(r"[Oo]riginal code|[Aa]uthors' code|DARE's implementation|No code", text)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_the_values_of_its_file(name: str) -> None:
    conf = configured(name)
    wrong = []
    for line in page(name).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        keys = re.findall(r"`([a-z_.]+)`", cells[0])
        if not line.startswith("| `") or len(keys) != 1 or keys[0] not in conf.method or keys[0] == "samples":
            continue
        found, (known, value) = OmegaConf.select(conf.method, keys[0]), said(cells[-1])
        if known and found != value:
            wrong.append((keys[0], value, found))
    assert wrong == []


def test_no_page_is_without_a_method() -> None:
    assert set(PAGES) <= set(METHODS)
