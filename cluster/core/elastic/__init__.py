"""How many workers of each role the offered work needs, and when to change roles. Pure."""
