"""The transformer of the partial-personalisation paper: next-token prediction, with or without adapters."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparsona.models.catalog import TRANSFORMER, transformer_roles


def transformer(
    input_shape: tuple[int, ...],
    num_classes: int,
    adapters: int = 0,
    adapter_form: str = "paper",
    dropout: float = 0.0,
) -> nn.Module:
    """5,731,092 parameters for 20 tokens of a vocabulary of 10,004; adapters of width 16 add 67,712, of 64 264,704."""
    return Transformer(input_shape[0], num_classes, adapters, adapter_form == "authors", dropout, **TRANSFORMER)


class Transformer(nn.Module):
    """Tokens (N, T) of int64 to logits (N, T, vocabulary): at each place, what comes next. T may be any up to length.

    The embedding is also the weight of the output layer. Everything starts as N(0, .02), biases as 0.
    """

    def __init__(
        self,
        length: int,
        vocabulary: int,
        adapter_width: int,
        adapts_skip: bool,
        dropout: float,
        *,
        width: int,
        hidden: int,
        num_blocks: int,
        num_heads: int = 4,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            Block(width, hidden, num_heads, adapter_width, adapts_skip, dropout) for _ in range(num_blocks)
        )
        self.output = nn.Linear(width, vocabulary)
        self.output.weight = self.embedding.weight
        self.roles = transformer_roles(tuple(name for name, _ in self.named_parameters()), num_blocks)
        for name, value in self.named_parameters():
            if value.dim() == 2:
                nn.init.normal_(value, std=0.01 if ".adapter" in name else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(value)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens)
        x = F.relu(math.sqrt(x.shape[-1]) * x + self.positions(places))
        for block in self.blocks:
            x = block(x)
        return self.output(x)


class Block(nn.Module):
    """Causal attention, then two linear layers; the norm comes after each sum.

    Adapters are placed as by Houlsby et al.: after the attention's projection and after the feed-forward layers,
    inside the residual branch. With `adapts_skip` the second one acts on the skip branch instead, as in the authors'
    code.
    """

    def __init__(
        self, width: int, hidden: int, num_heads: int, adapter_width: int, adapts_skip: bool, dropout: float
    ) -> None:
        super().__init__()

        def adapter() -> nn.Module:
            return Adapter(width, adapter_width, dropout) if adapter_width else nn.Identity()

        self.num_heads, self.adapts_skip = num_heads, adapts_skip
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.adapter1 = adapter()
        self.norm1 = nn.LayerNorm(width)
        self.widen = nn.Linear(width, hidden)
        self.narrow = nn.Linear(hidden, width)
        self.adapter2 = adapter()
        self.norm2 = nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.0 if adapter_width else dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.adapter1(self.dropout(self.attend(x))))
        change = self.dropout(self.narrow(F.relu(self.widen(x))))
        if self.adapts_skip:
            return self.norm2(self.adapter2(x) + change)
        return self.norm2(x + self.adapter2(change))

    def attend(self, x: Tensor) -> Tensor:
        def heads(y: Tensor) -> Tensor:  # (N, T, width) -> (N, heads, T, width / heads)
            return y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

        query, key, value = heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
        # Written out: torch's fused attention has no vmap rule on CPU, and sequences are short.
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(later, -math.inf).softmax(dim=-1) @ value
        return self.projection(mixed.transpose(1, 2).flatten(2))


class Adapter(nn.Module):
    """x + widen(relu(narrow(dropout(x)))), nearly the identity at first (weights of deviation .01, biases 0)."""

    def __init__(self, width: int, adapter_width: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.narrow = nn.Linear(width, adapter_width)
        self.widen = nn.Linear(adapter_width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.widen(F.relu(self.narrow(self.dropout(x))))
