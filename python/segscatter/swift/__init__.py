# SPDX-License-Identifier: Apache-2.0
"""Channel losses in ms-swift without its per-micro-batch collectives and host syncs.

``--external_plugins "$(python -m segscatter.swift)" --enable_channel_loss true`` is all that ``megatron sft`` and
``swift sft`` need: the metrics keep their names (``loss_<channel>``, ``loss_None``, ``eval_`` in front) and their
meaning, the token-weighted mean over the log interval and all ranks.

Importing this, and :func:`install`, is cheap and touches neither CUDA nor process groups: dataloader workers import the
plugin too. The trainers are patched when they are imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from ..channels import ChannelRegistry
from . import _import_hook, _megatron, _seq2seq, _trackers

__all__ = ["install", "plugin_path"]

VOCABULARY_VARIABLE = "SEGSCATTER_CHANNELS"


def install(channels: Iterable[str] | None = None, *, vocabulary_file: str | os.PathLike[str] | None = None) -> None:
    """Lets ms-swift's ``MegatronTrainer`` and ``Seq2SeqTrainer`` count channel losses with segscatter.

    channels, vocabulary_file: the names of all channels, or a file of them (see :meth:`ChannelRegistry.from_file`);
        also from the environment variable ``SEGSCATTER_CHANNELS`` (a path). Other names then count in ``loss_other``.
        Default: names are taken as they come, which costs a second small all-reduce at every log.

    Calling it again changes the vocabulary of trainers made from then on, and nothing else.

    Raises ValueError when both are given, and RuntimeError (here, or when the trainers are imported) when ms-swift's
    trainers are not as expected; that trainer is left as it is then.
    """
    if channels is not None and vocabulary_file is not None:
        raise ValueError("channels and vocabulary_file exclude each other")
    if channels is None and vocabulary_file is None:
        vocabulary_file = os.environ.get(VOCABULARY_VARIABLE)
    if vocabulary_file is not None:
        names = ChannelRegistry.from_file(vocabulary_file).names[:-2]  # less the two reserved slots
    else:
        names = None if channels is None else tuple(channels)
    _trackers.set_vocabulary(names)
    _import_hook.when_imported(_megatron.MODULE, _megatron.patch)
    _import_hook.when_imported(_seq2seq.MODULE, _seq2seq.patch)


def plugin_path() -> str:
    """The file for ``--external_plugins``. It is alone in its folder, which ms-swift puts on ``sys.path``."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "plugin", "segscatter_channel_loss.py")
