"""Exchange with other programs: import, merge, export and push."""
