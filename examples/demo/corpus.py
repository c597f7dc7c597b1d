# SPDX-License-Identifier: Apache-2.0
"""Training text that any machine with Python and torch has on its disk: four channels, no network."""

from __future__ import annotations

import fnmatch
import os
import random
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

MAX_CHANNEL_BYTES = 2 << 20  # enough that a default run sees hardly a document twice
MIN_CHANNEL_BYTES = 16 << 10
MAX_FILE_BYTES = 64 << 10  # so that one huge file does not become the channel
MIN_DOCUMENT_BYTES = 128
MAX_DOCUMENT_BYTES = 1024


@dataclass(frozen=True)
class Source:
    """Where the files of one channel are: below ``roots``, with a name that matches one of ``patterns``.

    Folders named in ``skip`` are not entered.
    """

    channel: str
    roots: tuple[Path, ...]
    patterns: tuple[str, ...]
    skip: frozenset[str] = frozenset()


def installed_sources() -> list[Source]:
    """The channels of the demo, as found in the running Python."""
    standard_library = Path(sysconfig.get_path("stdlib"))
    headers = Path(torch.__file__).parent / "include"
    packages = tuple(Path(p) for p in sys.path if Path(p).name in ("site-packages", "dist-packages"))
    not_library = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
    prose = ("LICENSE*", "LICENCE*", "COPYING*", "NOTICE*", "METADATA", "README*", "*.rst", "*.md")
    return [
        Source("python", (standard_library,), ("*.py",), not_library),
        Source("cpp", (headers,), ("*.h", "*.hpp")),
        Source("prose", packages, prose),
        Source("data", packages, ("*.json", "*.csv")),
    ]


def find_files(source: Source) -> list[Path]:
    """All files of a source, in an order that depends on their paths only."""
    found = set()
    for root in source.roots:
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = [name for name in subfolders if name not in source.skip]
            matching = (name for name in names if any(fnmatch.fnmatchcase(name, p) for p in source.patterns))
            found.update(Path(folder, name) for name in matching)
    return sorted(found)


def split(text: bytes, min_bytes: int = MIN_DOCUMENT_BYTES, max_bytes: int = MAX_DOCUMENT_BYTES) -> list[bytes]:
    """Cuts a text into documents: functions, paragraphs, entries of a table.

    A document ends behind the first blank line that gives it ``min_bytes``; where that would take more than
    ``max_bytes``, behind the last line that fits, or else at ``max_bytes``. Together the documents are the text.
    """
    documents, begin = [], 0
    while begin < len(text):
        limit = begin + max_bytes
        blank_line = text.find(b"\n\n", begin + min_bytes - 2, limit)
        if blank_line >= 0:
            end = blank_line + 2
        elif len(text) <= limit:
            end = len(text)
        else:
            end = text.rfind(b"\n", begin, limit) + 1 or limit
        documents.append(text[begin:end])
        begin = end
    return documents


def read_text(path: Path) -> bytes:
    """The beginning of a text file; nothing for a file that is binary or cannot be read."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES)
    except OSError:
        return b""
    return b"" if b"\0" in text else text


def load_documents(source: Source, seed: int, max_bytes: int = MAX_CHANNEL_BYTES) -> list[bytes]:
    """Documents of one channel, no two the same, about ``max_bytes`` in all, from files in an order drawn by ``seed``.

    Raises RuntimeError when the machine has too little of it to train on.
    """
    files = find_files(source)
    random.Random(f"{seed} {source.channel}").shuffle(files)
    documents: dict[bytes, None] = {}  # licences and generated headers repeat themselves
    total = 0
    for path in files:
        if total >= max_bytes:
            break
        for document in split(read_text(path)):
            if document not in documents:
                documents[document] = None
                total += len(document)
    if total < MIN_CHANNEL_BYTES:
        raise RuntimeError(
            f"too little text for channel {source.channel!r}: {total} bytes, wanted {MIN_CHANNEL_BYTES}; looked for "
            f"{', '.join(source.patterns)} in {', '.join(map(str, source.roots)) or 'no folder at all'}"
        )
    return list(documents)
