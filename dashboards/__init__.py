"""Ready-made views of runs: the Weights & Biases workspace in ``wandb_workspace``. Importing them needs no account.

from scion_telemetry.dashboards.wandb_workspace import save, write_specification
"""
