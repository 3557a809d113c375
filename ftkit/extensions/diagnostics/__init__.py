"""The report of a run shown again, and what a bug report needs: ftkit report."""
