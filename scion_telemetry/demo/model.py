"""A small byte-level transformer, written to be read: the model that the demo trains.

    bytes [batch, time] -> embed -> blocks (attention, then MLP, both residual) -> norm -> head -> logits

Pre-norm, rotary positions, no biases, embedding and head untied: the parts that recipes for spectral optimizers assume,
and every matrix has its own module, so that each shows up by its own name.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig:
    """Sizes of the model.

    Args:
        vocab: Number of token values; 256 for bytes.
        width: Features per token, a multiple of ``2 * heads`` (rotary positions turn pairs of features).
        layers: Number of blocks.
        heads: Attention heads per block.
        hidden: Width of the MLP.
        context: Longest sequence that the model takes.
        rotary_base: Wavelengths of the rotary positions go from 2 pi to nearly 2 pi times this.

    Raises:
        ValueError: A size is not positive, or the width does not split into heads of pairs.
    """

    vocab: int = 256
    width: int = 96
    layers: int = 3
    heads: int = 4
    hidden: int = 288
    context: int = 128
    rotary_base: float = 10_000.0

    def __post_init__(self) -> None:
        for name in ("vocab", "width", "layers", "heads", "hidden", "context", "rotary_base"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)!r}")
        if self.width % (2 * self.heads):
            raise ValueError(f"width must be a multiple of 2 * heads = {2 * self.heads}, got {self.width!r}")


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.wq = nn.Linear(config.width, config.width, bias=False)
        self.wk = nn.Linear(config.width, config.width, bias=False)
        self.wv = nn.Linear(config.width, config.width, bias=False)
        self.wo = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        """Mix over time: ``[batch, time, width]`` to the same shape; ``turn`` is what ``rotation`` returns."""
        # [batch, time, width] -> [batch, heads, time, width / heads]
        q, k, v = (w(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        mixed = F.scaled_dot_product_attention(rotate(q, turn), rotate(k, turn), v, is_causal=True)
        out: Tensor = self.wo(mixed.transpose(1, 2).flatten(-2))
        return out


class MLP(nn.Module):
    """Two matrices with a GELU between them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Mix over features: ``[batch, time, width]`` to the same shape."""
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class Block(nn.Module):
    """Attention, then MLP, each added to what it reads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.width)
        self.attn = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        """``[batch, time, width]`` to the same shape."""
        x = x + self.attn(self.attn_norm(x), turn)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class GPT(nn.Module):
    """The whole model. The same seed gives the same weights, and torch's global generator is left alone.

    Args:
        config: Its sizes.
        seed: Seed of the weights.
    """

    def __init__(self, config: GPTConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        # On meta the modules draw no weights: those come from the seed alone, in `reset`.
        with torch.device("meta"):
            self.embed = nn.Embedding(config.vocab, config.width)
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
            self.norm = nn.RMSNorm(config.width)
            self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.to_empty(device="cpu")
        self.reset(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        """Draw new weights, normal with the scales of ``init_std``; gains become 1."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, init_std(name, parameter.shape[-1], self.config.layers), generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token at every position: int64 ``[batch, time]`` to ``[batch, time, vocab]``."""
        if tokens.shape[-1] > self.config.context:
            raise ValueError(f"at most {self.config.context} tokens fit the context, got {tokens.shape[-1]}")
        turn = rotation(tokens.shape[-1], self.config, device=tokens.device)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, turn)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte; both arguments int64 ``[batch, time]``."""
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())


def init_std(name: str, fan_in: int, layers: int) -> float:
    """Standard deviation of a matrix at the start.

    1/sqrt(fan_in) keeps the scale of what passes; the two matrices that write into the residual stream are smaller by
    sqrt(2 layers), the number of writers. The embedding has unit features, which the first norm leaves as they are.
    The small head makes the first loss that of a uniform guess, ln(vocab); a head of zeros would do that too, but the
    blocks would have no gradient in the first step.
    """
    if name == "embed.weight":
        return 1.0
    if name == "head.weight":
        return 0.1 / math.sqrt(fan_in)
    if name.endswith(("attn.wo.weight", "mlp.down.weight")):
        return 1.0 / math.sqrt(2 * layers * fan_in)
    return 1.0 / math.sqrt(fan_in)


def rotation(time: int, config: GPTConfig, *, device: torch.device) -> Tensor:
    """Cosine and sine of every position and pair of features: ``[2, time, width / heads / 2]``, float32.

    Computed in every forward (a microsecond): a buffer would have to survive meta devices and sharding wrappers.
    """
    pairs = config.width // config.heads // 2
    frequency = config.rotary_base ** (-torch.arange(pairs, device=device, dtype=torch.float32) / pairs)
    angle = torch.outer(torch.arange(time, device=device, dtype=torch.float32), frequency)
    return torch.stack((angle.cos(), angle.sin()))


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Turn feature i and i + half of each head by the angle of its position (RoPE, Su et al. 2021, arXiv:2104.09864).

    Args:
        x: ``[batch, heads, time, features]``.
        turn: Of ``rotation``.
    """
    cos, sin = turn.to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
