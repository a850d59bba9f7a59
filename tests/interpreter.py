"""A fresh interpreter, with warnings as errors."""

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
        env={**os.environ, **{name: str(value) for name, value in environment.items()}},
    )


def python(code, *, timeout=120, **environment):
    """Run `code`, which must end well and without a word of complaint; return what it printed."""
    result = run_python(code, timeout=timeout, **environment)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout
