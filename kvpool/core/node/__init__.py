"""What a pool node decides: its tiers, its stores and its fetches."""
