"""Schedules prompts on a worker and sends their KV. Pure."""
