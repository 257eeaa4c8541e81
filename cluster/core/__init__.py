"""What decides about a cluster: its plan, which processes shall run, which are restarted. Pure."""
