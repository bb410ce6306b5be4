"""Run, plan and corpus files: their settings, how they are read, and errors in them.

arguments.py     checks of arguments of the public functions
batch_ramp.py    settings of smaller batches at the start
combinations.py  tables of a run file that exclude each other
corpus.py        settings of a corpus file
data.py          settings of the data of a run
distillation.py  settings of a teacher
ema.py           settings of the average of the weights
evaluation.py    settings of tasks and generated texts
families.py      the shipped families of models
lora.py          settings of adapters
machine.py       settings of a machine file
mesh.py          the axes of the mesh and their degrees
objective.py     settings of the loss of tokens
optimizer.py     settings of the optimizer and its learning rate
parsing.py       text of TOML or JSON to values
path_rules.py    rules for the text of paths
paths.py         relative paths in files
plan.py          settings of a plan file
preference.py    settings of the loss of answers
problems.py      messages about errors in files and overrides
reading.py       files and the files that they extend
run.py           settings of a run file
schedules.py     the pipeline schedules and their requirements
schema.py        JSON schemas
settings.py      the base class of settings
tables.py        tables of values that know their source
toml.py          load_run, load_plan, load_corpus with overrides, and their reverse
"""
