#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Channel losses in ms-swift: two options more. "megatron sft" or "swift sft", with the rest of your options behind.
exec "$@" \
  --enable_channel_loss true \
  --external_plugins "$(python -m segscatter.swift)"
