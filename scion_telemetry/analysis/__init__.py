"""What a run's telemetry says, offline: which fraction Dion2 should select, and why. Imports no torch.

    from scion_telemetry import load_run
    from scion_telemetry.analysis import advise

    print(advise(load_run("runs/a")).to_frame())

Dion2's top-k is by the L1 norm of the momentum's rows (or columns); so is everything here.
"""

from .advise import advise, advise_matrix, predicted_age, predicted_frequency
from .calibration import calibration_snippet
from .limits import Limits
from .records import CANDIDATES, Advice, Candidate, Evidence, GroupAdvice, MatrixAdvice

__all__ = [
    "CANDIDATES",
    "Advice",
    "Candidate",
    "Evidence",
    "GroupAdvice",
    "Limits",
    "MatrixAdvice",
    "advise",
    "advise_matrix",
    "calibration_snippet",
    "predicted_age",
    "predicted_frequency",
]
