"""Reports: what a run measured, and the table that people see."""
