"""Removes what a program left in its folder, whatever it made of it."""

from __future__ import annotations

import logging
import os
import secrets

_log = logging.getLogger(__name__)
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def remove(folder: str) -> None:
    """Remove a folder and everything in it; nothing where there is none.

    Folders may be locked, and nested deeper than a path can be long: each is emptied from its own descriptor, and the
    folders in it are moved up before they are emptied in turn.

    Raises:
        OSError: something in it cannot be removed, or changes meanwhile.
    """
    try:
        top = os.open(folder, _OPEN)
    except FileNotFoundError:
        return
    try:
        while names := _emptied(top, top):
            for name in names:
                inner = os.open(name, _OPEN, dir_fd=top)
                try:
                    _emptied(inner, top)
                finally:
                    os.close(inner)
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(folder)


def remove_quietly(folder: str) -> None:
    """The same as far as it goes, at the end of everything."""
    try:
        remove(folder)
    except OSError as error:
        _log.warning("%s is left: %s", folder, error)


def _emptied(folder: int, top: int) -> list[str]:
    """Unlink the files of a folder and move its folders to `top`, under names that nobody could foresee."""
    moved = []
    with os.scandir(folder) as entries:
        found = list(entries)
    for entry in found:
        if not entry.is_dir(follow_symlinks=False):
            os.unlink(entry.name, dir_fd=folder)
            continue
        os.chmod(entry.name, 0o700, dir_fd=folder)
        moved.append(secrets.token_hex(8))
        os.rename(entry.name, moved[-1], src_dir_fd=folder, dst_dir_fd=top)
    return moved
