# SPDX-License-Identifier: Apache-2.0
"""A progress bar in a terminal; a line now and then in a log."""

from __future__ import annotations

import shutil
import sys
import time


class Progress:
    def __init__(self, total: int) -> None:
        self.total = total
        self.start = time.monotonic()
        self.interactive = sys.stdout.isatty()
        self.printed = 0

    def show(self, done: int, status: str) -> None:
        elapsed = time.monotonic() - self.start
        left = elapsed / done * (self.total - done)
        text = f"{done:>{len(str(self.total))}}/{self.total}  {left:3.0f} s left  {status}"
        if self.interactive:
            columns = shutil.get_terminal_size().columns - 1
            width = max(0, min(30, columns - len(text) - 3))
            bar = "█" * (width * done // self.total)
            end = "\n" if done == self.total else ""
            line = f"[{bar:<{width}}] {text}"[:columns]
            print(f"\r{line}\x1b[K", end=end, flush=True)  # the escape clears what a longer line left
        elif done == self.total or done - self.printed >= self.total / 10:
            print(text, flush=True)
            self.printed = done
