"""Everything that must be seen on a CUDA device, in one command of half an hour at most."""
