"""Records: what files and hub data sets hold, read into a few canonical shapes."""
