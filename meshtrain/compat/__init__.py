"""Private interfaces of other libraries that meshtrain uses, one module per library or part of it.

Each docstring has two lines: Why (the interface is needed) and Holds (the versions it was checked
with). `tests/compat` fails when a library changes.

autograd.py        torch's autograd and dispatcher
casts.py           float64 in modeling code that casts to float32
causal_head.py     a causal LM class of transformers for a text model
compile.py         torch.compile
cuda.py            the record of what CUDA's allocator does
datatrove.py       the executor of datatrove
dcp.py             torch's distributed checkpoints
distributed.py     torch.distributed: process groups, flight recorder, pipelines, DDP
dtensor.py         torch's DTensor
fake.py            fake tensors and a fake process group
fake_operators.py  operators on fake tensors
fsdp.py            torch's FSDP2
initialization.py  the initialization rules of transformers
nn.py              torch.nn modules
numpy.py           memory-mapped arrays
operators.py       operators of torch
operators_seen.py  what an observer of operators must know about them
peft.py            objects of peft
schedules.py       torch's pipeline schedules
transformers.py    models, classes and configurations of transformers
varlen.py          torch's attention of sequences of different lengths
weight_readers.py  which weights a class reads itself, by its source
"""
