"""The directive `public-names`: a table of the names at the top level of the package, a line each."""

import inspect

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList

import stablenorm


class _PublicNames(Directive):
    def run(self):
        lines = [".. list-table::", ""]
        for name in stablenorm.__all__:
            summary = inspect.getdoc(getattr(stablenorm, name)).partition("\n\n")[0]
            lines += [f"   * - :py:obj:`stablenorm.{name}`", f"     - {' '.join(summary.split())}"]
        node = nodes.Element()
        self.state.nested_parse(StringList(lines, source="public-names"), 0, node)
        return node.children


def setup(app):
    """Register the directive."""
    app.add_directive("public-names", _PublicNames)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
