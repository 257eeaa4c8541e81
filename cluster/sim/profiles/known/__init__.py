"""Hardware profiles and models that have a name."""
