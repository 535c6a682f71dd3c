"""`python -m pipecompile`, and so `torchrun -m pipecompile`, is the command line."""

from pipecompile.cli import main

main()
