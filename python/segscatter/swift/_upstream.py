# SPDX-License-Identifier: Apache-2.0
"""Checks that ms-swift is as this adapter knows it."""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Callable

TESTED_VERSION = "4.6.0"


def refuse(what: str) -> RuntimeError:
    """The error for an ms-swift that is not as expected."""
    try:
        version = importlib.metadata.version("ms-swift")
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    return RuntimeError(
        f"segscatter.swift does not fit ms-swift {version}: {what}. The trainer is left as it is. Train "
        f"without the plugin, or with a version that it fits (tested with {TESTED_VERSION})"
    )


def require_parameters(function: Callable, *names: str) -> None:
    """Raises RuntimeError when the parameters of ``function`` are not called ``names``, in this order."""
    found = tuple(inspect.signature(function).parameters)
    if found != names:
        raise refuse(f"{function.__qualname__} has the parameters ({', '.join(found)}), not ({', '.join(names)})")


def require_own(cls: type, name: str) -> Callable:
    """The method that ``cls`` itself defines. Raises RuntimeError when it does not."""
    if not inspect.isfunction(vars(cls).get(name)):
        raise refuse(f"{cls.__name__} defines no method {name}")
    return vars(cls)[name]
