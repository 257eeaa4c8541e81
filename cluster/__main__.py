"""`python -m cluster`: the `kvrelay` command where only the source tree is at hand."""

from cluster.cli.main import main

main()
