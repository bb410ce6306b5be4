"""Hugging Face models: how to build, check, initialize and load them, and facts about their parts.

adapters: LoRA layers of peft, taken off a model and put back.
build: the configuration and the stock model on the meta device.
constructed: the values that the constructor of a model gives its tensors.
copying: a deep copy of a model.
dora: adapters that also learn the length of each row of a weight.
dtypes: number formats and their names.
flops: floating-point operations, counted from the structure of a model.
fused: fused projections, which are kept in parts.
initialize: random initialization that is the same on every mesh.
init_rules: rules of initialization, of which every process keeps its part.
layer_config: the configuration of a single layer.
layout: the part of a global tensor that a process holds.
lora: LoRA layers that a run asks for.
own_code: classes whose code came with their model.
packed: frozen weights in four bits.
patterns: module patterns of a plan.
positions: positions of elements in global tensors, and numbers that depend on nothing else.
probe_inputs: the inputs of a forward pass that finds out what a model does.
refusals: errors of transformers and torch for a configuration.
rotary: rotary modules whose frequencies depend on the sequence length.
saved_modules: modules of a frozen model that train in full.
ties: a check of tied weights.
tiles: random numbers for a sharded tensor.
tiny: tiny configurations of a model class that still have every part of it.
tiny_sizes: the sizes of tiny configurations.
undeclared: configuration values that transformers uses without declaring them.
values: a check of configuration values.
weights: pretrained weights from safetensors files.
whole: multimodal models, of which only the language half is trained.
"""
