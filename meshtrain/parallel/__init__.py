"""The parallel model.

account: stages, layers, parameters and bytes of every process under a plan.
borders: the shapes of what stages receive, send and return.
build: builds it from a stock model, in the one order that is correct.
check: whether a plan fits the model, the batches and the number of processes.
context: context parallelism.
cut: pipeline stages of an unmodified model.
documents: attention of packed documents, without a mask of all pairs of a row.
head: head and loss in chunks of tokens, and a head that runs later.
experts: expert parallelism.
execution: recomputation and compilation of the decoder layers.
float8: matrix products of linear layers in float8.
local_parameter: the local parts of DTensor parameters, as a stock optimizer needs them.
matrices: the matrices of the layers, for optimizers that update them as a whole.
moment_blocks: whether a plan leaves blocks of the moments of an optimizer whole.
packing: a frozen model in four bits under a plan.
pipeline: the parallel model as the training step uses it.
pretrained: pretrained weights for the shards of a pipeline.
randomness: random streams for dropout.
recorded_stage: the stage of torch's schedules.
replicas: sums of gradients over full copies of the model.
rotary_length: the longest sequence of a batch, for rotary frequencies that depend on it.
routers: the losses of routers, and the biases with which they select experts.
schedule: the process of each stage, and the messages of a forward pass without a backward pass.
sent_messages: what a stage has sent, and the memory of what has arrived.
shard: FSDP2 over the data-parallel axes.
stage_attention: the attention of a stage, where it is not only the model's own.
tensor: tensor and sequence parallelism.
tied: tied embeddings on two stages.
tiny_copy: configurations of tiny copies with every kind of layer.
tiny_model: tiny copies that compute.
targets: the labels that a loss of transformers takes.
tokens: a check of token ids.
torch_schedule: the torch schedule of a pipeline, for each shape of its batches.
transposable: collectives with gradients.
"""

from meshtrain.parallel.build import build_pipeline

__all__ = ["build_pipeline"]
