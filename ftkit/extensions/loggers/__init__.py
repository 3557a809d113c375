"""Loggers beside metrics.csv: TensorBoard, Weights & Biases, MLflow, Trackio."""

LIBRARIES = {"mlflow": "mlflow", "trackio": "trackio", "wandb": "wandb"}
"""Libraries that it uses where they are there, and the extra of ftkit that has each."""
