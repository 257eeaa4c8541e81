"""Puts the parts together: processes, configuration, commands, simulation."""
