"""Sweeps: runs that differ in a few keys, trained one after another or by Slurm, and compared.

choices: lists of values for keys, and their combinations.
runs: the run of each combination, and the check of all of them before any begins.
slurm: the script of an array job.
outcome: what each run has reached.
comparison: the table and the page.
command: what `meshtrain sweep` does.
"""
