"""
Blocks of rows from files into a file: read on one thread, written on another, computed in between.

What is written lies beside its place under a new name, and gets its own when it is whole and on the disk.
The memory that this takes does not depend on the size of the files.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

# Blocks on their way at once: one is read, one computed, one written, and one lies between them.
DEPTH = 4


def stream(
    blocks: Iterable[slice],
    buffers: Sequence[Any],
    read: Callable[[slice, Any], None],
    compute: Callable[[slice, Any], Any],
    write: Callable[[slice, Any], None],
) -> Generator[tuple[slice, Any]]:
    """
    Yield each block, and what `compute` made of it, once it is written: in the order of the blocks.

    Each of the three is called with a block and one of `buffers`, which are used again and again.
    `read` and `write` run on a thread each, `compute` on the calling one, whose call may use more.
    """
    waiting, free = iter(blocks), deque(buffers)
    reads: deque[tuple[slice, Any, Future[None]]] = deque()
    writes: deque[tuple[slice, Any, Any, Future[None]]] = deque()
    with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(1) as writer:
        while True:
            while free and (block := next(waiting, None)) is not None:
                buffer = free.popleft()
                reads.append((block, buffer, reader.submit(read, block, buffer)))
            if reads:
                block, buffer, begun = reads.popleft()
                begun.result()
                made = compute(block, buffer)
                writes.append((block, buffer, made, writer.submit(write, block, buffer)))
            elif not writes:
                return
            while writes and (writes[0][-1].done() or not reads):
                block, buffer, made, begun = writes.popleft()
                begun.result()
                free.append(buffer)
                yield block, made
                if not reads:
                    break


@contextlib.contextmanager
def whole_file(path: Path, nbytes: int = 0) -> Iterator[Any]:
    """
    Give a new file that takes the name `path` at the end, on the disk: killed before, nothing has changed.

    After an error it is removed. Where so many bytes do not fit on the disk, that is known at once.
    """
    # A name that nobody has: what a link of this name leads to is never written.
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    with os.fdopen(os.open(beside, flags, 0o666), "wb") as file:
        try:
            if nbytes and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, nbytes)
            yield file
            file.flush()
            os.fsync(file.fileno())
            beside.replace(path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    # Not on Windows, which opens no folders.
    with contextlib.suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def same_file(one: Path, other: Path) -> bool:
    """Tell whether two names, whichever they are, lead to one file that is there."""
    try:
        return os.path.samestat(one.stat(), other.stat())
    except OSError:
        return False
