"""Numbers of a matrix that its first Newton-Schulz step has at hand: traces of powers of its Gram matrix.

    X = M / ‖M‖_F,  A = X Xᵀ,  tr A = 1:    tr A² = ‖A‖_F²,  tr A³ = <A, A²>,  tr A⁴ = ‖A²‖_F²

All are reductions over r × r entries, r being the shorter side, and take no matrix product of their own.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .events import Gram

Show = Callable[[Gram], None]


def gram_of(product: Tensor, squared: Tensor | None, divisor: Tensor, factor: float = 1.0) -> Gram:
    """Traces from what an iteration holds, in float32 at least.

    Dividing by tr A makes the meaning exact whatever the iteration divided by: a headroom, an epsilon, a rounded norm.

    Args:
        product: ``Y Yᵀ`` of ``Y = M / divisor``, ``[..., r, r]``.
        squared: ``factor`` times its square; None where the iteration never forms that by itself.
        divisor: ``[..., 1, 1]``.
        factor: Factor on ``squared``.
    """
    dtype = torch.promote_types(product.dtype, torch.float32)
    trace = product.diagonal(dim1=-2, dim2=-1).sum(dim=-1, dtype=dtype)
    second = _size(product, dtype) / trace
    third = fourth = None
    if squared is not None:
        # Scalars are divided one trace at a time: the powers of a tiny one would underflow.
        inner = squared.to(dtype, copy=True).mul_(product).sum(dim=(-2, -1))
        third = inner / factor / trace / trace / trace
        fourth = (_size(squared, dtype) / factor / trace / trace).square()
    frobenius = trace.sqrt() * divisor.to(dtype)[..., 0, 0]
    return Gram(frobenius=frobenius, trace2=second.square(), trace3=third, trace4=fourth)


def stacked(parts: Sequence[Gram]) -> Gram:
    """The numbers of many as those of a stack."""
    return Gram(
        frobenius=torch.stack([p.frobenius for p in parts]),
        trace2=torch.stack([p.trace2 for p in parts]),
        trace3=_stack([p.trace3 for p in parts]),
        trace4=_stack([p.trace4 for p in parts]),
    )


def unbound(gram: Gram) -> list[Gram]:
    """The numbers of a stack, one by one."""
    columns = (gram.frobenius, gram.trace2, gram.trace3, gram.trace4)
    rows = zip(*([None] * len(gram.trace2) if c is None else c.unbind() for c in columns), strict=True)
    return [Gram(frobenius=f, trace2=t2, trace3=t3, trace4=t4) for f, t2, t3, t4 in rows]


def _size(x: Tensor, dtype: torch.dtype) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1), dtype=dtype)
    return found


def _stack(parts: Sequence[Tensor | None]) -> Tensor | None:
    present = [p for p in parts if p is not None]
    return torch.stack(present) if present else None
