"""The command `stablenorm`, before anything is imported that takes time: Ctrl-C is then one line, too."""

import sys


def main() -> int:
    """Import the command and run it; return its exit status."""
    try:
        from stablenorm.cli import main as run  # noqa: PLC0415

        return run()
    except KeyboardInterrupt:
        print("stablenorm: interrupted", file=sys.stderr)  # noqa: T201
        return 130
