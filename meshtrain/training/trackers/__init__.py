"""Trackers: runs of Weights & Biases, MLflow and trackio that get the metrics of a run.

hook.py         the built-in hook that opens a tracker on rank 0, and passes the metrics on
tracker.py      what the hook needs of a tracker
packages.py     the check that the packages of the trackers are installed
identifiers.py  trackers.json: which run of each tracker belongs to a run directory
sender.py       a thread that sends points, for trackers that wait for a server
wandb_run.py    a run of Weights & Biases
mlflow_run.py   a run of MLflow
trackio_run.py  a run of trackio

TensorBoard's events are a file of the run directory, see meshtrain.training.metrics.
"""
