"""Where rows come from: parquet, JSON Lines, a saved data set folder, or the hub."""

from __future__ import annotations

import glob
import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

FILE_TYPES = (".parquet", ".jsonl", ".json")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")


@dataclass(frozen=True)
class RowTable:
    """Rows as dictionaries, which know the file they came from.

    Attributes:
        columns: every key that some row has.
        rows: the rows; a row may lack a column.
        files: (name, number of its first row here), in order.
    """

    columns: tuple[str, ...]
    rows: Sequence[Mapping[str, Any]]
    files: tuple[tuple[str, int], ...]

    def __len__(self) -> int:
        return len(self.rows)

    def file(self, row: int) -> tuple[str, int]:
        """The file of a row and the row's number in it, from 0."""
        name, first = self.files[bisect_right([first for _, first in self.files], row) - 1]
        return name, row - first

    def where(self, row: int) -> str:
        """The place of a row as an error names it; the first row of a file is row 1."""
        name, number = self.file(row)
        return f"{name}, row {number + 1}"


def read_rows(path: str, split: str | None = None, limit: int | None = None) -> RowTable:
    """Read parquet or JSON Lines (a file, a folder or a glob), a saved `datasets` folder, or a hub data set.

    A path that exists is always read from disk. A folder is searched for parquet files, or else JSON files; with
    `split`, those that lie in a folder of that name or whose name starts with it.

    Args:
        path: where the rows are; a hub name is `name`, `owner/name` or `owner/name:config`.
        split: which part of a folder or data set; None takes every file of a folder, "train" from the hub.
        limit: read the first `limit` rows only.

    Raises:
        FileNotFoundError: there is no such path and it is not a reachable hub name.
        ValueError: a file cannot be parsed, is empty, or the split does not exist.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit} leaves no row; use null for all rows")
    place = Path(path).expanduser()
    if place.is_dir() and ((place / "state.json").exists() or (place / "dataset_dict.json").exists()):
        return _from_datasets(_load_saved(place, split), str(place), limit)
    if place.is_dir():
        return _from_files(_files_of(place, split), limit)
    if place.is_file():
        return _from_files([place], limit)
    if matches := sorted(Path(match) for match in glob.glob(str(place), recursive=True)):
        return _from_files([match for match in matches if match.is_file()], limit)
    return _from_datasets(_load_hub(path, split), path, limit)


def _files_of(folder: Path, split: str | None) -> list[Path]:
    found = [file for file in sorted(folder.rglob("*")) if file.suffix in FILE_TYPES and file.is_file()]
    kinds = {file.suffix == ".parquet" for file in found}
    if True in kinds:
        found = [file for file in found if file.suffix == ".parquet"]
    if not found:
        raise ValueError(f"{folder} holds no {', '.join(FILE_TYPES)} file and no saved data set")
    if split is None:
        return found
    name = re.compile(rf"{re.escape(split)}(?![A-Za-z0-9])")
    chosen = [file for file in found if name.match(file.name) or split in file.relative_to(folder).parts[:-1]]
    if not chosen:
        names = ", ".join(str(file.relative_to(folder)) for file in found[:8])
        raise ValueError(f"no file of {folder} belongs to split {split!r}; found {names}")
    return chosen


def _from_files(files: Sequence[Path], limit: int | None) -> RowTable:
    rows: list[Mapping[str, Any]] = []
    starts: list[tuple[str, int]] = []
    for file in files:
        left = None if limit is None else limit - len(rows)
        if left == 0:
            break
        starts.append((str(file), len(rows)))
        rows.extend(islice(_read_file(file), left))
    if not rows:
        raise ValueError(f"no rows in {', '.join(map(str, files)) or 'an empty list of files'}")
    return RowTable(tuple(dict.fromkeys(key for row in rows for key in row)), rows, tuple(starts))


def _read_file(file: Path) -> Iterator[Mapping[str, Any]]:
    if file.suffix == ".parquet":
        return _read_parquet(file)
    if file.suffix in (".jsonl", ".json"):
        return _read_json(file)
    raise ValueError(f"{file} is neither {', '.join(FILE_TYPES)} nor a saved data set folder")


def _read_parquet(file: Path) -> Iterator[Mapping[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as opened:
            for batch in opened.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise ValueError(f"{file} cannot be read as parquet, it is damaged or something else: {error}") from error


def _read_json(file: Path) -> Iterator[Mapping[str, Any]]:
    try:
        with file.open(encoding="utf-8") as lines:
            first = lines.read(1)
            while first.isspace():
                first = lines.read(1)
            lines.seek(0)
            if first == "[":
                for number, row in enumerate(json.load(lines), start=1):
                    yield _json_row(row, f"{file}, row {number}")
                return
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _json_row(_parse_line(line, file, number), f"{file}, line {number}")
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read as JSON: {error}") from error


def _parse_line(line: str, file: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}, line {number} is not valid JSON: {error}") from error


def _json_row(row: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"{where} is {row!r:.80} ({type(row).__name__}), expected an object with named columns")
    return row


def _load_saved(folder: Path, split: str | None) -> Any:
    import datasets

    saved = datasets.load_from_disk(str(folder))
    if not isinstance(saved, datasets.DatasetDict):
        return saved
    names = list(saved)
    chosen = split if split is not None else (names[0] if len(names) == 1 else "train")
    if chosen not in saved:
        raise ValueError(f"{folder} has no split {chosen!r}; it has {', '.join(names)}")
    return saved[chosen]


def _load_hub(path: str, split: str | None) -> Any:
    looks_like_hub = _HUB_NAME.fullmatch(path) and Path(path).suffix not in FILE_TYPES
    if not looks_like_hub:
        raise FileNotFoundError(f"no file or folder {path} (looked in {Path.cwd()})")
    import datasets

    name, _, config = path.partition(":")
    tried = f"no file or folder {path} (looked in {Path.cwd()}), and the data set {name!r} of the hub"
    try:
        return datasets.load_dataset(name, config or None, split=split or "train")
    except OSError as error:
        raise FileNotFoundError(f"{tried} cannot be reached: {error}") from error
    except ValueError as error:
        raise ValueError(f"{tried} cannot be loaded: {error}") from error


def _from_datasets(dataset: Any, name: str, limit: int | None) -> RowTable:
    count = len(dataset) if limit is None else min(limit, len(dataset))
    if count == 0:
        raise ValueError(f"no rows in {name}")
    return RowTable(tuple(dataset.column_names), dataset.select(range(count)).to_list(), ((name, 0),))
