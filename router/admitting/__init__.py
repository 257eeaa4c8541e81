"""Policies that decide whether a request is taken now."""
