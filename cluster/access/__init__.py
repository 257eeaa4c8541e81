"""A cluster's token and key: the files that keep them, and the keys of cluster files about them."""
