"""Object storage: urls as working directories, files sent there and fetched, reading by ranges."""
