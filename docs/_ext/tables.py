"""Short cells of tables stay on one line: "8.0e-8" and "8.39 M" are no places to break."""

from docutils import nodes

# Letters; longer cells are words, which a narrow column has to break.
_SHORT = 12


def _mark(_app, doctree, _docname):
    for entry in doctree.findall(nodes.entry):
        if len(entry.astext()) <= _SHORT:
            entry["classes"].append("short")


def setup(app):
    """Mark the cells of every page."""
    app.connect("doctree-resolved", _mark)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
