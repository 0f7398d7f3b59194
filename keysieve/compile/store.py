"""The on-disk kernel cache: one file an entry, written aside and renamed, checked before it is trusted.

An entry is an ELF image followed by a trailer (JSON facts, then a fixed footer with lengths and a SHA-256 over image
and facts). Loaders ignore bytes after an ELF image, so the file is loaded as it lies, and one rename publishes both.

Locks are advisory (flock on a file of its own per key) and only save work: without them (some network file systems)
two processes may compile the same kernel, and the last rename wins with equal contents.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import struct
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CACHE_ENV = "KEYSIEVE_CACHE_DIR"
LOCK_SECONDS = 300.0
"""How long to wait for another process that compiles the same kernel before compiling it as well."""

_MAGIC = b"keysieve-kernel1"
_FOOTER = struct.Struct("<QQ32s16s")  # image bytes, facts bytes, sha256(image + facts), magic


class CorruptEntry(ValueError):
    """A cache file that is truncated, altered, or not one of ours."""


def cache_dir() -> Path:
    """`$KEYSIEVE_CACHE_DIR`, else `$XDG_CACHE_HOME/keysieve`, else `~/.cache/keysieve`. It need not exist.

    Of a user without a home (an unnamed one, in a container, without `$HOME`) it is that of the home `/`.
    """
    named = os.environ.get(CACHE_ENV)
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    home = os.path.expanduser("~")  # "~" itself where there is none, for which Path.home raises
    return (Path(base) if base else Path("/" if home == "~" else home) / ".cache") / "keysieve"


@dataclass(frozen=True)
class Entry:
    """A checked entry: `path` can be loaded as it is; facts: what was stored beside the image."""

    path: Path
    form: str
    facts: dict[str, Any]


def encode(image: bytes, facts: dict[str, Any]) -> bytes:
    """The bytes of an entry."""
    text = json.dumps(facts, sort_keys=True).encode()
    digest = hashlib.sha256(image + text).digest()
    return image + text + _FOOTER.pack(len(image), len(text), digest, _MAGIC)


def decode(data: bytes) -> tuple[bytes, dict[str, Any]]:
    """Image and facts of an entry's bytes; CorruptEntry when anything is off."""
    if len(data) < _FOOTER.size:
        raise CorruptEntry(f"{len(data)} bytes, shorter than a footer")
    image_size, text_size, digest, magic = _FOOTER.unpack_from(data, len(data) - _FOOTER.size)
    if magic != _MAGIC:
        raise CorruptEntry("no footer at the end (truncated, or not a kernel of keysieve)")
    if image_size + text_size + _FOOTER.size != len(data):
        raise CorruptEntry(f"{len(data)} bytes, the footer speaks of {image_size + text_size + _FOOTER.size}")
    body = memoryview(data)[: image_size + text_size]
    if hashlib.sha256(body).digest() != digest:
        raise CorruptEntry("the checksum does not match")
    facts = json.loads(bytes(body[image_size:]))
    return bytes(body[:image_size]), facts


class Store:
    """A cache directory. Reading never writes; every failure to write is reported as None, not raised."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, name: str, form: str) -> Path:
        """Where an entry of this name and form lies."""
        return self.root / f"{name}.{form}"

    def find(self, name: str) -> Entry | None:
        """The entry of this name, checked; None when absent, unreadable or corrupt."""
        for form in ("so", "o"):
            path = self.path(name, form)
            try:
                data = path.read_bytes()
                _, facts = decode(data)
            except (OSError, CorruptEntry, ValueError):
                continue
            return Entry(path, form, facts)
        return None

    def corrupt(self, name: str) -> str | None:
        """Why an existing file of this name cannot be used, or None (for reports and tests)."""
        for form in ("so", "o"):
            path = self.path(name, form)
            try:
                decode(path.read_bytes())
            except OSError:
                continue
            except ValueError as error:
                return f"{path}: {error}"
        return None

    def put(self, name: str, form: str, image: bytes, facts: dict[str, Any]) -> Path | None:
        """Write an entry aside and rename it into place. None when the directory cannot be written."""
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o755)
            handle, temporary = tempfile.mkstemp(prefix=f".{name[:40]}-", suffix=".tmp", dir=self.root)
        except OSError:
            return None
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(encode(image, facts))
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            final = self.path(name, form)
            os.replace(temporary, final)
            return final
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            return None

    @contextlib.contextmanager
    def lock(self, name: str, seconds: float = LOCK_SECONDS) -> Iterator[bool]:
        """Hold the lock of an entry; yields False when it could not be had (read-only, unsupported, or timed out)."""
        handle = self._open_lock(name)
        if handle is None:
            yield False
            return
        try:
            yield _acquire(handle, seconds)
        finally:
            os.close(handle)  # closing releases the lock

    def _open_lock(self, name: str) -> int | None:
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o755)
            return os.open(self.root / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError:
            return None


def _acquire(handle: int, seconds: float) -> bool:
    import fcntl

    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES, errno.EINTR):
                return False
        if time.monotonic() >= end:
            return False
        time.sleep(0.02)


def private_copy(name: str, form: str, image: bytes, facts: dict[str, Any]) -> Path:
    """A file of this process alone, for when the cache cannot be written. The caller unlinks it after loading."""
    handle, path = tempfile.mkstemp(prefix=f"keysieve-{name[:40]}-", suffix=f".{form}")
    with os.fdopen(handle, "wb") as file:
        file.write(encode(image, facts))
    return Path(path)
