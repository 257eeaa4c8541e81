"""QoS tiers of a live cluster, at several loads."""
