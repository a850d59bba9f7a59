"""
What stands in single backquotes in a docstring: a name, which becomes code.

If it is the name of something in the reference, it also becomes a link; `x` is none, and no
mistake either. See Also and the directives of the pages stay strict. On the pages, names of the top level of the
package become links.
"""

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


def setup(app):
    """Register the role `name`, to be the default one."""
    role = _Name()
    role.refdomain, role.reftype = "py", "obj"
    app.add_role("name", role)
    app.connect("doctree-read", _link_names)
    app.connect("missing-reference", _resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
