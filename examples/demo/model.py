# SPDX-License-Identifier: Apache-2.0
"""A small byte-level causal transformer for packed rows: attention never leaves a document."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256


def document_numbers(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """``[T]`` int64: 1 for the tokens of the first document, 2 for the second...; padding has a number of its own."""
    return torch.searchsorted(cu_seqlens, torch.arange(num_tokens, dtype=cu_seqlens.dtype), right=True)


def keys_of_blocks(x: Tensor, window: int) -> Tensor:
    """``[T, ...]`` -> ``[T / window, 2 * window, ...]``: every block behind the one before it (first: zeros)."""
    blocks = x.unflatten(0, (-1, window))
    previous = torch.cat([torch.zeros_like(blocks[:1]), blocks[:-1]])
    return torch.cat([previous, blocks], dim=1)


def attention_bias(documents: Tensor, window: int, heads: int) -> Tensor:
    """``[T / window, heads, window, 2 * window]``, added to attention scores: -inf for keys that a query must not see.

    A query sees its own document only, itself and what comes before it, ``window`` tokens at most. The zeros before the
    first block are no document's number, so nobody sees them. Visible keys lose score in proportion to their distance,
    at another rate in every head (ALiBi), which also tells the model where they are.
    """
    query = torch.arange(window).unsqueeze(1) + window  # positions within a pair of blocks
    distance = query - torch.arange(2 * window)
    near = (distance >= 0) & (distance < window)
    same_document = documents.view(-1, window, 1) == keys_of_blocks(documents, window).unsqueeze(1)
    rates = 2.0 ** -torch.linspace(0, 6, heads).view(-1, 1, 1)
    return torch.where((near & same_document).unsqueeze(1), -rates * distance, -torch.inf)


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, window: int) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.norm_attention, self.norm_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.project = nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def attention(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(1, (3, self.heads, -1)).unbind(1)  # [T, heads, head_dim] each
        q = q.unflatten(0, (-1, self.window))
        k = keys_of_blocks(k, self.window)
        v = keys_of_blocks(v, self.window)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [T / window, heads, window or 2 * window, head_dim]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.project(y.transpose(1, 2).reshape(x.shape))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x), bias)
        return x + self.mlp(self.norm_mlp(x))


class ByteLM(nn.Module):
    """Predicts every byte from the ones before it in the same document; each layer looks ``window`` bytes back."""

    def __init__(self, dim: int = 96, layers: int = 3, heads: int = 3, window: int = 64) -> None:
        super().__init__()
        self.window, self.heads = window, heads
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, window) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY)
        nn.init.normal_(self.embed.weight, std=0.02)
        for block in self.blocks:
            nn.init.zeros_(block.project.weight)  # every block starts as the identity
            nn.init.zeros_(block.mlp[-1].weight)

    def forward(self, tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Logits ``[T, 256]`` for the token behind each one; T must be a multiple of ``window``."""
        bias = attention_bias(document_numbers(cu_seqlens, len(tokens)), self.window, self.heads)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, bias)
        return self.head(self.norm(x))

    def token_losses(self, tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
        """``[T]``: what predicting token t from the token before it cost, in nats.

        A document's first token has no predecessor: its entry means nothing and must be masked.
        """
        logits = self(tokens, cu_seqlens)
        return F.pad(F.cross_entropy(logits[:-1], tokens[1:], reduction="none"), (1, 0))
