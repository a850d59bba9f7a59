"""The door for Dask arrays."""

from typing import Any


def on_dask() -> Any:
    """Return what does calls on Dask arrays; whoever has one has loaded Dask."""
    from stablenorm import dask  # noqa: PLC0415

    return dask
