"""Names of the files of a run directory. This module loads no torch."""

RUN_NAME, PLAN_NAME, METRICS_NAME = "run.toml", "plan.toml", "metrics.jsonl"
SAVED_KEY = "checkpoint"
"""Key in metrics.jsonl: location of a checkpoint, written when the checkpoint is complete."""
