"""Measure the machine at hand, and describe it in a file.

calls: the operators of a run, with the shapes of what they are called with.
command: what `meshtrain calibrate` does.
gpu_calls: the same as a GPU makes them.
messages: how long collectives take.
operators: how long operators take.
overhead: what a step costs besides its operators.
"""
