# SPDX-License-Identifier: Apache-2.0
"""Runs the real Megatron-Core, ms-swift and transformers code on CPU processes connected by gloo."""
