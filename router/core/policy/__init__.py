"""Placement and admission: which workers a request gets, and whether it is taken. Pure."""
