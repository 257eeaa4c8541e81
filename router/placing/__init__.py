"""Policies that choose workers for a request."""
