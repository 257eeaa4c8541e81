"""A checkpoint's files, from workers that have them to one that starts."""
