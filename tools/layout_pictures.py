"""Draws docs/figures/layout-*.svg: a cache page, a position's way to its row, and the logits between score and select.

python tools/layout_pictures.py
"""

from __future__ import annotations

from html import escape
from pathlib import Path

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures"
COLOURS = {"keys": "#cfe2f3", "scales": "#fce5cd", "block": "#d9ead3", "mark": "#f4cccc", "none": "#ffffff"}


class Picture:
    """Boxes, texts and arrows on a white ground."""

    def __init__(self, width: int, height: int) -> None:
        self.size = width, height
        self.items: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, kind: str, text: str = "") -> None:
        self.items.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" fill="{COLOURS[kind]}" stroke="#555"/>')
        if text:
            self.text(x + w / 2, y + h / 2 + 4, text, "middle")

    def text(self, x: float, y: float, text: str, anchor: str = "start", size: int = 12) -> None:
        self.items.append(
            f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" font-family="sans-serif">'
            f"{escape(text)}</text>"
        )

    def arrow(self, x0: float, y0: float, x1: float, y1: float) -> None:
        self.items.append(f'<line x1="{x0}" y1="{y0}" x2="{x1}" y2="{y1}" stroke="#333" marker-end="url(#tip)"/>')

    def write(self, name: str) -> None:
        width, height = self.size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
            '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="3" orient="auto">'
            '<path d="M0,0 L7,3 L0,6 z" fill="#333"/></marker></defs>'
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
        )
        FIGURES.mkdir(parents=True, exist_ok=True)
        (FIGURES / f"{name}.svg").write_text(head + "\n".join(self.items) + "</svg>\n")


def page() -> None:
    """FP8 and MXFP4 pages, byte offsets above."""
    p = Picture(860, 250)
    for row, (name, key, scales) in enumerate((("FP8: 64 x 132 bytes", 128, 8192), ("MXFP4: 64 x 68 bytes", 64, 4096))):
        top = 30 + 110 * row
        p.text(10, top - 8, name, size=13)
        for token, label in enumerate(("token 0", "token 1", "…", "token 63")):
            p.box(10 + 130 * token, top, 130, 40, "keys", label)
            if label != "…":
                at = {"token 0": 0, "token 1": key, "token 63": 63 * key}[label]
                p.text(10 + 130 * token, top + 56, str(at), size=11)
        for token, label in enumerate(("s 0", "s 1", "…", "s 63")):
            p.box(530 + 60 * token, top, 60, 40, "scales", label)
        p.text(530, top + 56, str(scales), size=11)
        p.text(770, top + 56, str(scales + 256), "end", size=11)
    p.text(10, 236, "s t: the scale word of token t, 4 bytes. The next page begins at any later multiple of 16 bytes.")
    p.write("layout-page")


def rows() -> None:
    """Position 150 with blocks of 64 tokens that span 64 rows."""
    p = Picture(860, 200)
    p.text(10, 20, "positions of a request, kv_page = 64")
    for block in range(4):
        p.box(10 + 120 * block, 30, 120, 30, "block", f"{64 * block} … {64 * block + 63}")
    p.box(10 + 120 * 2 + 40, 30, 8, 30, "mark")
    p.text(300, 80, "position 150 = block 2, token 22", "middle")
    p.text(10, 120, "kv_table[request]")
    for block, page in enumerate((7, 3, 11, 5)):
        p.box(130 + 60 * block, 103, 60, 26, "none", str(page))
    p.arrow(298, 86, 280, 101)
    p.arrow(292, 131, 330, 160)
    p.text(340, 170, "physical row = 11 * block_rows + 22")
    p.write("layout-rows")


def logits() -> None:
    """Two requests of next_n = 2 in the compact layout."""
    p = Picture(860, 190)
    p.text(10, 20, "logits, BF16: request 0 has 2 tiles of 128 keys, request 1 has 3; next_n = 2")
    x = 10
    for request, tiles in ((0, 2), (1, 3)):
        for row in range(2):
            p.box(x, 30, 80 * tiles, 34, "keys", f"r{request}, row {row}")
            x += 80 * tiles
    p.text(10, 100, "largest key16 of every 8 keys")
    x = 10
    for _, tiles in ((0, 2), (1, 3)):
        for _row in range(2):
            p.box(x, 108, 10 * tiles, 24, "scales")
            x += 10 * tiles
    p.text(10, 160, "starts = [0, 2, 5]: row j of request r begins at element 128 (next_n starts[r] + j tiles[r])")
    p.write("layout-logits")


if __name__ == "__main__":
    page()
    rows()
    logits()
