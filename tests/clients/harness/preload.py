# SPDX-License-Identifier: Apache-2.0
"""Imported once by the server that the pools' processes are forked from: the trainers take many seconds to import."""

from . import upstream

upstream.stub()

import swift.megatron.trainers.trainer  # noqa: E402
import swift.trainers.seq2seq_trainer  # noqa: E402, F401
