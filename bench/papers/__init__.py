"""Published results beside ours. Each program takes the path of its data."""
