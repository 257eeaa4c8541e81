"""Parts of bodies, at any depth: strict, and told apart by their type."""
