"""When refused requests may come back, and what was promised to them. Pure."""
