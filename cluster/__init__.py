"""Puts the parts together: processes, configuration, commands, simulation."""

from cluster.process import FIRST_LINE_S as FIRST_LINE_S
