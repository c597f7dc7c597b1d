# SPDX-License-Identifier: Apache-2.0
"""The documentation: links lead somewhere, every message that troubleshooting explains is one that the sources give."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text()
MESSAGES = [
    message
    for heading in re.findall(r"^### (`.*)$", TROUBLESHOOTING, re.MULTILINE)
    for message in re.findall(r"`([^`]+)`", heading)
]
OF_TORCH = {
    "got mixed torch.Tensor and DTensor",
    "does not have a sharding strategy registered",
    "modified by an inplace operation",
}


@pytest.fixture(scope="module")
def sources() -> str:
    """What can print a message, with the pieces of split string literals put together."""
    files = [ROOT / "setup.py", ROOT / "CMakeLists.txt", *(ROOT / "cmake").iterdir()]
    files += [*(ROOT / "csrc").rglob("*.cpp"), *(ROOT / "python" / "segscatter").rglob("*.py")]
    text = "\n".join(path.read_text() for path in files)
    text = text.replace("${SEGSCATTER_TORCH_MINIMUM}", "2.8")
    return re.sub(r'"\s*f?"', "", text)


@pytest.mark.parametrize("message", sorted(set(MESSAGES) - OF_TORCH))
def test_explained_messages_exist(message: str, sources: str) -> None:
    assert message in sources


def test_torch_messages_are_explained() -> None:
    assert set(MESSAGES) >= OF_TORCH
    assert len(MESSAGES) > 20


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md", ROOT / "CHANGELOG.md"], ids=lambda page: page.stem)
def test_links(page: Path) -> None:
    for link in re.findall(r"\]\((?!http|#)([^)#]+)", page.read_text()):
        assert (page.parent / link).exists(), link


def test_every_page_is_in_the_index() -> None:
    listed = set(re.findall(r"^([\w-]+)$", (ROOT / "docs" / "index.md").read_text(), re.MULTILINE))
    assert listed == {page.stem for page in PAGES} - {"index"}
