"""The second composition root: the same cores on a virtual clock."""
