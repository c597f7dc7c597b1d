# SPDX-License-Identifier: Apache-2.0
"""For ``--external_plugins`` of ms-swift."""

from segscatter.swift import install

install()
