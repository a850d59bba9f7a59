"""What replaces `measure_interleaved` where the figures do not matter."""

from stablenorm.timing import Timing


def call_once(calls, *, step=None, **_):
    """Call each once, instead of timing it."""
    for call in calls.values():
        call()
        if step is not None:
            step()
    return {name: Timing(1e-3 * k, 0.9e-3 * k, 2e-3 * k, 5, 1) for k, name in enumerate(calls, 1)}
