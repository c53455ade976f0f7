"""Orthogonalisers: Newton-Schulz iterations of several authors, and the exact polar factor.

Every iteration has the shape

    X <- G / (headroom ‖G‖_F + eps),    then per step    A = X Xᵀ,  B = b A + c A A,  X <- a X + B X

and drives the singular values of G towards 1. Two of them that share coefficients are still different functions when
they round at other places, so a name here fixes the coefficients, the headroom **and** the order of operations.
All of this is pure: no input is ever modified or aliased by an output.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .events import Gram
from .gram import Show, gram_of, stacked, unbound

Triple = tuple[float, float, float]


class NewtonSchulzFunc(Protocol):
    """An orthogonaliser: ``[..., m, n]`` to a matrix of the same shape whose singular values are about 1."""

    def __call__(self, input: Tensor, /, epsilon: float) -> Tensor:
        """Orthogonalise ``input``; ``epsilon`` keeps an all-zero matrix at zero."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Coefficients:
    """The numbers of one published iteration.

    Args:
        triples: (a, b, c) of the first steps.
        limit: (a, b, c) of every later step; None when no step follows the triples.
        headroom: Factor on the Frobenius norm that the input is divided by.
        right_gram: Work on Xᵀ X when X is tall, where others transpose X (the same but for rounding).
        scale_first: Form ``(c A) A``, rounding ``c A`` first, where others form ``c (A A)``.
        fused: Round B and every new X once, where others round each of their terms too; the fastest order.
        source: Where the numbers were published.
    """

    triples: tuple[Triple, ...] = ()
    limit: Triple | None = None
    headroom: float = 1.0
    right_gram: bool = False
    scale_first: bool = False
    fused: bool = False
    source: str

    def schedule(self, steps: int) -> tuple[Triple, ...]:
        """The triples of the first ``steps`` steps."""
        tail = () if self.limit is None else (self.limit,) * max(0, steps - len(self.triples))
        return (self.triples + tail)[:steps]


_KELLER_JORDAN: Triple = (3.4445, -4.7750, 2.0315)  # https://kellerjordan.github.io/posts/muon


def _deflate(triples: tuple[Triple, ...], safety: float) -> tuple[Triple, ...]:
    # The safety factor of Polar Express (arXiv 2505.16932, section on finite precision): p(x) -> p(x / safety).
    return tuple((a / safety, b / safety**3, c / safety**5) for a, b, c in triples)


COEFFICIENTS: Mapping[str, Coefficients] = {
    "lions_ns5": Coefficients(limit=_KELLER_JORDAN, scale_first=True, source="LIONS-EPFL/scion, scion.py"),
    "newton_schulz": Coefficients(limit=_KELLER_JORDAN, source="https://kellerjordan.github.io/posts/muon"),
    "muon_ns5": Coefficients(limit=_KELLER_JORDAN, fused=True, source="torch.optim.Muon, torch/optim/_muon.py"),
    "dion_ns5": Coefficients(
        triples=(
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        source="microsoft/dion, dion/newton_schulz_triton.py",
    ),
    "polar_express": Coefficients(
        triples=(
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ),
        headroom=1.02,
        right_gram=True,
        source="microsoft/dion, dion/polar_express.py; method of arXiv 2505.16932",
    ),
    "polar_express_disco": Coefficients(
        triples=_deflate(
            (
                (8.28721201814563, -23.595886519098837, 17.300387312530933),
                (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
                (3.948690853482295, -2.908902115962949, 0.5518191394370137),
                (3.318419657370602, -2.488488024314874, 0.51004894012372),
                (2.300652019954817, -1.668903984574749, 0.4188073119525673),
                (1.891301407787398, -1.267995827194587, 0.3768040894852483),
                (1.875001480853448, -1.250001645399949, 0.3750001645474248),
            ),
            safety=1.01,
        ),
        limit=(1.875, -1.25, 0.375),
        headroom=1.01,
        source="rakkit/disco; coefficients of arXiv 2505.16932",
    ),
}
"""Every iteration by name."""

NAMES = (*COEFFICIENTS, "svd")


@dataclass(frozen=True, kw_only=True, slots=True)
class Orthogonalizer:
    """One orthogonaliser, ready to call.

    Args:
        name: An entry of ``COEFFICIENTS``, or ``svd`` for the exact polar factor U Vᵀ.
        steps: Iterations, at least 1; sets without a limit triple allow as many as they have triples.
        dtype: The dtype it computes in and returns. ``svd`` computes in float32 at least.

    Raises:
        ValueError: For an unknown name or an impossible number of steps.
    """

    name: str = "polar_express"
    steps: int = 5
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(f"unknown orthogonaliser {self.name!r}; known are {', '.join(NAMES)}")
        if self.name != "svd":
            most = len(COEFFICIENTS[self.name].schedule(max(self.steps, 1)))
            if not 1 <= self.steps <= most:
                allowed = f"between 1 and {most}" if self.steps > most else "at least 1"
                raise ValueError(f"steps of {self.name} must be {allowed}, got {self.steps!r}")

    @property
    def text(self) -> str:
        """``name/steps/dtype``: a plain value for options and checkpoints, which ``make_orthogonalizer`` reads."""
        return f"{self.name}/{self.steps}/{str(self.dtype).removeprefix('torch.')}"

    @property
    def shows_gram(self) -> bool:
        """Whether ``show`` is called: by every iteration, and not by ``svd``."""
        return self.name != "svd"

    def __call__(self, input: Tensor, /, epsilon: float = 1e-7, *, show: Show | None = None) -> Tensor:
        """Orthogonalise ``[..., m, n]``; an all-zero matrix stays zero.

        Args:
            input: The matrix, or a batch of them.
            epsilon: Added to the Frobenius norm.
            show: Called once with the ``Gram`` of ``input``, of its batch shape, where ``shows_gram``.
        """
        if self.name == "svd":
            return polar(input).to(self.dtype)
        return iterate(input.to(self.dtype), COEFFICIENTS[self.name], steps=self.steps, epsilon=epsilon, show=show)


@torch.no_grad()
def iterate(x: Tensor, coefficients: Coefficients, *, steps: int, epsilon: float, show: Show | None = None) -> Tensor:
    """Run ``steps`` Newton-Schulz steps on ``x`` (``[..., m, n]``) in the dtype of ``x``; no gradient flows through.

    The Gram matrix is taken on the shorter side, so a tall matrix costs no more than its transpose. ``show`` is called
    once with what the first of them tells of ``x``, and changes nothing.
    """
    if x.ndim > (2 if one_by_one(x) else 3):
        found, parts = x.new_empty(x.shape), list[Gram]()
        collect = None if show is None else parts.append
        for place, part in zip(found, x, strict=True):
            place.copy_(iterate(part, coefficients, steps=steps, epsilon=epsilon, show=collect))
        if show is not None and parts:
            show(stacked(parts))
        return found
    tall = x.size(-2) > x.size(-1)
    if tall and not coefficients.right_gram:
        return iterate(x.mT, coefficients, steps=steps, epsilon=epsilon, show=show).mT
    norm = x.norm(dim=(-2, -1), keepdim=True)
    divisor = norm * coefficients.headroom + epsilon
    x = x / divisor
    # Buffers of the strides of x: what mixes rows with columns, or is allocated in every step, takes twice the time.
    side = min(x.shape[-2:])
    gram, poly, other = x.new_empty(*x.shape[:-2], side, side), x.new_empty(*x.shape[:-2], side, side), x.clone()
    for a, b, c in coefficients.schedule(steps):
        torch.matmul(x.mT if tall else x, x if tall else x.mT, out=gram)
        _square(gram, b, c, coefficients, out=poly)
        if show is not None:
            # b A + c A² has few digits of A² left: b A is up to r times as large.
            squared = None if coefficients.fused else poly
            show(gram_of(gram, squared, divisor, c if coefficients.scale_first else 1.0))
            show = None
        if coefficients.fused:
            _product_and(x, *((x, poly) if tall else (poly, x)), a, 1.0, out=other)
            x, other = other, x
            continue
        if not coefficients.scale_first:
            poly.mul_(c)
        poly.add_(gram.mul_(b))
        torch.matmul(x if tall else poly, poly if tall else x, out=other)
        x.mul_(a).add_(other)
    return x


def _square(gram: Tensor, b: float, c: float, coefficients: Coefficients, *, out: Tensor) -> None:
    """A A, or (c A) A, or b A + c A A: what the order of roundings forms first."""
    if coefficients.fused:
        _product_and(gram, gram, gram, b, c, out=out)
    else:
        torch.matmul(c * gram if coefficients.scale_first else gram, gram, out=out)


def one_by_one(x: Tensor) -> bool:
    """Whether products of single matrices are faster than batched ones: on a CPU, where bmm has the slower kernel."""
    return x.device.type == "cpu"


def _product_and(add: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float, *, out: Tensor) -> None:
    """``out = beta add + alpha left right``, rounded once."""
    multiply = torch.addmm if add.ndim == 2 else torch.baddbmm
    multiply(add, left, right, beta=beta, alpha=alpha, out=out)


def polar(x: Tensor) -> Tensor:
    """Exact polar factor U Vᵀ of ``[..., m, n]``; 0 for a zero matrix, NaN for one that is not finite.

    Computed in float64 for float64 input and in float32 otherwise. Where ``x`` is rank-deficient but not zero, the
    factor is one of many.
    """
    work = x if x.dtype == torch.float64 else x.float()
    # LAPACK raises on a NaN: one rank, the owner, would die and leave the others waiting.
    finite = work.isfinite().all(dim=-1, keepdim=True).all(dim=-2, keepdim=True)
    u, _, vt = torch.linalg.svd(work.masked_fill(~finite, 0.0), full_matrices=False)
    zero = (work == 0).all(dim=-1, keepdim=True).all(dim=-2, keepdim=True)
    factor: Tensor = (u @ vt).masked_fill(zero, 0.0).masked_fill(~finite, float("nan"))
    return factor


def make_orthogonalizer(func: str | NewtonSchulzFunc, *, steps: int = 5) -> NewtonSchulzFunc:
    """An orthogonaliser from its name or ``name/steps/dtype``; a ``func(input, epsilon)`` is returned as it is."""
    if isinstance(func, str):
        name, *details = func.split("/")
        if not details:
            return Orthogonalizer(name=name, steps=steps)
        dtype = getattr(torch, details[-1], None)
        if len(details) != 2 or not details[0].isdecimal() or not isinstance(dtype, torch.dtype):
            raise ValueError(f"an orthogonaliser is written name or name/steps/dtype (svd/5/float32), got {func!r}")
        return Orthogonalizer(name=name, steps=int(details[0]), dtype=dtype)
    if callable(func):
        return func
    raise TypeError(f"an orthogonaliser is one of the names {', '.join(NAMES)} or a callable, got {func!r}")


def input_dtype(func: NewtonSchulzFunc) -> torch.dtype:
    """Dtype in which matrices travel to ``func``: its own where it says so, else bfloat16 as in the references."""
    dtype = getattr(func, "dtype", torch.bfloat16)
    assert isinstance(dtype, torch.dtype)
    return dtype


def shows_gram(func: NewtonSchulzFunc) -> bool:
    """Whether ``func`` tells of what it is given."""
    return isinstance(func, Orthogonalizer) and func.shows_gram


def orthogonalize(func: NewtonSchulzFunc, input: Tensor, epsilon: float, show: Show | None = None) -> Tensor:
    """Call ``func``, with ``show`` where it takes it: functions of other authors know ``input`` and ``epsilon``."""
    if isinstance(func, Orthogonalizer):
        return func(input, epsilon=epsilon, show=show)
    return func(input, epsilon=epsilon)


def orthogonalize_all(
    func: NewtonSchulzFunc,
    whole: dict[int, Tensor],
    epsilon: float,
    dtype: torch.dtype,
    grams: dict[int, Gram] | None = None,
) -> dict[int, Tensor]:
    """Orthogonalise all owned matrices, which ``whole`` loses; those of equal shape as one batch where it is faster.

    Args:
        func: The orthogonaliser.
        whole: Matrices, or stacks of them, by number.
        epsilon: Of ``func``.
        dtype: Of the results.
        grams: Takes what ``func`` shows of each, by number; None: nobody looks.
    """
    alike: dict[tuple[torch.Size, int], list[int]] = {}
    for i, matrix in whole.items():
        alike.setdefault((matrix.shape, i if one_by_one(matrix) else -1), []).append(i)
    result: dict[int, Tensor] = {}
    for indices in alike.values():
        shown: list[Gram] = []
        show = None if grams is None else shown.append
        if len(indices) == 1:
            found = [orthogonalize(func, whole.pop(indices[0]), epsilon, show)]
        else:
            found = list(orthogonalize(func, torch.stack([whole.pop(i) for i in indices]), epsilon, show).unbind())
            shown = [part for batch in shown for part in unbound(batch)]
        result.update((i, u.to(dtype)) for i, u in zip(indices, found, strict=True))
        if grams is not None and shown:
            grams.update(zip(indices, shown, strict=True))
    return dict(sorted(result.items()))
