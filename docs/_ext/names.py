"""
What stands in single backquotes in a docstring: a name, which becomes code.

If it is the name of something in the reference, it also becomes a link; `x` is none, and no
mistake either. See Also and the directives of the pages stay strict. On the pages, names of the top level of the
package become links. In docstrings, which a terminal shows as well, `the page "Title"` becomes a link to the page of that
title, and a power such as 2**-48 a formula.
"""

import re
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.roles import XRefRole
from sphinx.util.nodes import make_refnode

import stablenorm


class _Name(XRefRole):
    def process_link(self, env, refnode, _has_explicit_title, title, target):
        refnode["may_be_none"] = True
        refnode["py:module"] = env.ref_context.get("py:module")
        refnode["py:class"] = env.ref_context.get("py:class")
        return title, target


def _resolve(app, env, node: pending_xref, content: nodes.Node):
    """Link a name to the one object of that name in another module; leave an unknown name as code."""
    if node.get("refdomain") == "py":
        python = env.domains["py"]
        ending = f".{node['reftarget']}"
        matches = [name for name in python.objects if name.endswith(ending)]
        if len(matches) == 1:
            where = python.objects[matches[0]]
            return make_refnode(
                app.builder, node["refdoc"], where.docname, where.node_id, content, matches[0]
            )
    return content if node.get("may_be_none") else None


def _link_names(app, doctree):
    for node in list(doctree.findall(nodes.literal)):
        name = node.astext().removesuffix("()")
        if name in stablenorm.__all__ and not isinstance(
            node.parent, (nodes.title, nodes.reference, pending_xref)
        ):
            link = pending_xref(
                "", node.deepcopy(), refdomain="py", reftype="obj", may_be_none=True
            )
            link["reftarget"], link["refdoc"] = f"stablenorm.{name}", app.env.docname
            node.replace_self(link)


def _link_pages(app, _what, _name, _described, _options, lines):
    text, home = "\n".join(lines), Path(app.srcdir)
    pages = {}
    for path in home.rglob("*.md"):
        if title := re.search(r"^# (.+)", path.read_text("utf-8"), re.MULTILINE):
            pages[title[1]] = f"/{path.relative_to(home).with_suffix('').as_posix()}"

    def link(match):
        title = " ".join(match[2].split())
        # An unknown title is no page, and the build fails.
        return f"{match[1]}:doc:`{title} <{pages.get(title, title)}>`"

    text = re.sub(r'(the page\s+)"([^"]+)"', link, text, flags=re.IGNORECASE)
    # Code keeps its powers, doctests too.
    parts = re.split(
        r"(``.*?``|`[^`]*`|^ *>>>.*$|^ *\.\.\. .*$)", text, flags=re.MULTILINE | re.DOTALL
    )
    power = re.compile(r"(?<![\w`])(\d+)(?:\*\*|\^)(-?\d+)")
    parts[::2] = [power.sub(r":math:`\1^{\2}`", part) for part in parts[::2]]
    lines[:] = "".join(parts).split("\n")


def setup(app):
    """Register the role `name`, to be the default one."""
    role = _Name()
    role.refdomain, role.reftype = "py", "obj"
    app.add_role("name", role)
    app.setup_extension("sphinx.ext.autodoc")
    # Before numpydoc, which rearranges the sections.
    app.connect("autodoc-process-docstring", _link_pages, priority=100)
    app.connect("doctree-read", _link_names)
    app.connect("missing-reference", _resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
