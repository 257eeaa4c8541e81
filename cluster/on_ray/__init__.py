"""A cluster on Ray: actors, controller, launch."""
