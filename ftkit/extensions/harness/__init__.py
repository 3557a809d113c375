"""Tasks of the lm-evaluation-harness, before and after training and of results."""

LIBRARIES = {"lm_eval": "tasks"}
MOVED = {"ftkit.evaluation.scorer": "scorer"}
