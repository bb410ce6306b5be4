"""Pipeline schedules: their requirements, and messages between stages without a backward pass.

forward_only: passes hidden states from stage to stage in a forward pass alone.
schedules: the requirements of torch's schedules, and the process of each stage.
"""
