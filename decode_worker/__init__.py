"""Schedules sequences on a worker and takes their KV in. Pure."""
