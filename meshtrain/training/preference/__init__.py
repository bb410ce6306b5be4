"""Losses of whole answers that people have judged, and the reference that they compare with.

start: the start of a run, which gives its data what the reference says.
reference: log-probabilities of all answers by the model that a run starts from.
rows: log-probabilities of rows.
formulas: from log-probabilities to losses and rewards.
loss: the loss of the run.
others: ORPO, which needs no reference, and KTO, which needs no pairs.
"""
