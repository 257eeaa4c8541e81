"""What routers report, followed: one open call of Admin.Watch for each."""
