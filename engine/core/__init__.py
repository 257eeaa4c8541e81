"""What schedulers and the simulator need of an engine: steps, step times, sizes. Pure."""
