"""What the documentation shows runs, and what it links to exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from keysieve.doctor import UNTRIED

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
RUNNABLE = [ROOT / "README.md", ROOT / "docs" / "engine.md", ROOT / "docs" / "compat.md"]


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda p: p.name)
def test_examples_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, page.name, "exec"), {})
    if page.name == "README.md":
        assert "2048" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_page_can_be_reached() -> None:
    """From README over links alone, and the site's tables of contents."""
    seen: set[Path] = set()
    open_pages = [ROOT / "README.md"]
    while open_pages:
        page = open_pages.pop()
        if page in seen or not page.exists():
            continue
        seen.add(page)
        links = re.findall(r"\]\(([^)#]+\.md)(?:#[^)]*)?\)", page.read_text())
        for block in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(), re.DOTALL):
            links += [f"{line}.md" for line in block.split() if not line.startswith(":")]
        open_pages += [(page.parent / target).resolve() for target in links if "://" not in target]
    assert not {p.relative_to(ROOT) for p in PAGES} - {p.relative_to(ROOT) for p in seen}


def test_every_picture_is_shown_on_a_page_of_the_site() -> None:
    shown = {
        (page.parent / target).resolve()
        for page in PAGES
        if page.name != "README.md" or page.parent != ROOT
        for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text())
    }
    assert set((ROOT / "docs" / "figures").glob("*.svg")) <= shown


def test_what_has_not_been_run_is_called_so_everywhere() -> None:
    """README's row of the backend, the head of its page, and what `doctor` prints say the same words."""
    assert UNTRIED == "compiled and inspected, not run"
    (row,) = (line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| `sm100`"))
    assert UNTRIED in row
    assert UNTRIED in (ROOT / "docs" / "blackwell.md").read_text().splitlines()[0]
