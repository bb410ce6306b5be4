"""Samples: rows of tokens and labels, their order, and the batches of each rank.

rows            Cuts samples from token files.
stream_rows     Cuts rows from text that is tokenized during training.
stream          Numbers and shuffles the samples of a stream.
order           Assigns samples to steps.
mixture         Assigns the samples of several sources to steps.
ramp            Leaves samples out of the first steps of a run.
answers         Pairs judged answers.
referenced      Joins samples with what a reference model says about them.
weights         Keeps the weight of a token in its label.
dataset         Builds the samples and the order of a run.
loader          Reads batches as torch tensors in a background thread.
"""
