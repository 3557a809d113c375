"""What was measured, and how people see it."""
