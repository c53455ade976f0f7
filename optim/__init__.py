"""Distributed Scion and Dion2. Needs torch alone, and works as a folder of its own in another repository.

Everything that a step computes can be observed (``register_step_observer``) at no cost when nobody does.
"""

from .dion2 import Dion2
from .dion3 import Dion3, NorDion2
from .events import Gram, ParamFacts, Selection, StepEvent, StepSettings, register_step_observer
from .fraction import set_fraction
from .groups import ParamGroups, group_params, infer_roles
from .layout import Layout
from .orthogonalize import Orthogonalizer, make_orthogonalizer
from .scion import Scion, ScionLight

__all__ = [
    "Dion2",
    "Dion3",
    "Gram",
    "Layout",
    "NorDion2",
    "Orthogonalizer",
    "ParamFacts",
    "ParamGroups",
    "Scion",
    "ScionLight",
    "Selection",
    "StepEvent",
    "StepSettings",
    "group_params",
    "infer_roles",
    "make_orthogonalizer",
    "register_step_observer",
    "set_fraction",
]
