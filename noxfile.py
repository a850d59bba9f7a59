#!/usr/bin/env python3
# /// script
# dependencies = ["nox>=2025.2"]
# ///
"""The test command on every supported interpreter that is installed."""

import nox

nox.needs_version = ">=2025.2"
nox.options.default_venv_backend = "uv|virtualenv"


@nox.session(python=["3.11", "3.12", "3.13", "3.14"], default=True)
def tests(session: nox.Session) -> None:
    """Run the tests."""
    session.install("-e", ".", *nox.project.dependency_groups(nox.project.load_toml(), "test"))
    session.run("pytest", *session.posargs)


if __name__ == "__main__":
    nox.main()
