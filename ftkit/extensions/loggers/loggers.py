"""Loggers that ftkit has beside metrics.csv."""

from ftkit.recipe.loggers import LoggerRow

ROWS = (
    LoggerRow("tensorboard", "ftkit.extensions.loggers.tensorboard:make"),
    LoggerRow("wandb", "ftkit.extensions.loggers.wandb:make", has_service=True),
    LoggerRow("mlflow", "ftkit.extensions.loggers.mlflow:MlflowLogger", install="mlflow-skinny"),
    LoggerRow("trackio", "ftkit.extensions.loggers.trackio:TrackioLogger"),
)
