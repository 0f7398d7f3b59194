"""Sphinx configuration: `make docs` builds the site into build/site, without a network."""

import keysieve

project = "keysieve"
author = "The keysieve authors"
project_copyright = "The keysieve authors, Apache-2.0"
version = release = keysieve.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

autodoc_typehints = "none"  # docstrings give shapes and dtypes; the signature has the types
autodoc_member_order = "bysource"
napoleon_google_docstring = True

html_theme = "alabaster"
html_title = "keysieve"
html_theme_options = {
    "description": "Exact, deterministic top-k key selection for the lightning indexer",
    "page_width": "1100px",
    "sidebar_width": "260px",
    "fixed_sidebar": True,
}
html_show_sourcelink = False
html_copy_source = False
