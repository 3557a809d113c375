"""Object storage: urls as working directories, upload and download, reading by ranges."""
