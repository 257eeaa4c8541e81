"""Threads, streams, rank groups and compiled code of one device."""
