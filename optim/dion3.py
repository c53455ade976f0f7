"""Dion3 (NorDion2): Dion2 on rows, with every selected row normalised by a running mean of its squares."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .algorithm import Work
from .dion2 import Dion2, Dion2Algorithm
from .options import Check
from .orthogonalize import NewtonSchulzFunc
from .selection import put_, take


class Dion3Algorithm(Dion2Algorithm):
    """The rule of Dion3; ``algorithm="dion2"`` in the groups of a ``Dion3`` optimizer."""

    checks: Mapping[str, Check] = {
        **Dion2Algorithm.checks,
        "select_dim": (lambda v: v == "rows", "'rows': a normaliser belongs to a row"),
        "muon_beta2": (lambda v: 0 <= v < 1, "in [0, 1)"),
    }

    def __init__(self, muon_beta2: float = 0.95) -> None:
        self.defaults = {**Dion2Algorithm.defaults, "select_dim": "rows", "muon_beta2": muon_beta2}

    def prepare(self, param: Tensor, options: Mapping[str, Any]) -> dict[str, Tensor]:
        """The momentum, and a running mean of squares for every row."""
        state = super().prepare(param, options)
        layout, dims = self.view(param, options)
        if dims.columns in layout.sharded_dims:
            raise ValueError(
                f"Dion3 normalises whole rows, and the layout ({layout.describe()}) cuts them; use Dion2, or cut rows"
            )
        return {**state, "variance": _rows_of(param)}

    def _normalize(self, work: Work, directions: tuple[Tensor, ...], indices: list[Tensor]) -> tuple[Tensor, ...]:
        """U / (√v + 1e-8), v <- lerp(v, mean U², 1 - β₂), rescaled to the Frobenius norm of this rank's rows of U."""
        beta2, normal = float(work.options["muon_beta2"]), []
        for u, i, variance in zip(directions, indices, work.buffers("variance"), strict=True):
            rows = u.to(torch.promote_types(u.dtype, torch.float32))
            mean = torch.lerp(take(variance, i, -2).to(rows.dtype), rows.square().mean(dim=-1, keepdim=True), 1 - beta2)
            put_(variance, i, -2, mean.to(variance.dtype))
            scaled = rows / (mean.sqrt() + 1e-8)
            before, after = (x.norm(dim=(-2, -1), keepdim=True) for x in (rows, scaled))
            normal.append(scaled * (before / after.clamp(min=1e-30)))
        return tuple(normal)


class Dion3(Dion2):
    """Dion3, also called NorDion2: Dion2 with a neuron-wise normaliser. The top-k of rows is by **L1 norm**.

        M <- M + G,  U = orth(M[K]),  M[K] <- mu M[K],  v[K] <- lerp(v[K], mean U², 1-β₂),  Û = U/√v · ‖U‖_F/‖Û‖_F

    then W <- (1 - lr wd) W, W[K] <- W[K] - lr_adj Û. The rescaling is over the rows of a rank, as in the reference, so
    that it depends on how rows are cut.

    Args:
        params: As of Dion2.
        distributed_mesh: As of Dion2.
        lr: As of Dion2.
        fraction: As of Dion2.
        mu: Decay of the selected momentum, in [0, 1].
        muon_beta2: Of the running mean of squares, in [0, 1).
        **options: As of Dion2, without select_dim.

    Source: arXiv 2608.11612; microsoft/dion, NorDion2.
    """

    def __init__(
        self,
        params: Iterable[Any],
        distributed_mesh: DeviceMesh | dist.ProcessGroup | None = None,
        lr: float = 0.01,
        fraction: float = 0.25,
        mu: float = 0.95,
        muon_beta2: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.01,
        epsilon: float = 1e-8,
        adjust_lr: str | None = "spectral_norm",
        newton_schulz_func: str | NewtonSchulzFunc = "polar_express",
        selection_scope: str = "local",
        **options: Any,
    ) -> None:
        self._muon_beta2 = muon_beta2
        super().__init__(
            params,
            distributed_mesh,
            lr=lr,
            fraction=fraction,
            ef_decay=mu,
            betas=betas,
            weight_decay=weight_decay,
            epsilon=epsilon,
            adjust_lr=adjust_lr,
            newton_schulz_func=newton_schulz_func,
            selection_scope=selection_scope,
            select_dim="rows",
            **options,
        )

    def _rule(self) -> Dion2Algorithm:
        return Dion3Algorithm(self._muon_beta2)


NorDion2 = Dion3


def _rows_of(param: Tensor) -> Tensor:
    """Zeros ``[..., m, 1]`` with the placements of ``param``."""
    if not isinstance(param, DTensor):
        return param.new_zeros(*param.shape[:-1], 1)
    piece = param.to_local().new_zeros(*param.to_local().shape[:-1], 1)
    shape = torch.Size((*param.shape[:-1], 1))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(piece, param.device_mesh, param.placements, run_check=False, shape=shape, stride=stride)
