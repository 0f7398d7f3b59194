"""Wheel and sdist are built and installed into a clean environment, where the library and its command work."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import keysieve

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=cwd,
        env=environment,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both, built from the tracked files alone."""
    pytest.importorskip("build", reason="needs build (extra: test)")
    folder = tmp_path_factory.mktemp("release")
    tree = folder / "tree"
    tree.mkdir()
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    if listed.returncode:
        pytest.skip("not a checkout: nothing says which files belong to a release")
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ".", cwd=tree)
    return folder


def test_what_is_inside(distributions: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    (sdist,) = distributions.glob("*.tar.gz")
    assert wheel.name == f"keysieve-{keysieve.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    shipped = {str(path.relative_to(ROOT)) for path in (ROOT / "keysieve").rglob("*.py")}
    assert shipped <= inside
    assert "keysieve/py.typed" in inside
    assert any(name.endswith("licenses/LICENSE") for name in inside)
    assert not [name for name in inside if name.startswith(("tests/", "docs/", "tools/", "build/"))]
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "pyproject.toml", "keysieve/py.typed"} <= names
    assert shipped <= names


@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_installed_into_a_clean_environment(distributions: Path, tmp_path: Path, kind: str) -> None:
    """Both are installed, the sdist by building it there; then the library and its command work.

    torch, numpy and what builds come from this environment by a path file: their download is not what is tested.
    """
    (archive,) = distributions.glob(kind)
    home = tmp_path / "clean"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    (packages,) = (home / "lib").glob("python*/site-packages")
    bare = tmp_path / "bare"
    bare.mkdir()
    here = Path(sysconfig.get_paths()["purelib"])
    for path in here.iterdir():  # everything but keysieve itself and its editable hooks
        if "keysieve" not in path.name.lower() and not path.name.endswith(".pth"):
            (bare / path.name).symlink_to(path)
    (packages / "outside.pth").write_text(f"{bare}\n")
    run(
        python, "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools", cwd=tmp_path
    )  # Python 3.11 brings an old one
    options = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check")
    run(python, "-m", "pip", "install", *options, archive, cwd=tmp_path)
    code = "import keysieve, sys; print(keysieve.__file__); print(keysieve.__version__)"
    where, version = run(python, "-c", code, cwd=tmp_path).split()
    assert Path(where).is_relative_to(home)
    assert version == keysieve.__version__
    assert run(home / "bin" / "keysieve", "--version", cwd=tmp_path).strip().endswith(keysieve.__version__)
    found = run(home / "bin" / "keysieve", "check", "--minutes", "0.02", "--device", "cpu", cwd=tmp_path)
    assert "0 mismatches" in found


def test_citation_and_changelog_are_of_this_version() -> None:
    cited = re.findall(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited == [keysieve.__version__]
    newest = re.search(r"^## (?:Unreleased \()?\[?([0-9][^\s\])]*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None, "CHANGELOG has no section with a version"
    assert newest[1] == keysieve.__version__
