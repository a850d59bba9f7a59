"""Formulas that are planted are read back as the same function, or not at all."""

import numpy as np
import pytest

from stablenorm.check import formula
from stablenorm.check.closed_form import Case, ordinary

# Shapes of the draws that are read, and of one on which the reading is judged.
SHAPES = (4, 5, 8), (4, 5, 8), (5, 6, 11), (3, 7, 6)
FACTORS = (
    lambda *_: 1.0, lambda *_: -1.0, lambda *_: 2.0, lambda *_: -0.5, lambda *_: 0.37,
    lambda n, *_: n, lambda n, *_: -1 / n, lambda n, *_: n / (n - 1), lambda n, rows: -n / rows,
    lambda _, rows: 1 / rows,
)  # fmt: skip


def draws(rng, kind, eps=1e-5):
    for shape in SHAPES:
        one = np.ones(shape[-1])
        yield ordinary(Case(np.ones(shape), one, one, eps, np.ones(shape), kind), rng)


def made(case, terms, change, factors):
    """Return what terms with these factors give on a case."""
    draw = formula._Draw(case, np.ones(case.x.shape))
    return draw.columns(terms, change) @ np.array(factors)


def planted(seed):
    """Draw a formula, and return its name, cases, outputs, what it gives on the last, and the noise."""
    rng = np.random.default_rng(seed)
    name, kind = ("dx", "dx", "dx", "dgamma")[seed % 4], ("layer", "rms")[seed // 4 % 2]
    cases = [*draws(rng, kind)]
    changes = [[*formula._changes(name, formula.Expected(case, 2.0**-53))] for case in cases]
    place = int(rng.integers(len(changes[0]))) * (seed % 3 == 0)
    words = changes[0][place].words
    terms = [*formula._terms(name, cases[0], core=bool(words))]
    count = int(rng.integers(1, 4 if name == "dx" else 2))
    terms = [
        terms[i]._replace(changed=2 * bool(words)) for i in rng.permutation(len(terms))[:count]
    ]
    own = [FACTORS[i] for i in rng.integers(len(FACTORS), size=count)]
    outputs = []
    for case, change in zip(cases, (c[place] for c in changes), strict=True):
        n = case.n
        outputs.append(made(case, terms, change, [f(n, case.x.size // n) for f in own]))
    noise = 2.0**-52
    if seed % 5 == 0:
        outputs, noise = [a.astype(np.float32).astype(float) for a in outputs], 2.0**-24
    return name, cases, outputs, noise, place


def judged(seed):
    """Tell whether a planted formula is read back: True, None if it is not, False if as another."""
    name, cases, outputs, noise, _ = planted(seed)
    shaped = [
        a.reshape(c.x.shape if name == "dx" else -1) for a, c in zip(outputs, cases, strict=True)
    ]
    found = formula.find(name, cases[:3], shaped[:3], noise, SHAPES[3])
    if found is None:
        return None
    factors, change = found
    there = formula._changes(name, formula.Expected(cases[3], 2.0**-53))
    change = next(c for c in there if c[:2] == change[:2])
    again = made(cases[3], [*factors], change, [value for _, value in factors.values()])
    return bool(np.max(np.abs(again - outputs[3])) <= 2**14 * noise * np.max(np.abs(outputs[3])))


@pytest.mark.parametrize("seeds", [range(k, k + 15) for k in range(0, 60, 15)])
def test_a_planted_formula_is_read_back_or_not_at_all(seeds):
    """Of the seeds below 1000, 991 are read back, 9 are not, and none is read as another function."""
    verdicts = [judged(seed) for seed in seeds]
    assert False not in verdicts, verdicts
    assert verdicts.count(True) >= 13, verdicts
