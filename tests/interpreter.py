"""A fresh interpreter that finds the same modules, with warnings as errors."""

import os
import subprocess
import sys


def run_python(code, *, timeout=60, flags=(), **environment):
    """Run `code`; return what has become of it."""
    return subprocess.run(
        [sys.executable, "-W", "error", *flags, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
    )


def python(code, *, timeout=120, **environment):
    """Run `code`, which must end well and without a word of complaint; return what it printed."""
    result = run_python(code, timeout=timeout, **environment)
    # Said here: of this module, pytest shows no values.
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    return result.stdout
