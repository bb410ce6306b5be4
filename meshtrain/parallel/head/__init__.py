"""Head and loss in chunks of tokens, so that all logits of a microbatch never exist at once.

Modules:
    apart: the head of a frozen model, which runs later than its base model.
    chunks: the pass of a model whose head runs in chunks.
    gradients: the loss of chunks, with its gradients.
    proof: whether the head of a class may run in chunks, found out on a tiny copy.
    size: the number of tokens of a chunk.

The forward of the class makes the logits. For a chunk it runs again, around a base model that
returns a few of the hidden states that it has computed before. So scales, caps, casts, biases and
projections between the base model and the logits are those of the class, whatever they are.

The base model is the outermost module around the decoder layers that the forward of the class
calls: `model.model` of a Llama, `model.transformer` of a GPT-2, `model.model.decoder` of an OPT.
"""
