"""A `Diagnosis`, and how it is shown: sentences, text, plain data, a picture."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from stablenorm.diagnosis.methods import METHODS, SPECIAL, PerRow, working_format
from stablenorm.figures import COLORS, new_figure
from stablenorm.formats import format_of, parse
from stablenorm.text import plain, shape_text, to_json, wrapped
from stablenorm.types import Array

# The sentence about a row names these two methods.
_TOLD = {
    "layer": {"a {working} two-pass": "two-pass", "E[x^2] - E[x]^2": "one-pass"},
    "rms": {"mean(x^2) in {working}": "one-pass", "in float16": "float16"},
}

# A row's |mean| / std is mentioned from here on: it costs two bits.
_OFFSET = 4.0


@dataclass(frozen=True)
class Row:
    """
    One row, and what would become of it.

    Attributes
    ----------
    index : int
        Among the rows, counted in C order over the axes that are not normalized.
    mean, std : float
        Of the row; NaN if it is not finite. Of kind "rms": 0, and the root mean square.
    condition_y, condition_dx : float
        How many times larger a relative error of x is in y and in dx.
    lost : dict of str to float
        Bits of y lost by each method, as in `Diagnosis.methods`.
    marks : tuple of str
        What is special about it, as in `Summary.marks`.
    advice : str
        The same in a sentence.
    """

    index: int
    mean: float
    std: float
    condition_y: float
    condition_dx: float
    lost: dict[str, float]
    marks: tuple[str, ...]
    advice: str


class Summary(NamedTuple):
    """
    All rows together.

    Attributes
    ----------
    rows : int
        How many.
    marks : dict of str to int
        For each thing that can be special about a row, how many are.
    lost : dict of str to array
        For each method, how many rows lose 0, 1, ..., p bits, rounded.
    condition_y, condition_dx : array
        How many rows have a condition number in [2^k, 2^(k+1)); below 1 counts as k = 0.
        Constant rows are not counted: theirs is infinite for y.
    largest_condition_y, largest_condition_dx : float
        Of all rows that have a finite one.
    """

    rows: int
    marks: dict[str, int]
    lost: dict[str, Array]
    condition_y: Array
    condition_dx: Array
    largest_condition_y: float
    largest_condition_dx: float


@dataclass(frozen=True)
class Diagnosis:
    """
    What a norm would lose on given data; made by `stablenorm.diagnose`.

    Attributes
    ----------
    shape : tuple of int
        Of the data.
    dtype : str
        The dtype that it was judged as.
    axis : tuple of int
        The axes normalized together.
    n : int
        Elements of a row.
    eps : float
        Added to the variance.
    summary : Summary
        All rows together.
    worst : tuple of Row
        The rows that a two-pass loses most on, the worst first; before them those that have no
        layer norm: not finite, or constant with eps 0.
    per_row : PerRow or None
        Numbers of every row; None for a file, whose rows may be too many.
    kind : str
        "layer" or "rms".
    """

    shape: tuple[int, ...]
    dtype: str
    axis: tuple[int, ...]
    n: int
    eps: float
    summary: Summary
    worst: tuple[Row, ...]
    per_row: PerRow | None = None
    kind: str = "layer"

    @property
    def bits(self) -> int:
        """The precision p of the dtype: what can be lost."""
        return format_of(parse(self.dtype)).digits

    @property
    def methods(self) -> dict[str, str]:
        """What each method is, by its name."""
        working = working_format(parse(self.dtype)).dtype.name
        return {name: title.format(working=working) for name, title in METHODS[self.kind].items()}

    def as_dict(self) -> dict[str, Any]:
        """
        Return everything but `per_row` as plain dicts, lists, str, int, float and None.

        Returns
        -------
        dict
            The attributes by name, with `bits` and `methods`. What JSON has no number for is a
            string, "nan", "inf" or "-inf".
        """
        names = "shape", "dtype", "axis", "n", "eps", "kind", "bits", "methods", "summary", "worst"
        result: dict[str, Any] = plain({name: getattr(self, name) for name in names})
        return result

    def to_json(self, path: Any = None) -> str:
        """Return `as_dict` as JSON text, and write it to the file `path` if one is named."""
        return to_json(self.as_dict(), path)

    def plot(self, path: Any, *, format: str | None = None) -> None:
        """
        Draw how many rows lose how many bits.

        `path` is a file or its name; `format` "png", "svg" or "pdf", by default the name's ending.
        It needs Matplotlib.
        """
        figure = new_figure(10, 4)
        figure.suptitle(_headline(self), fontsize=12, fontweight="bold", parse_math=False)
        axes = figure.subplots()
        # Besides colors, the lines differ by dashes and widths: one beneath another is seen.
        looks = zip(COLORS, ("-", "--", "-.", ":", (0, (6, 2, 1, 2, 1, 2))), strict=False)
        lost = zip(self.methods.values(), self.summary.lost.values(), looks, strict=True)
        for place, (title, counts, (color, dash)) in enumerate(lost):
            at_least = np.cumsum(counts[::-1])[::-1] / max(int(counts.sum()), 1)
            axes.plot(at_least, label=title, color=color, ls=dash, lw=3.4 - 0.4 * place)
        axes.set(xlim=(0, self.bits), ylim=(0, 1.02), xlabel=f"bits of y lost, of {self.bits}")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.25)
        axes.set_title("Share of rows that lose at least so many", fontsize=10, loc="left")
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
        figure.savefig(path, format=format, dpi=150)

    def __str__(self) -> str:
        """Give the summary, the methods, and the worst rows."""
        return "\n".join(lines_of(self, 100))


# ---- one row ----


def describe_row(index: int, x: Array, found: PerRow, place: int, kind: str) -> Row:
    """Return what is known of row `index`, with elements `x`, which `found` has at `place`."""
    mean, std, of_y, of_dx = (float(each[place]) for each in found[:4])
    meanings, is_layer = SPECIAL[kind], kind == "layer"
    lost = dict(zip(METHODS[kind], map(float, found.lost[:, place]), strict=True))
    marks = tuple(name for name, has in zip(meanings, found.marks[:, place], strict=True) if has)
    if "not finite" in marks:
        places = np.flatnonzero(~np.isfinite(x))
        said = [f"not finite: {places.size} of {x.size} elements, the first at {places[0]}"]
    else:
        working = working_format(x.dtype).dtype.name
        # An undefined row is constant as well, but its y is not beta.
        told = ("undefined",) if "undefined" in marks else marks
        said = [f"{mark} ({meanings[mark].format(working=working)})" for mark in told]
        if not said or abs(mean) >= _OFFSET * std > 0:
            size = f"|mean|/std = {abs(mean) / std:.2g}" if is_layer else f"rms = {std:.2g}"
            said.insert(0, size)
        if "undefined" not in marks:
            # The other methods are near one of these, or keep less.
            (one, first), (two, second) = _TOLD[kind].items()
            one, bits = one.format(working=working), format_of(x.dtype).digits
            said.append(
                f"{one} loses {round(lost[first])} of {bits} bits of y, {two} {round(lost[second])}"
            )
    advice = f"row {index}: {'; '.join(said)}"
    return Row(index, mean, std, of_y, of_dx, lost, marks, advice)


# ---- all rows: text and tables ----


def _headline(diagnosis: Diagnosis) -> str:
    count, kind = diagnosis.summary.rows, ", RMS norm" * (diagnosis.kind == "rms")
    data = f"{shape_text(diagnosis.shape)} as {diagnosis.dtype}"
    return f"{data}: {count} row{'s' * (count != 1)} of {diagnosis.n}, eps {diagnosis.eps:g}{kind}"


def sentences(diagnosis: Diagnosis) -> list[str]:
    """Return one sentence for each thing worth knowing about all rows together."""
    summary = diagnosis.summary
    if not summary.rows:
        return ["no rows: nothing to say"]
    said = []
    if summary.condition_y.any():
        y, dx = summary.largest_condition_y, summary.largest_condition_dx
        # The median is known to a power of two.
        of_y = min(2.0 ** (_median(summary.condition_y) + 1), y)
        of_dx = min(2.0 ** (_median(summary.condition_dx) + 1), dx)
        said.append(
            f"condition number of y: at most {of_y:.2g} in the median row, {y:.2g} in the worst; "
            f"of dx: {of_dx:.2g}, {dx:.2g}"
        )
    working = working_format(parse(diagnosis.dtype)).dtype.name
    for name, meaning in SPECIAL[diagnosis.kind].items():
        if count := summary.marks[name]:
            rows = f"{count} row" + "s" * (count != 1)
            said.append(f"{name}: {rows} ({meaning.format(working=working)})")
    return said


def _median(counts: Array) -> int:
    """Return the middle of what was counted by whole numbers."""
    return int(np.searchsorted(np.cumsum(counts), (counts.sum() + 1) // 2))


def method_rows(diagnosis: Diagnosis) -> list[tuple[str, str, str, str]]:
    """Return, for each method, its title, the median and the worst loss, and rows losing 4 bits."""
    summary, rows = diagnosis.summary, []
    for name, title in diagnosis.methods.items():
        counts = summary.lost[name]
        if not counts.any():
            rows.append((title, "-", "-", "-"))
            continue
        several = f"{counts[4:].sum() / counts.sum():.1%}"
        rows.append((title, str(_median(counts)), str(np.flatnonzero(counts)[-1]), several))
    return rows


def lines_of(diagnosis: Diagnosis, width: int) -> list[str]:
    """Return the diagnosis in lines of at most `width` columns."""
    lines = [_headline(diagnosis), *(f"  {sentence}" for sentence in sentences(diagnosis))]
    if diagnosis.summary.rows:
        lines.append(f"  bits of y lost, of {diagnosis.bits}: median row, worst row, rows losing 4")
        rows = method_rows(diagnosis)
        longest = max(len(title) for title, *_ in rows)
        for title, median, worst, several in rows:
            lines.append(f"    {title:{longest}} {median:>4} {worst:>4} {several:>9}")
        lines += ["  worst rows:", *(f"    {row.advice}" for row in diagnosis.worst)]
    return [part for line in lines for part in wrapped(line, width)]
