"""AdamW and Lion for the parameters that are no matrices, on torch's own fused and foreach kernels."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from .algorithm import Work
from .events import ParamFacts, StepSettings
from .grid import Dims, Grid
from .layout import Layout
from .options import BETAS, FLAG, NOT_NEGATIVE, POSITIVE, Check

_CHECKS: Mapping[str, Check] = {
    "lr": NOT_NEGATIVE,
    "betas": BETAS,
    "weight_decay": NOT_NEGATIVE,
    "epsilon": POSITIVE,
    "cautious_wd": FLAG,
}
_DEFAULTS: Mapping[str, Any] = {
    "lr": 0.01,
    "betas": (0.9, 0.95),
    "weight_decay": 0.01,
    "epsilon": 1e-8,
    "cautious_wd": False,
}


class AdamWAlgorithm:
    """AdamW with decoupled weight decay; ``algorithm="adamw"``."""

    name = "adamw"
    defaults = _DEFAULTS
    checks = _CHECKS
    own: frozenset[str] = frozenset()

    def prepare(self, param: Tensor, options: Mapping[str, Any]) -> dict[str, Tensor]:
        """First and second moment, and a float32 step counter (a bfloat16 one would stop at 256)."""
        step = torch.zeros((), dtype=torch.float32, device=param.device)
        return {"momentum": torch.zeros_like(param), "variance": torch.zeros_like(param), "step": step}

    def facts(self, param: Tensor, grid: Grid, options: Mapping[str, Any]) -> ParamFacts:
        """Shows nothing: its update never exists as a tensor of its own."""
        return ParamFacts(algorithm=self.name)

    def settings(self, options: Mapping[str, Any]) -> StepSettings:
        """Learning rate and decay; its steps have one length in no metric."""
        return StepSettings(lr=float(options["lr"]), decay=float(options["weight_decay"]))

    def view(self, param: Tensor, options: Mapping[str, Any]) -> tuple[Layout, Dims | None]:
        """Entries are stepped one by one, in any layout."""
        return Layout.of(param), None

    def step(self, work: Work) -> Iterator[None]:
        """One fused AdamW step of all parameters."""
        options = work.options
        momenta, variances = list(work.buffers("momentum")), list(work.buffers("variance"))
        cautious, decay = options["cautious_wd"], float(options["weight_decay"])
        before = [w.clone() for w in work.weights] if cautious else []
        # The kernel takes one dtype: that of the moments, which a checkpoint may have brought along.
        weights, grads = (
            [x.to(m.dtype) for x, m in zip(xs, momenta, strict=True)] for xs in (work.weights, work.grads)
        )
        adamw(
            weights,
            grads,
            momenta,
            variances,
            [],
            [state["step"] for state in work.states],
            fused=True,
            amsgrad=False,
            beta1=float(options["betas"][0]),
            beta2=float(options["betas"][1]),
            lr=float(options["lr"]),
            weight_decay=0.0 if cautious else decay,
            eps=float(options["epsilon"]),
            maximize=False,
        )
        for w, stepped in zip(work.weights, weights, strict=True):
            if stepped is not w:
                w.copy_(stepped)
        if cautious:
            for w, old, m in zip(work.weights, before, momenta, strict=True):
                w.sub_(old * (m * old >= 0), alpha=float(options["lr"]) * decay)
        yield from ()


class LionAlgorithm:
    """Lion (arXiv 2302.06675): the sign of an interpolated momentum; ``algorithm="lion"``."""

    name = "lion"
    defaults = _DEFAULTS
    checks = _CHECKS
    own: frozenset[str] = frozenset()

    def prepare(self, param: Tensor, options: Mapping[str, Any]) -> dict[str, Tensor]:
        """The momentum."""
        return {"momentum": torch.zeros_like(param)}

    def facts(self, param: Tensor, grid: Grid, options: Mapping[str, Any]) -> ParamFacts:
        """Shows nothing."""
        return ParamFacts(algorithm=self.name)

    def settings(self, options: Mapping[str, Any]) -> StepSettings:
        """Learning rate and decay; as AdamW."""
        return StepSettings(lr=float(options["lr"]), decay=float(options["weight_decay"]))

    def view(self, param: Tensor, options: Mapping[str, Any]) -> tuple[Layout, Dims | None]:
        """Entries are stepped one by one, in any layout."""
        return Layout.of(param), None

    def step(self, work: Work) -> Iterator[None]:
        """u = sign(lerp(m, g, 1-β₁));  m <- lerp(m, g, 1-β₂);  W <- (1 - lr wd) W - lr u."""
        options = work.options
        lr, decay = float(options["lr"]), float(options["weight_decay"])
        beta1, beta2 = options["betas"]
        for w, g, m in zip(work.weights, work.grads, work.buffers("momentum"), strict=True):
            g = g.to(m.dtype)
            update = torch.lerp(m, g, 1 - beta1).sign_()
            m.lerp_(g, 1 - beta2)
            if options["cautious_wd"]:
                w.sub_(w * (update * w >= 0), alpha=lr * decay)
            else:
                w.mul_(1 - lr * decay)
            w.add_(update, alpha=-lr)
        yield from ()
