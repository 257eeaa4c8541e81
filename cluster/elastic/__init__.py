"""Roles that follow the offered work, of workers that run: asks routers, decides, flips."""
