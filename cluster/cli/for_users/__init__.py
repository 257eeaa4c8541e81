"""The commands of those who use a cluster: `chat`, `batch`, and `models`."""
