"""A fingerprint of the source a kernel is compiled from: its module and every keysieve module that it imports."""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

_ALWAYS = ("keysieve.compile.build", "keysieve.kernels.base")  # they shape the compiled object as well


def _path(module: str) -> Path | None:
    """File of a keysieve module, without importing it; None when there is no such module."""
    root = Path(__file__).resolve().parents[1]
    parts = module.split(".")[1:]
    package = root.joinpath(*parts) / "__init__.py"
    if package.is_file():
        return package
    if not parts:
        return None
    single = root.joinpath(*parts).with_suffix(".py")
    return single if single.is_file() else None


# `from keysieve.a import b, c` (on one line or in parentheses) and `import keysieve.a`, wherever they stand. Parsing
# the files properly takes ten times as long as everything else that a warm start does; a test holds this to the parser.
_FROM = re.compile(
    r"^[ \t]*from[ \t]+(keysieve[\w.]*|\.[\w.]*)[ \t]+import[ \t]*(?:\(([^)]*)\)|([^\n]*))", re.MULTILINE
)
_PLAIN = re.compile(r"^[ \t]*import[ \t]+(keysieve[\w.]*)", re.MULTILINE)
_NAME = re.compile(r"(\w+)(?:\s+as\s+\w+)?")


def _imports(path: Path) -> set[str]:
    """keysieve modules named by import statements of a file (also those of names, which may be modules)."""
    text = path.read_text(encoding="utf-8")
    found = set(_PLAIN.findall(text))
    for module, inside, after in _FROM.findall(text):
        if module.startswith("."):
            raise ValueError(f"{path}: relative import; kernels import by full name so that their sources are found")
        names = re.sub(r"#[^\n]*", "", inside or after)
        found.add(module)
        found.update(f"{module}.{name}" for name in _NAME.findall(names))
    return found


def sources(module: str) -> dict[str, Path]:
    """Every keysieve module that `module` reaches by imports, itself included, with its file; sorted by name.

    Packages' `__init__` files count only where they are imported by name: importing a submodule runs them too, but
    they hold no device code.
    """
    seen: dict[str, Path] = {}
    queue = [module, *_ALWAYS]
    while queue:
        name = queue.pop()
        if name in seen:
            continue
        path = _path(name)
        if path is None:
            continue
        seen[name] = path
        queue.extend(_imports(path))
    if module not in seen:
        raise ValueError(f"no source file for kernel module {module!r}")
    return dict(sorted(seen.items()))


@functools.cache
def fingerprint(module: str) -> str:
    """SHA-256 (hex) over the names and contents of `sources(module)`. Cached: sources do not change under a process."""
    digest = hashlib.sha256()
    for name, path in sources(module).items():
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
