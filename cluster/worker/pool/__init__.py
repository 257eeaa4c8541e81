"""A worker's links to pool nodes, and the thread that moves blocks over them."""
