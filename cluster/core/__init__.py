"""What decides about a cluster: its plan, who is to run, what is started again. Pure."""
