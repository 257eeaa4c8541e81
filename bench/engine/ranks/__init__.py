"""Several processes for one model: by heads, and by layers."""
