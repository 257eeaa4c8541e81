"""What every process needs of its host: CPUs, ports, logs, traces."""

from time import monotonic

FIRST_LINE_S = monotonic()
"""When this process came to kvrelay's first line."""
