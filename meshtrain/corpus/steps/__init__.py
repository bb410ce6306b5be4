"""Steps of a corpus, and the parts that they consist of.

A step consists of passes over shards. A pass is a datatrove pipeline of blocks that several tasks
run.

chain      Builds the steps that a corpus file names.
step       A step, its directory and its counts.
blocks     The blocks and passes that all steps are built from.
executors  Runs a pass on this machine, on Slurm or on Ray.
shards     Reads and writes shards, the files between two steps.
reading    The step `read`: source files become shards.
records    Reads the records of source files.
clean      The step `clean`: text is repaired, and unwanted documents are dropped.
shuffle    The steps `shuffle` and `split`.
"""
