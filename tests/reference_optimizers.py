"""Dion2 and Scion once more, plainly, in float64, from the papers: slow, one matrix at a time, without torch.optim.

Nothing here comes from the library, so that it can be its oracle.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray


def polar(x: Array) -> Array:
    """U Vᵀ of the singular value decomposition."""
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    return u @ vt if s[0] > 0 else np.zeros_like(x)


def row_groups(rows: int, world: int) -> list[range]:
    """Rows of each of ``world`` shards: ⌈rows/world⌉ each until none are left."""
    size = -(-rows // world)
    return [range(min(rows, size * r), min(rows, size * (r + 1))) for r in range(world)]


def largest(scores: Array, k: int) -> list[int]:
    """Indices of the k largest; the lower index wins a tie."""
    return sorted(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k])


class Dion2Reference:
    """M <- M + G; K = top-k rows (columns) by L1; W <- (1-lr·wd) W; W[K] -= lr·factor·polar(M[K]); M[K] <- ef·M[K].

    Columns where the matrix is tall, unless ``select_dim`` says otherwise. ``decay_on="selected"`` shrinks W[K] alone.
    """

    def __init__(
        self,
        w: Array,
        *,
        fraction: float,
        ef_decay: float,
        weight_decay: float,
        factor: float,
        select_dim: str = "auto",
        decay_on: str = "all",
    ) -> None:
        self.w, self.m = w.astype(np.float64).copy(), np.zeros(w.shape)
        self.fraction, self.ef, self.wd, self.factor = fraction, ef_decay, weight_decay, factor
        self.rows_always, self.columns_always, self.shards = select_dim == "rows", select_dim == "cols", 1
        self.decay_all = decay_on == "all"

    def by_rows(self) -> bool:
        return self.rows_always or (not self.columns_always and self.w.shape[0] <= self.w.shape[1])

    def selected(self) -> list[int]:
        """Rows (or columns) to orthonormalise; with ``shards`` every shard chooses among its own rows."""
        scores = np.abs(self.m).sum(axis=1 if self.by_rows() else 0)
        groups = row_groups(len(scores), self.shards)
        k = max(1, math.ceil(round(self.fraction * len(groups[0]), 9)))
        return sorted(g[i] for g in groups for i in largest(scores[list(g)], min(k, len(g))))

    def step(self, gradient: Array, lr: float) -> None:
        self.m = self.m + gradient
        k = self.selected()
        index = (k, slice(None)) if self.by_rows() else (slice(None), k)
        direction = self.direction(polar(self.m[index]), k)
        self.m[index] *= self.ef
        self.w[... if self.decay_all else index] *= 1 - lr * self.wd
        self.w[index] -= lr * self.factor * direction

    def direction(self, u: Array, k: list[int]) -> Array:
        return u


class Dion3Reference(Dion2Reference):
    """Dion2 on rows with v[K] <- β₂ v[K] + (1-β₂) mean(U²) and Û = U/√v, scaled back to the norm of U."""

    def __init__(self, w: Array, *, beta2: float, **options: Any) -> None:
        super().__init__(w, select_dim="rows", **options)
        self.v, self.beta2 = np.zeros((len(w), 1)), beta2

    def direction(self, u: Array, k: list[int]) -> Array:
        self.v[k] = self.beta2 * self.v[k] + (1 - self.beta2) * (u**2).mean(axis=1, keepdims=True)
        normal = u / (np.sqrt(self.v[k]) + 1e-8)
        return normal * np.linalg.norm(u) / np.linalg.norm(normal)


class ScionReference:
    """M <- (1-m) M + m G;  W <- (1-lr) W unless unconstrained;  W <- (1-lr·wd) W;  W <- W - lr·scale·lmo(M).

    With ``nesterov`` the direction is that of (1-m) M + m G, M already updated.
    """

    def __init__(
        self,
        w: Array,
        lmo: Callable[[Array], Array],
        *,
        momentum: float,
        scale: float,
        unconstrained: bool,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        self.w, self.m, self.lmo = w.astype(np.float64).copy(), np.zeros(w.shape), lmo
        self.momentum, self.scale, self.unconstrained = momentum, scale, unconstrained
        self.wd, self.nesterov = weight_decay, nesterov

    def step(self, gradient: Array, lr: float) -> None:
        self.m = (1 - self.momentum) * self.m + self.momentum * gradient
        ahead = (1 - self.momentum) * self.m + self.momentum * gradient
        if not self.unconstrained:
            self.w *= 1 - lr
        self.w *= 1 - lr * self.wd
        self.w -= lr * self.scale * self.lmo(ahead if self.nesterov else self.m)


def spectral(g: Array) -> Array:
    return math.sqrt(g.shape[0] / g.shape[1]) * polar(g)


def spectral_conv(g: Array) -> Array:
    d_out, d_in, *kernel = g.shape
    return math.sqrt(d_out / d_in) / math.prod(kernel) * polar(g.reshape(d_out, -1)).reshape(g.shape)


def embedding_rows(g: Array) -> Array:
    """Every row of an embedding [vocab, d] to RMS 1."""
    return g / np.sqrt((g**2).mean(axis=1, keepdims=True))


def output_rows(g: Array) -> Array:
    """Every row of an output layer to L2 norm 1/√d_in."""
    return g / (np.linalg.norm(g, axis=1, keepdims=True) * math.sqrt(g.shape[1]))


def sign(g: Array) -> Array:
    return np.sign(g) / g.shape[-1]


def rms(g: Array) -> Array:
    return g / np.sqrt((g**2).mean())
