# SPDX-License-Identifier: Apache-2.0
"""``python -m segscatter.swift`` prints the file to give to ``--external_plugins``."""

from . import plugin_path

print(plugin_path())
