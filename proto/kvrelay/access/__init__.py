"""Who may call a process of a cluster: its token, and TLS at both ends of a connection."""
