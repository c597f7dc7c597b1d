# SPDX-License-Identifier: Apache-2.0
"""A plugin file of your own, for a fixed vocabulary: --external_plugins ms_swift_plugin.py"""

from segscatter.swift import install

install(channels=["code", "math", "web"])
