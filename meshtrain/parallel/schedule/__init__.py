"""Pipeline schedules: the processes of stages, and messages without a backward pass.

forward_only: passes hidden states from stage to stage in a forward pass alone.
schedules: the process of each stage.
"""
