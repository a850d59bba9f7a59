"""
The way of results to memory: straight, or through a stage.

Results that are too many for the caches, or that overwrite an input, are first written to a stage of
4 KiB in the first-level cache, and copied from there in whole cache lines.
"""

from __future__ import annotations

from stablenorm.cpu.memory import LINE, copy_bytes, copy_line, fence, inner, pasted, stream_line

# Columns of a row that are staged at a time.
PIECE = 256

# Bytes of the stage: a piece of float64, and a line before and after.
STAGE = 8 * PIECE + 2 * LINE

# Straight; through the stage; through it and past the caches, by non-temporal stores.
STRAIGHT, STAGED, STREAMED = range(3)


@pasted
def way_of(out, source, past_caches):
    """Return the way of results to the address `out` from the input at `source`."""
    if out == source:
        return STAGED
    return STREAMED if past_caches else STRAIGHT


@pasted
def open_stage(out):
    """
    Return the state of a stage for results that begin at the address `out`.

    That is the address of a line, the bytes in the stage that go there, and how many of the first
    line's bytes are not ours.
    """
    before = out % LINE
    return out - before, before, before


@inner
def empty_stage(state, added, stage, way):
    """Copy the whole lines of the stage, so many bytes more, and move the rest of a line to its front."""
    line, filled, before = state
    filled += added
    whole = filled - filled % LINE
    if whole == 0:
        return line, filled, before
    begin = 0
    if before > 0:
        copy_bytes(line + before, stage + before, LINE - before)
        begin = LINE
    if way == STREAMED:
        for at in range(begin, whole, LINE):
            stream_line(line + at, stage + at)
    else:
        for at in range(begin, whole, LINE):
            copy_line(line + at, stage + at)
    copy_line(stage, stage + whole)
    return line + whole, filled - whole, 0


@pasted
def close_stage(state, stage):
    """Copy what is left, and order everything stored before what follows."""
    line, filled, before = state
    copy_bytes(line + before, stage + before, filled - before)
    fence()
