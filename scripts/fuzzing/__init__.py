"""What scripts/fuzz damages, how, and what it looks at afterwards."""
