"""A fresh interpreter that finds the same modules, with warnings as errors."""

import os
import subprocess
import sys


def run_python(code, *, timeout=60, flags=(), **environment):
    """Run `code`; return the completed process."""
    return subprocess.run(
        [sys.executable, "-W", "error", *flags, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
    )


def python(code, *, timeout=120, **environment):
    """Run `code`, which must succeed and write nothing to stderr; return its output."""
    result = run_python(code, timeout=timeout, **environment)
    # The message is explicit: pytest shows no values of asserts in this module.
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    return result.stdout
