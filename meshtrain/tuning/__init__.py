"""Several short or similar runs, from which a user chooses settings.

sweep   runs that differ in a few keys, trained and compared
rates   the learning rates at which the loss of a run falls
"""
