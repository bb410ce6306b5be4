"""Proofs that a plan computes what one device computes, on a tiny copy of the model in float64.

case.py        what is proven: the tiny model, its plan and its batches
classes.py     `meshtrain verify --models`: every class of transformers
compare.py     comparison of the plan's training with that of the stock model
dropout.py     proof of tensor parallelism with dropout
first_use.py   proof before the first run of an unknown class
parallel.py    training of the plan on ranks
prove.py       a proof: both sides are trained and compared
record.py      the flags of model types that are proven
reference.py   training of the stock model in one process
routers.py     z-loss and selection biases of the stock model
rounding.py    what rounding alone changes in the stock model
shrink.py      small meshes and plans
tiny.py        tiny configurations
variants.py    flags of a configuration, and variants that cover them in pairs
verify_run.py  `meshtrain verify RUN`
"""
