"""Which plan trains a run fastest on some GPUs.

candidates: all plans that come into question.
command: what `meshtrain search` does.
estimate: memory and seconds of a candidate in closed form, from a few simulated layers.
layers: the simulated layers.
ranking: the best candidates, simulated.
"""
