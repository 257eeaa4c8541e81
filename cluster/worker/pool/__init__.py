"""A worker's side of the pool: its link to pool nodes and what moves over it."""
