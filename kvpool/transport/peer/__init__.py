"""Connections between two peers: handshake, control messages, exposed memory."""
