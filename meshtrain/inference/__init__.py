"""Inference: generate text with exported models and checkpoints, on any mesh.

prompts: continue prompts, for `meshtrain generate`.
loading: find and load a model to generate from.
generation: run transformers' `generate` on a parallel model, with equal arguments and draws on all
    its processes.
pipelined: a pipeline as one model, with a cache for each stage.
lora: export checkpoints of LoRA adapters.
evaluation: downstream tasks, for `meshtrain evaluate`.
harness: a distributed model as lm-evaluation-harness asks it.
run_evaluators: tasks and generated texts between the steps of a run.
"""
