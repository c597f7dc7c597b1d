# SPDX-License-Identifier: Apache-2.0
"""What a suite measured, as it is kept in JSON."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path

from .harness import Timing

FLOOR = "floor: "
IN_TURN = "segscatter, shapes in turn"  # a case whose methods are shapes


@dataclass(frozen=True)
class Row:
    """One case.

    ours: the method that the others are compared with. errors: relative to float64. skipped: what, and why. others: the
    share of the machine's processors that other processes had, None where it is not known.
    """

    case: str
    ours: str
    timings: dict[str, Timing]
    coordinates: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    others: float | None = None

    def ratio(self, name: str) -> float:
        return self.timings[name].quiet / self.timings[self.ours].quiet

    @property
    def noise(self) -> float:
        """Median over the methods of p90 / p10."""
        return statistics.median(timing.p90 / timing.p10 for timing in self.timings.values())

    def as_dict(self) -> dict:
        return {
            "case": self.case,
            "ours": self.ours,
            "coordinates": self.coordinates,
            "microseconds": {name: timing.as_dict() for name, timing in self.timings.items()},
            "errors": {name: float(f"{error:.2g}") for name, error in self.errors.items()},
            "skipped": self.skipped,
            "others": self.others,
        }

    @classmethod
    def from_dict(cls, data: dict) -> Row:
        timings = {name: Timing(**timing) for name, timing in data["microseconds"].items()}
        rest = (data[name] for name in ("coordinates", "errors", "skipped", "others"))
        return cls(data["case"], data["ours"], timings, *rest)


@dataclass(frozen=True)
class Results:
    suite: str
    environment: dict[str, object]
    rows: list[Row]

    @property
    def stem(self) -> str:
        env = self.environment
        where = "cuda" if env["device"] == "cuda" else f"cpu-{env['threads']}t"
        return f"{self.suite}-{where}"

    def row(self, case: str) -> Row:
        return next(row for row in self.rows if row.case == case)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        content = {
            "suite": self.suite,
            "environment": self.environment,
            "results": [row.as_dict() for row in self.rows],
        }
        (folder / f"{self.stem}.json").write_text(json.dumps(content, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Results:
        content = json.loads(path.read_text())
        return cls(content["suite"], content["environment"], [Row.from_dict(row) for row in content["results"]])

    def merged_into(self, path: Path, order: list[str]) -> Results:
        """With the rows of the file that were not measured now, if there is such a file, in ``order``.

        Raises ValueError where its environment is another one: each row is compared within itself, but a table should
        not mix machines or builds.
        """
        if not path.exists():
            return self
        before = Results.load(path)
        different = [
            key
            for key in self.environment | before.environment
            if key != "date" and self.environment.get(key) != before.environment.get(key)
        ]
        if different:
            raise ValueError(f"{path.name} was measured with another {different[0]}: choose another --out")
        rows = {row.case: row for row in before.rows} | {row.case: row for row in self.rows}
        ranked = sorted(rows.values(), key=lambda row: order.index(row.case) if row.case in order else len(order))
        return Results(self.suite, self.environment, ranked)
