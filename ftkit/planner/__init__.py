"""`ftkit plan`: what a recipe will need, and what to change where it does not fit."""
