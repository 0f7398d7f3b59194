"""Where results are to go, looked at before anything is measured."""

from __future__ import annotations

import tempfile
from pathlib import Path

from keysieve.checks import refuse


def require_file(option: str, path: Path | None) -> None:
    """Refuse a file that nothing can be appended to; its folder is made, the file is not."""
    if path is None:
        return
    there = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
        if not there:
            path.unlink()
    except OSError as error:
        _refuse(option, path, "a file that can be written", error)


def require_folder(option: str, path: Path) -> None:
    """Refuse a folder that no file can be made in; the folder is made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        _refuse(option, path, "a folder that can be written", error)


def _refuse(option: str, path: Path, accepted: str, error: OSError) -> None:
    refuse(option, got=f"{path} ({error.strerror})", accepted=accepted, remedy="Name a place that can be written.")
