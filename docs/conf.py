"""
How the documentation is built: ``sphinx-build -W -n --keep-going -b html docs build/docs``.

It needs no network, neither to be built nor to be read: formulas are MathML, fonts are those of
the reader, and nothing is fetched from the documentation of others.
"""

import re
import sys
from pathlib import Path

from docutils import nodes

HERE = Path(__file__).parent
sys.path.append(str(HERE / "_ext"))

project = "stablenorm"
author = "The stablenorm developers"
project_copyright = "the stablenorm developers; BSD-3-Clause"
version = release = "0.1.0"
language = "en"

extensions = [
    "combinations",
    "commands",
    "mathml",
    "myst_parser",
    "names",
    "numpydoc",
    "public_names",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
    "tables",
]
exclude_patterns = ["_build", "_ext", "_static", "figures"]

# Whatever is referred to exists, or the build fails. Exceptions need a reason beside them.
nitpicky = True
nitpick_ignore = [
    # Of Python and NumPy, whose inventories are on the network.
    ("py:obj", "numpy.empty"),
    ("py:class", "tuple"),
]

default_role = "name"
# The docstrings tell the types, in words.
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
numpydoc_show_class_members = False
numpydoc_validation_checks = set()

myst_enable_extensions = ["amsmath", "attrs_inline", "colon_fence", "deflist", "dollarmath"]
# Down to ###: what pages link to.
myst_heading_anchors = 3

# The copy button leaves prompts and output away.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "pydata_sphinx_theme"
html_title = "stablenorm"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["stablenorm.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "logo": {"text": "stablenorm"},
    "navbar_align": "left",
    "navbar_persistent": [],
    "navbar_end": ["search-button", "theme-switcher"],
    "header_links_before_dropdown": 6,
    # The widest tables, of a column for each peer, get the room of the list of headings.
    "secondary_sidebar_items": {
        "**": ["page-toc"],
        "evidence/performance": [],
    },
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-light",
    "pygments_dark_style": "a11y-dark",
}
# The landing page has cards of its own in place of a list of pages.
html_sidebars = {"index": []}


def _trim(_app, document):
    """Take away the empty line that a doctest in Markdown ends with, lest ``` be its output."""
    for block in document.findall(nodes.literal_block):
        # The highlighter looks at blocks whose text is their source, so it is set to that.
        block.rawsource = block.astext().rstrip("\n")
        block.children = [nodes.Text(block.rawsource)]


def _mark_long(_app, document):
    """Mark code with a word that a telephone does not show in one line, in a heading: 28 letters."""
    for code in document.findall(nodes.literal):
        if max(map(len, code.astext().split()), default=0) > 27:
            code["classes"].append("long")


def _skip_field(_app, _what, _name, member, skip, _options):
    """Leave out the fields of a NamedTuple, whose docstring is "Alias for field number 0"."""
    return True if type(member).__name__ == "_tuplegetter" else skip


def _show_default(_app, _what, _name, described, _options, signature, returns):
    """Write the value of a default that has a private name, as `_NAMES`, which tells a reader nothing."""
    module = sys.modules.get(getattr(described, "__module__", ""))

    def value(match):
        return f"={getattr(module, match[1])!r}" if hasattr(module, match[1]) else match[0]

    return (re.sub(r"=(_[A-Z]+)\b", value, signature), returns) if signature else None


def setup(app):
    """Connect what is no extension."""
    app.connect("autodoc-process-signature", _show_default)
    app.connect("autodoc-skip-member", _skip_field)
    app.connect("doctree-read", _trim)
    app.connect("doctree-read", _mark_long)
