"""The documentation builds without warnings and without a network, and what is generated in it is current."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from keysieve.kernels import flags

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=ROOT)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="the site needs sphinx (extra: docs)")
    done = run(sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-E", "-b", "html", "docs", str(tmp_path))
    assert done.returncode == 0, done.stderr
    pages = {path.stem for path in tmp_path.glob("*.html")}
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} <= pages
    api = (tmp_path / "api.html").read_text()
    for name in ("DecodeIndexer", "score", "topk", "IndexCache", "local_topk", "merge", "Exchange", "Gather"):
        assert f"{name}" in api
    assert not re.findall(r"(?:src|href)=\"https?://[^\"]*\.(?:js|css)", api), "the site must not load from elsewhere"


def test_the_error_table_is_current() -> None:
    assert run(sys.executable, "tools/error_table.py", "--check").returncode == 0, "run tools/error_table.py"


def test_no_refusal_goes_past_the_table() -> None:
    """Whatever raises a refusal makes its text by `refuse` or `message`, from which the table is made."""
    past = []
    gates = ("bench/local_topk.py", "bench/select.py")  # they say that a result was wrong, which nobody can remedy
    for path in sorted((ROOT / "keysieve").rglob("*.py")):
        if path.as_posix().endswith(gates):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            call = node.exc if isinstance(node, ast.Raise) else None
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("KeysieveError", "UnsupportedError"):
                constants = [part.value for part in ast.walk(call) if isinstance(part, ast.Constant)]
                if (
                    any(isinstance(value, str) for value in constants)
                    and "message" not in ast.unparse(call)
                    and "join" not in ast.unparse(call)
                ):
                    past.append(f"{path.name}:{node.lineno}")
    assert past == []


def test_every_report_of_a_device_has_its_remedy() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    for text in (*flags.TEXTS.values(), "is beyond the", "is outside the", "index_table column"):
        assert re.search(rf"^\| `[^|]*{re.escape(text)}[^|]* \| \S.* \|$", page, re.MULTILINE), text


def test_an_error_that_is_not_in_the_table_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import error_table

    (tmp_path / "keysieve").mkdir()
    (tmp_path / "keysieve" / "new.py").write_text(
        """
def check(name, value, remedy):
    if value < 0:
        accepted = "0 or more"
        refuse(name, got=value, accepted=accepted, remedy=remedy)
    if value > 9:
        accepted = "9 or less"
        refuse(name, got=value, accepted=accepted, remedy="Subtract.")

def use(value):
    check("depth", value, "Add.")
    refuse("thing", got=1, accepted=f"{2} of {value}", remedy="Do " + "it.")
"""
    )
    monkeypatch.setattr(error_table, "ROOT", tmp_path)
    rows = error_table.table().splitlines()[2:]
    assert rows == [
        "| `depth` | 0 or more | Add. |",
        "| `depth` | 9 or less | Subtract. |",
        "| `thing` | 2 of &lt;value&gt; | Do it. |",
    ]
    assert error_table.main(["--check"]) == 1


def test_layout_pictures_are_current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import layout_pictures

    monkeypatch.setattr(layout_pictures, "FIGURES", tmp_path)
    for draw in (layout_pictures.page, layout_pictures.rows, layout_pictures.logits):
        draw()
    drawn = sorted(tmp_path.glob("*.svg"))
    assert len(drawn) == 3
    for path in drawn:
        assert path.read_text() == (ROOT / "docs" / "figures" / path.name).read_text()


def test_the_snippet_that_swaps_imports_runs() -> None:
    snippet, *_ = re.findall(r"```python\n(import torch.*?)```", (ROOT / "docs" / "compat.md").read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(snippet, "compat.md", "exec"), names)
    slots = names["slots"]
    assert slots.shape == (1, 64)  # type: ignore[attr-defined]  # a tensor
    assert (slots >= 0).all()  # type: ignore[operator,attr-defined]
