"""Services that take the values of a run: MLflow and Trackio, as loggers of Lightning's kind."""
