# SPDX-License-Identifier: Apache-2.0
"""A way to compute a case, and the check that it must pass before it is timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from .cases import Answer, Case, right_answer

Call = Callable[[], object]


class SkippedError(Exception):
    """Why a method cannot be measured here."""


class WrongError(Exception):
    """How a method's result differs from float64."""


@dataclass(frozen=True)
class Method:
    """prepare makes a call for a case, outside of what is timed, or raises :class:`SkippedError`.

    tolerance: of a group's sum, relative to the sum of its absolute values; None: a floor, whose result is not looked
        at. required: a wrong result is an error, not a reason to leave the method out.
    """

    name: str
    prepare: Callable[[Case], Call]
    tolerance: float | None = 5e-5
    required: bool = False


@dataclass(frozen=True)
class Checked:
    """calls: what may be timed. errors: their largest relative error. skipped: what may not, and why."""

    calls: dict[str, Call] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


def error_of(result: object, answer: Answer) -> float:
    """The largest error of a sum, relative to its group's absolute values. Raises WrongError where counts differ."""
    sums, counts = (part.double().cpu().numpy() for part in result)
    if counts.shape != answer.counts.shape or sums.shape != answer.sums.shape:
        raise WrongError(f"wrong: shapes are {sums.shape} and {counts.shape}")
    if not np.array_equal(counts, answer.counts):
        group = int(np.flatnonzero(counts != answer.counts)[0])
        raise WrongError(f"wrong: counts {counts[group]:.0f} tokens in a group of {answer.counts[group]}")
    return float((np.abs(sums - answer.sums) / np.maximum(answer.magnitudes, 1e-30)).max(initial=0.0))


def checked_calls(case: Case, methods: list[Method], without: tuple[str, ...] = ()) -> Checked:
    """Calls that gave the right answer once. Raises WrongError where a required method did not."""
    answer = right_answer(case)
    checked = Checked()
    for method in methods:
        if method.name in without:
            checked.skipped[method.name] = "not asked for"
            continue
        try:
            call = method.prepare(case)
            if method.tolerance is not None:
                error = error_of(call(), answer)
                if not error <= method.tolerance:
                    raise WrongError(f"wrong: off by {error:.1e}")
                checked.errors[method.name] = error
            checked.calls[method.name] = call
        except SkippedError as reason:
            checked.skipped[method.name] = str(reason)
        except (NotImplementedError, MemoryError, torch.OutOfMemoryError) as error:
            if method.required:
                raise
            checked.skipped[method.name] = (str(error) or type(error).__name__).splitlines()[0]
        except WrongError as error:
            if method.required:
                raise WrongError(f"{method.name} on {case.name}: {error}") from None
            checked.skipped[method.name] = str(error)
    return checked
