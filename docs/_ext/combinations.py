"""``{combinations}``: the table of what cannot be combined, as the package has it."""

import re

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from stablenorm.functional.checks import REFUSED


class Combinations(SphinxDirective):
    """A row for each entry of the package's table."""

    def run(self):
        """Parse the table as the page's own Markdown."""
        lines = ["| what | with | why not | instead |", "|---|---|---|---|"]
        for features, other, reason, cure in REFUSED:
            names = ", ".join(f"`{name}`" for name in features)
            row = f"| {names} | {other} | {reason} | {cure} |"
            # Keywords become code: quotes of prose would be no Python.
            lines.append(re.sub(r'(?<!`)\b\w+="\w+"(?!`)', r"`\g<0>`", row))
        container = nodes.container()
        self.state.nested_parse(lines, self.content_offset, container)
        return container.children


def setup(app):
    """Register the directive."""
    app.add_directive("combinations", Combinations)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
