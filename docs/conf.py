"""How the site is built: `make docs`. What it does beyond Sphinx is in `_site/`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_site"))

from colonnade.version import __version__

project = "Colonnade"
author = "The Colonnade developers"
project_copyright = "The Colonnade developers. Apache-2.0"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "colonnade_site",
]
exclude_patterns = ["_site", "_templates"]
templates_path = ["_templates"]
nitpicky = True
# Types of torch, typing and private aliases have no page here.
nitpick_ignore_regex = [(r"py:.*", r".*")]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
# A type of a signature may be public under several names.
suppress_warnings = ["ref.python"]

# A dash of an option and a quote of a snippet stay what one types.
smartquotes = False

# Args, Returns and Raises of docstrings become lists of fields.
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
add_module_names = False
default_role = "literal"

html_theme = "furo"
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "versions.html",
        "sidebar/scroll-end.html",
    ]
}
html_title = f"Colonnade {__version__}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#0b5c6b",
        "color-brand-content": "#0b5c6b",
        "color-brand-visited": "#5a4a7f",
    },
    "dark_css_variables": {
        "color-brand-primary": "#7fd0de",
        "color-brand-content": "#7fd0de",
        "color-brand-visited": "#b9a8e0",
    },
}
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
