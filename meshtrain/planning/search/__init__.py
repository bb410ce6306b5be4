"""Which plan trains a run fastest on some GPUs.

alternatives: the plans that people usually take.
candidates: all plans that come into question.
command: what `meshtrain search` does.
estimate: memory and seconds of a candidate in closed form.
kinds: what the layers of each kind of candidates need.
layers: what one layer needs, from a simulated step.
parts: what layers and heads need, for any number of sequences.
ranking: candidates from the fastest to the slowest.
reasons: why a plan loses.
sizes: the parameters of a model, and of its pp ranks.
update: what an update of the parameters needs, in closed form.
wanted: the run whose plan is searched.
"""
