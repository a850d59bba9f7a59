"""
Blocks of rows from files into a file: read on one thread, written on another, computed in between.

What is written lies beside its place, in `PATH.part`, until it is whole, and is renamed then. A journal
beside it says how many blocks are finished and what was asked for, so that a later process can go on.
The memory that this takes does not depend on the size of the files.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import itertools
import json
import math
import os
import shutil
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stablenorm.reference.partial import PARTIAL
from stablenorm.types import Array

# A part of an array: its place along each of the axes that are not normalized.
Box = tuple[slice, ...]

# Blocks on their way at once: one is read, one computed, one written, and one lies between them.
DEPTH = 4
# Bytes of an .npy file that are written before the disk is asked to take them.
_FLUSH = 1 << 25


# ---- what a block is ----


def box_lengths(lead: Sequence[int], chunks: Sequence[int], rows: int) -> tuple[int, ...]:
    """Return the lengths of boxes of some `rows` rows or fewer: whole chunks, at least one."""
    lengths = [max(1, min(pair)) for pair in zip(lead, chunks, strict=True)]
    for axis in reversed(range(len(lead))):
        pieces = -(-lead[axis] // lengths[axis])
        fit = max(1, rows // math.prod(lengths))
        if fit < pieces:
            # All of about the same length: no short one is left over.
            lengths[axis] *= -(-pieces // -(-pieces // fit))
            break
        lengths[axis] = max(1, lead[axis])
    return tuple(lengths)


def boxes(lead: Sequence[int], lengths: Sequence[int]) -> Iterator[Box]:
    """Cut axes of these lengths into boxes; the last ones may be shorter."""
    if not lead:
        yield ()
        return
    for start in range(0, lead[0], lengths[0]):
        along = slice(start, min(start + lengths[0], lead[0]))
        for others in boxes(lead[1:], lengths[1:]):
            yield along, *others


def count_rows(box: Box) -> int:
    """Count the rows of a box."""
    return math.prod(along.stop - along.start for along in box)


def runs(lead: Sequence[int], box: Box) -> Iterator[tuple[int, int]]:
    """Yield the first row, and how many there are, of each run of adjacent rows of a box."""
    if not box:
        yield 0, 1
        return
    axis = len(lead) - 1
    while axis > 0 and box[axis] == slice(0, lead[axis]):
        axis -= 1
    below = math.prod(lead[axis + 1 :])
    for index in itertools.product(*(range(each.start, each.stop) for each in box[:axis])):
        start = 0
        for place, length in zip((*index, box[axis].start), lead, strict=False):
            start = start * length + place
        yield start * below, (box[axis].stop - box[axis].start) * below


# ---- the stream ----


def stream(
    blocks: Iterable[Box],
    buffers: Sequence[Any],
    read: Callable[[Box, Any], None],
    compute: Callable[[Box, Any], Any],
    write: Callable[[Box, Any], None],
) -> Generator[tuple[Box, Any]]:
    """
    Yield each block, and what `compute` made of it, once it is written: in the order of the blocks.

    Each of the three is called with a block and one of `buffers`, which are used again and again.
    `read` and `write` run on a thread each, `compute` on the calling one, whose call may use more.
    """
    waiting, free = iter(blocks), deque(buffers)
    reads: deque[tuple[Box, Any, Future[None]]] = deque()
    writes: deque[tuple[Box, Any, Any, Future[None]]] = deque()
    # What is on its way when this ends early is still written; nobody counts it then.
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


# ---- where results go ----


def part_of(path: Path) -> Path:
    """Return where a result lies until it is whole."""
    return path.with_name(f"{path.name}.part")


class Target:
    """
    A result while it is written, by one process at a time: an .npy file, or with `chunks` one of Zarr.

    The .npy file is, byte for byte, what `numpy.save` writes. Of `like` the shape and dtype count.
    """

    def __init__(
        self, path: Path, lead: tuple[int, ...], like: Array, chunks: tuple[int, ...]
    ) -> None:
        self._part, self._lead, self._like, self._chunks = part_of(path), lead, like, chunks
        self._zarr: Any = None
        self._flusher, self._unflushed = ThreadPoolExecutor(1), 0
        self._flushed: Future[Any] = self._flusher.submit(int)
        self._failed: OSError | None = None
        header, descr = io.BytesIO(), np.lib.format.dtype_to_descr(like.dtype)
        described = {"descr": descr, "fortran_order": False, "shape": like.shape}
        np.lib.format.write_array_header_1_0(header, described)
        self._header = header.getvalue()
        self._size = len(self._header) + like.nbytes
        if chunks:
            self._part.mkdir(exist_ok=True)
        mode = os.O_RDONLY if chunks else os.O_RDWR | os.O_CREAT
        self._file = os.open(self._part, mode, 0o666)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another process may have renamed it before it let go. What it made of Zarr stays.
            is_ours = os.path.samestat(os.fstat(self._file), self._part.stat())
            if chunks and path.exists():
                is_ours = False
                self._part.rmdir()
        except OSError:
            is_ours = False
        if not is_ours:
            self.close()
            msg = f"{self._part} must be written by one process at a time, got a second one"
            raise ValueError(msg)

    @property
    def is_begun(self) -> bool:
        """Tell whether results may have been written: nobody has removed or cut what is there."""
        if self._chunks:
            return (self._part / "zarr.json").is_file()
        return os.fstat(self._file).st_size == self._size

    def begin(self, fresh: bool) -> None:
        """Get ready to write; with `fresh`, remove what there is."""
        like, chunks = self._like, self._chunks
        if chunks:
            import zarr  # noqa: PLC0415  # a tenth of a second, for those who have such files

            if fresh:
                for entry in self._part.iterdir():
                    (shutil.rmtree if entry.is_dir() else Path.unlink)(entry)
                zarr.create_array(self._part, shape=like.shape, chunks=chunks, dtype=like.dtype)
            # What a killed process had begun to write, as Zarr calls it.
            for entry in self._part.rglob("*.partial"):
                entry.unlink()
            self._zarr = zarr.open_array(self._part, mode="r+")
            return
        if fresh:
            try:
                os.ftruncate(self._file, 0)
                os.ftruncate(self._file, self._size)
                # What the disk has no room for is known now, and not in an hour.
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(self._file, 0, self._size)
            except OSError as error:
                self.discard()
                raise OSError(error.errno, error.strerror, str(self._part)) from None
            os.pwrite(self._file, self._header, 0)

    def write(self, box: Box, rows: Array) -> None:
        """Write the rows, (rows, n), of a box."""
        if self._zarr is not None:
            lengths = [along.stop - along.start for along in box]
            self._zarr[box] = rows.reshape(*lengths, *self._zarr.shape[len(box) :])
            return
        row_bytes, done = rows.strides[0], 0
        for start, count in runs(self._lead, box):
            left = rows[done : done + count].view(np.uint8).reshape(-1).data
            place, done = len(self._header) + start * row_bytes, done + count
            while left:
                written = os.pwrite(self._file, left, place)
                place, left = place + written, left[written:]
        self._unflushed += rows.nbytes
        if self._unflushed > _FLUSH and self._flushed.done():
            # While other blocks are computed: all of it at the end would take a third of the time.
            self._flushed.result()
            self._unflushed, self._flushed = 0, self._flusher.submit(self._flush)

    def sync(self) -> None:
        """Return when what was written is on the disk."""
        if self._zarr is not None:
            # Each chunk is a file.
            os.sync()
            return
        self._flusher.submit(self._flush).result()

    def _flush(self) -> None:
        # On one thread, and kept: the system says once that an earlier write has failed.
        if self._failed is None:
            try:
                os.fsync(self._file)
            except OSError as error:
                self._failed = error
        if self._failed is not None:
            raise self._failed

    def discard(self) -> None:
        """Remove what was written."""
        self._part.unlink() if self._zarr is None else shutil.rmtree(self._part)

    def close(self) -> None:
        """Let another process write it."""
        self._flusher.shutdown()
        os.close(self._file)


def rename_whole(path: Path) -> None:
    """Give what lies beside `path`, whole and on the disk, its name."""
    part_of(path).replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def write_whole(path: Path, write: Callable[[Any], object]) -> None:
    """Call ``write(file)`` on a new file beside `path`, then give it its name."""
    with part_of(path).open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    rename_whole(path)


# ---- what is finished ----


class Finished(NamedTuple):
    """What of a result is finished: blocks, the rows in them, and their sums, PARTIAL."""

    blocks: int
    rows: int
    sums: dict[str, Array]


NOTHING = Finished(0, 0, {})


class Journal:
    """What of a result is finished, and what it is computed from."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self._part = part_of(path)
        self._path = self._part.with_name(f"{self._part.name}.journal")
        # As it is read back: tuples become lists.
        self._about = json.loads(json.dumps(about))

    def read(self) -> Finished:
        """Return what is finished; ValueError if of another command."""
        if not self._path.exists():
            return NOTHING
        try:
            kept = json.loads(self._path.read_text())
            is_whole = kept.pop("digest") == _digest(kept)
        except (ValueError, KeyError, TypeError, AttributeError):
            is_whole = False
        if not is_whole:
            msg = (
                f"{self._path} must be whole, got a damaged one; leave --resume out to begin again"
            )
            raise ValueError(msg)
        found = kept["about"]
        for name in found | self._about:
            if found.get(name) != self._about.get(name):
                msg = (
                    f"--resume needs the same {name} as the run that was interrupted, got another; "
                    "leave --resume out to begin again"
                )
                raise ValueError(msg)
        blocks, rows, sums = kept["finished"]
        held = {name: np.frombuffer(bytes.fromhex(each), PARTIAL) for name, each in sums.items()}
        return Finished(blocks, rows, held)

    def record(self, finished: Finished) -> None:
        """Write it; what it says is finished has to be on the disk already."""
        sums = {name: each.tobytes().hex() for name, each in finished.sums.items()}
        kept = {"about": self._about, "finished": [*finished[:2], sums]}
        text = json.dumps(kept | {"digest": _digest(kept)})
        write_whole(self._path, lambda file: file.write(text.encode()))

    def remove(self) -> None:
        """Forget it, and what a killed process had begun to write."""
        for path in (self._path, part_of(self._path)):
            path.unlink(missing_ok=True)


def _digest(kept: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(kept).encode()).hexdigest()
