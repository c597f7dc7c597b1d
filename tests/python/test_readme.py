# SPDX-License-Identifier: Apache-2.0
"""README.md: its Python runs, and what it links to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_operator_snippet() -> None:
    names: dict = {}
    exec(SNIPPETS[0], names)
    assert names["sums"].tolist() == [6.5, 2.0]
    assert names["counts"].tolist() == [4, 1]


def test_the_tracker_snippet(capsys: pytest.CaptureFixture[str]) -> None:
    exec(SNIPPETS[1], {})
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in printed] == ["code", "math", "None"]
    assert sum(int(line[2]) for line in printed) > 0


def test_every_snippet_is_tested() -> None:
    assert len(SNIPPETS) == 2


@pytest.mark.parametrize("link", re.findall(r"\]\((?!http)([^)]+)\)", README))
def test_links(link: str) -> None:
    assert (ROOT / link).exists()
