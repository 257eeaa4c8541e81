"""Tensor parallelism: one worker's model on several ranks, each a process of its own.

Rank 0 is the worker itself: it decides, samples and moves KV. The other ranks run its steps:
`leader` is rank 0's side, `follower` theirs. `split` cuts the model, `group` adds up the parts.
"""
