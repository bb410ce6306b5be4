"""The public functions for programs with their own training loop, and the models they return.

arguments.py         checks of arguments that need torch or transformers
batches.py           comparison of batches between the ranks that share a model
building.py          mesh, model on the meta device, weights, gradient clipping
calls.py             hooks and checks around every call of a model without a pipeline
check.py             the checks of a run before it starts
checkpoints.py       save_checkpoint and load_checkpoint
dropout.py           random streams of dropout in a program
gradients.py         sums of gradients over ranks after each backward pass
handle.py            the state that meshtrain keeps for a parallel model
loss.py              the stock loss as a mean over all data ranks
model.py             generate, and the methods of a parallel model without a pipeline
own_code.py          refusal of code of a program that a parallel model would not run
own_loss.py          what the loss of a class averages over
parallelize.py       parallelize
parts.py             calls of a model under context parallel
pipeline_batches.py  checks of the batches of a pipeline
pipelined_model.py   the model that parallelize returns with a pipeline
plan.py              the plan of a program, completed with its model and its mesh
rebind.py            rebind, for optimizers made before parallelize
saving.py            save_pretrained and save_parallelized
stock.py             which models parallelize takes
train.py             train, for a run file
values.py            transfer of parameters and buffers into the shards
"""
