"""The help of the command line, each command under a heading of its own, as the command says it."""

import os
import re
import subprocess
import sys
import textwrap

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

# Columns of what is printed: as many as a page shows. It scrolls sideways beyond them on a phone.
_COLUMNS = 80


def _help(*command):
    # NO_COLOR: Python 3.14 colours the help.
    environment = {**os.environ, "COLUMNS": str(_COLUMNS), "NO_COLOR": "1"}
    arguments = [sys.executable, "-m", "stablenorm", *command, "--help"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, env=environment)
    # A terminal breaks a paragraph where it ends; a page would scroll to the end of it.
    return "\n".join(
        line if line.startswith(" ") else textwrap.fill(line, _COLUMNS)
        for line in done.stdout.splitlines()
    )


def _section(title, text):
    section = nodes.section(ids=[nodes.make_id(f"stablenorm {title}")])
    section += nodes.title(text=f"stablenorm {title}")
    block = nodes.literal_block(text, text)
    block["language"] = "text"
    section += block
    return section


class Commands(SphinxDirective):
    """``{commands}``: all of them, in the order of the help."""

    def run(self):
        """Ask the package that is documented."""
        top = _help()
        names = re.findall(
            r"^    (\w+)(?: |$)", top.partition("positional arguments")[2], re.MULTILINE
        )
        if not names:
            msg = f"the help must list the commands, got\n{top}"
            raise self.error(msg)
        return [_section(name, _help(name)) for name in names]


def setup(app):
    """Register the directive."""
    app.add_directive("commands", Commands)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
