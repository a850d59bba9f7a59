"""Broken by the page on checking a kernel: if its kernel does not compile, or its tests miss a mistake in it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "how-to" / "check-a-kernel.md"
# Mistakes in the kernel, and the test that must fail then.
MISTAKES = [
    (None, ""),
    ("dgamma[j] += dy[j] * xhat;|dgamma[j] += dy[j];", "test_gradients"),
    ("of_g += (double)gamma[j] * dy[j] / n;|of_g = 0;", "test_hard_inputs"),
    ("double sum = 0|float sum = 0", "test_hard_inputs"),
]


def blocks(language):
    return re.findall(
        rf"^```{language}\n(.*?)^```", PAGE.read_text("utf8"), re.DOTALL | re.MULTILINE
    )


@pytest.mark.parametrize(("mistake", "test"), MISTAKES)
def test_the_page(mistake, test, tmp_path):
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    source = blocks("c")[0]
    if mistake:
        before, after = mistake.split("|")
        assert before in source
        source = source.replace(before, after)
    (tmp_path / "kernel.c").write_text(source)
    (tmp_path / "test_kernel.py").write_text("\n\n".join(blocks("python")))
    subprocess.run(blocks("sh")[0].split(), cwd=tmp_path, check=True)
    options = "-q -x -p no:cacheprovider -c /dev/null --rootdir . test_kernel.py"
    command = [sys.executable, "-m", "pytest", "-k", test, *options.split()]
    # Plugins would take half of the time.
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        command, check=False, cwd=tmp_path, env=alone, capture_output=True, text=True
    )
    failed = set(re.findall(r"^FAILED test_kernel.py::(\w+)", done.stdout, re.MULTILINE))
    assert failed == ({test} if mistake else set()), done.stdout[-3000:]
    assert done.returncode == bool(mistake), done.stdout[-3000:]
