# SPDX-License-Identifier: Apache-2.0
"""Runs a function on a module when it is imported, or now where it already is, so that nothing heavy is imported."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from types import ModuleType

_Action = Callable[[ModuleType], None]


def when_imported(name: str, action: _Action) -> None:
    """Calls ``action(module)`` once for the module called ``name``. What it raises, raises here or at the import."""
    module = sys.modules.get(name)
    if module is not None:
        action(module)
    else:
        _finder.pending[name] = action
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)


class _Finder(MetaPathFinder):
    def __init__(self) -> None:
        self.pending: dict[str, _Action] = {}

    def find_spec(self, name: str, path=None, target=None):
        action = self.pending.get(name)
        if action is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            action(module)
            self.pending.pop(name, None)

        spec.loader.exec_module = execute_and_act
        return spec


_finder = _Finder()
