"""What every process needs of its host: CPUs, ports, logs, traces."""
