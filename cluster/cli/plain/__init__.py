"""Single processes, without Ray."""
