"""A checkpoint becomes a model whose attention is ours."""
