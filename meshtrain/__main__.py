"""`python -m meshtrain` and `torchrun -m meshtrain` are the command line."""

from meshtrain.cli import main

main()
