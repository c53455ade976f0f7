"""Norm geometries: the direction of steepest descent (``lmo``) and weights of unit norm (``init_``) of each. Pure.

``lmo(g)`` has the sign of the gradient: an optimizer subtracts it. ``W`` is ``[d_out, d_in]``. Definitions follow
LIONS-EPFL/scion, whose keyword arguments these classes take; 1e-8 is added to every denominator.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from .gram import Show
from .orthogonalize import NewtonSchulzFunc, Orthogonalizer, input_dtype, make_orthogonalizer, shows_gram

_EPS = 1e-8

Extent = Literal["entry", "row", "column", "matrix"]
"""What must be whole on one rank for ``lmo`` to be exact there."""


class Norm(Protocol):
    """One norm geometry."""

    @property
    def extent(self) -> Extent:
        """What ``lmo`` needs whole."""

    @property
    def stacks(self) -> bool:
        """Whether a 3-D parameter is a stack of matrices to it, and no convolution."""

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype in which the matrix may travel to where it is whole; None for its own."""

    def lmo(self, g: Tensor, shape: Sequence[int] | None = None) -> Tensor:
        """Direction of unit norm that has the largest inner product with ``g``. ``g`` is not modified.

        Args:
            g: The whole, or a piece that has its ``extent`` whole.
            shape: Shape of the whole; that of ``g`` by default.
        """

    def init_(self, w: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Fill the whole weight ``w`` with random values of unit norm, in place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Orthogonal:
    """What the spectral geometries share: their orthogonaliser."""

    extent: ClassVar[Extent] = "matrix"

    steps: int = 5
    orthogonalizer: str | NewtonSchulzFunc = "lions_ns5"
    _func: NewtonSchulzFunc = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_func", make_orthogonalizer(self.orthogonalizer, steps=self.steps))

    @property
    def dtype(self) -> torch.dtype | None:
        """That of the orthogonaliser."""
        return input_dtype(self._func)

    @property
    def shows_gram(self) -> bool:
        """Whether the orthogonaliser tells of what it is given."""
        return shows_gram(self._func)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spectral(_Orthogonal):
    """RMS->RMS operator norm: ``lmo = s U Vᵀ``, s = √(d_out/d_in).

    Args:
        normalized: False: s = √d_out.
        max: s = max(1, s).
        transpose: The matrix is stored as ``[d_in, d_out]`` (some expert weights are).
        steps: Newton-Schulz steps.
        orthogonalizer: Name or callable, see ``orthogonalize.NAMES``.
    """

    stacks: ClassVar[bool] = True

    normalized: bool = True
    max: bool = False
    transpose: bool = False

    def _scale(self, d_out: int, d_in: int) -> float:
        if self.transpose:
            d_out, d_in = d_in, d_out
        scale = math.sqrt(d_out / d_in) if self.normalized else math.sqrt(d_out)
        return max(1.0, scale) if self.max else scale

    def lmo(self, g: Tensor, shape: Sequence[int] | None = None, show: Show | None = None) -> Tensor:
        """``[..., d_out, d_in]`` to the same shape, in the orthogonaliser's dtype, which ``show`` is handed to."""
        return _apply(self._func, g, self._scale(g.size(-2), g.size(-1)), show)

    def init_(self, w: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Semi-orthogonal times s."""
        return w.copy_(_orthogonal(w, generator) * self._scale(w.size(-2), w.size(-1)))


@dataclass(frozen=True, kw_only=True, slots=True)
class SpectralConv(_Orthogonal):
    """Spectral norm of a convolution ``[out, in, *kernel]``, seen as the matrix ``[out, in·∏kernel]``.

    ``lmo = √(out/in) / ∏kernel · U Vᵀ``. (The reference divides by the square of the first kernel size, which is the
    same for square kernels only.)

    Args:
        steps: Newton-Schulz steps.
        orthogonalizer: Name or callable.
    """

    stacks: ClassVar[bool] = False

    def lmo(self, g: Tensor, shape: Sequence[int] | None = None, show: Show | None = None) -> Tensor:
        """``[out, in, *kernel]`` to the same shape, in the orthogonaliser's dtype, which ``show`` is handed to."""
        factor = math.sqrt(g.size(0) / g.size(1)) / math.prod(g.shape[2:])
        return _apply(self._func, g.reshape(g.size(0), -1), factor, show).reshape(g.shape)

    def init_(self, w: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Every tap of the kernel semi-orthogonal, times the factor of ``lmo``."""
        factor = math.sqrt(w.size(0) / w.size(1)) / math.prod(w.shape[2:])
        taps = w.flatten(2)
        drawn = [_orthogonal(taps[..., i], generator) * factor for i in range(taps.size(-1))]
        return w.copy_(torch.stack(drawn, dim=-1).view(w.shape))


@dataclass(frozen=True, kw_only=True, slots=True)
class ColNorm:
    """1->RMS operator norm: every column divided by its RMS.

    Args:
        normalized: The RMS is multiplied by the number of columns first.
        transpose: Work on ``gᵀ``; for an embedding ``[vocab, d]`` every row then gets RMS 1.
    """

    stacks: ClassVar[bool] = True
    dtype: ClassVar[torch.dtype | None] = None

    normalized: bool = False
    transpose: bool = False

    @property
    def extent(self) -> Extent:
        """Columns, or rows when transposed."""
        return "row" if self.transpose else "column"

    def lmo(self, g: Tensor, shape: Sequence[int] | None = None) -> Tensor:
        """``[d_out, d_in]`` to the same shape."""
        whole = shape or g.shape
        dim, count = (-1, whole[-2]) if self.transpose else (-2, whole[-1])
        size = _l2(g, dim) / math.sqrt(g.size(dim))
        return g / ((size * count if self.normalized else size) + _EPS)

    def init_(self, w: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Gaussian, then ``lmo``."""
        return w.copy_(self.lmo(_gaussian(w, generator)))


@dataclass(frozen=True, kw_only=True, slots=True)
class RowNorm:
    """RMS->inf operator norm: every row divided by its L2 norm (times √d_in when normalized).

    Args:
        normalized: False: divided by the L2 norm alone.
        transpose: Work on ``gᵀ``.
    """

    stacks: ClassVar[bool] = True
    dtype: ClassVar[torch.dtype | None] = None

    normalized: bool = True
    transpose: bool = False

    @property
    def extent(self) -> Extent:
        """Rows, or columns when transposed."""
        return "column" if self.transpose else "row"

    def lmo(self, g: Tensor, shape: Sequence[int] | None = None) -> Tensor:
        """``[d_out, d_in]`` to the same shape."""
        dim = -2 if self.transpose else -1
        size = _l2(g, dim)
        return g / ((size * math.sqrt(g.size(dim)) if self.normalized else size) + _EPS)

    def init_(self, w: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Gaussian, then ``lmo``."""
        return w.copy_(self.lmo(_gaussian(w, generator)))


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPower:
    """Every row divided by its L2 norm and multiplied by d_in to a power (the row geometries of rakkit/disco).

    Args:
        power: -1/2 is RMS->inf (as RowNorm), 1/2 gives rows of RMS 1 (as ColNorm transposed).
    """

    extent: ClassVar[Extent] = "row"
    stacks: ClassVar[bool] = True
    dtype: ClassVar[torch.dtype | None] = None

    power: float

    def lmo(self, g: Tensor, shape: Sequence[int] | None = None) -> Tensor:
        """``[d_out, d_in]`` to the same shape."""
        return g / (_l2(g, -1) + _EPS) * math.pow((shape or g.shape)[-1], self.power)

    def init_(self, w: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Gaussian, then ``lmo``."""
        return w.copy_(self.lmo(_gaussian(w, generator)))


@dataclass(frozen=True, kw_only=True, slots=True)
class BiasRMS:
    """Vectors, also shaped ``[C, 1, 1]`` or ``[1, 1, C]``: ``g / RMS(g)``. Of matrices, the RMS of each column.

    Args:
        whole: Of matrices, the RMS of all entries (rakkit/disco).
    """

    extent: ClassVar[Extent] = "matrix"
    stacks: ClassVar[bool] = False
    dtype: ClassVar[torch.dtype | None] = None

    whole: bool = False

    def lmo(self, g: Tensor, shape: Sequence[int] | None = None) -> Tensor:
        """Any shape; a 0-d gradient gives its sign."""
        if g.ndim == 0:
            return g / (g.abs() + _EPS)
        every = self.whole or g.numel() == max(g.shape)
        size = g.square().mean(dim=tuple(range(g.ndim)) if every else 0, keepdim=True).sqrt()
        return g / (size + _EPS)

    def init_(self, w: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Zeros."""
        return w.zero_()


@dataclass(frozen=True, kw_only=True, slots=True)
class Sign:
    """1->inf operator norm: ``sign(g) / d_in``.

    Args:
        zero_init: ``init_`` gives zeros instead of random signs.
        normalized: False: ``sign(g)``.
    """

    extent: ClassVar[Extent] = "entry"
    stacks: ClassVar[bool] = True
    dtype: ClassVar[torch.dtype | None] = None

    zero_init: bool = False
    normalized: bool = True

    def lmo(self, g: Tensor, shape: Sequence[int] | None = None) -> Tensor:
        """``[d_out, d_in]`` to the same shape."""
        return torch.sign(g) / (shape or g.shape)[-1] if self.normalized and g.ndim else torch.sign(g)

    def init_(self, w: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Random signs over d_in, or zeros."""
        if self.zero_init:
            return w.zero_()
        signs = torch.randint(0, 2, w.shape, generator=generator, device=w.device, dtype=torch.float32) * 2 - 1
        return w.copy_(signs / w.size(-1) if self.normalized and w.ndim else signs)


NORMS: Mapping[str, Callable[..., Norm]] = {
    "Spectral": Spectral,
    "SpectralConv": SpectralConv,
    "ColNorm": ColNorm,
    "RowNorm": RowNorm,
    "RowPower": RowPower,
    "BiasRMS": BiasRMS,
    "Sign": Sign,
}
"""Every geometry by name; ``Auto`` chooses by the number of dimensions."""

ALIASES: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "spectral": ("Spectral", {"orthogonalizer": "newton_schulz"}),
    "image_spectral": ("Spectral", {"orthogonalizer": "newton_schulz", "max": True}),
    "conv_spectral": ("SpectralConv", {"orthogonalizer": "newton_schulz"}),
    "embed_linear": ("RowPower", {"power": 1.0}),
    "embed_sqrt": ("RowPower", {"power": 0.5}),
    "unembed_linear": ("RowPower", {"power": -1.0}),
    "unembed_sqrt": ("RowPower", {"power": -0.5}),
    "bias_rms": ("BiasRMS", {"whole": True}),
    "sign": ("Sign", {"normalized": False}),
}
"""The names that rakkit/disco gives to geometries."""


def make_norm(name: str, ndim: int, kwargs: Mapping[str, object] | None = None) -> Norm:
    """The geometry of a parameter with ``ndim`` dimensions.

    ``Auto`` is BiasRMS for 0 and 1 dimensions, Spectral for 2, SpectralConv for 3 and more.

    Raises:
        ValueError: For an unknown name, an unknown option, or a geometry that cannot hold such a parameter.
    """
    if not isinstance(name, str) or name not in ("Auto", *NORMS, *ALIASES):
        raise ValueError(f"unknown norm {name!r}; known are Auto, {', '.join((*NORMS, *ALIASES))}")
    if name == "Auto":
        name = "BiasRMS" if ndim < 2 else "Spectral" if ndim == 2 else "SpectralConv"
    name, preset = ALIASES.get(name, (name, {}))
    least = {"Spectral": 2, "ColNorm": 2, "RowNorm": 2, "RowPower": 2, "SpectralConv": 3}.get(name, 0)
    if ndim < least:
        raise ValueError(
            f"norm {name!r} needs at least {least} dimensions, got a parameter with {ndim}; use Auto or BiasRMS"
        )
    try:
        return NORMS[name](**{**preset, **(kwargs or {})})
    except TypeError as error:
        raise ValueError(f"norm_kwargs of {name!r}: {error}") from error


def _apply(func: NewtonSchulzFunc, g: Tensor, factor: float, show: Show | None) -> Tensor:
    if isinstance(func, Orthogonalizer):
        found = func(g, epsilon=1e-7, show=show)
        return found.mul_(factor) if factor != 1 else found
    # Orthogonalisers of other authors may divide their input in place, which can be a momentum buffer or a gradient,
    # and may keep what they return.
    return func(g.clone(), epsilon=1e-7) * factor


def _l2(g: Tensor, dim: int) -> Tensor:
    # Square, sum and root in the dtype of g, as the reference does; a fused norm rounds bfloat16 elsewhere.
    return g.square().sum(dim=dim, keepdim=True).sqrt()


def _gaussian(w: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.randn(w.shape, generator=generator, device=w.device, dtype=torch.float32)


def _orthogonal(w: Tensor, generator: torch.Generator | None) -> Tensor:
    # QR in float64 of a Gaussian, columns signed by the diagonal of R: uniform over semi-orthogonal matrices.
    gauss = _gaussian(w, generator).double()
    wide = gauss.size(-2) < gauss.size(-1)
    factor, r = torch.linalg.qr(gauss.mT if wide else gauss)
    q: Tensor = factor * torch.sign(torch.diagonal(r, dim1=-2, dim2=-1)).unsqueeze(-2)
    return q.mT if wide else q
