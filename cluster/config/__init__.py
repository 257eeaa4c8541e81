"""Cluster files: YAML becomes strictly typed settings. Pure."""
