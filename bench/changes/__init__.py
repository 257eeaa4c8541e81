"""Live clusters that change under load: workers leave, change their role, are replaced."""
