"""Who may call, as which tenant, in which tiers, and how much."""
