"""A worker's links to pool nodes, and for each a thread that moves blocks over it."""
