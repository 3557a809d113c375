"""The program whose tasks this extension runs."""

from ftkit.evaluation.task_programs import TaskProgram

ROWS = (
    TaskProgram(
        name="lm-evaluation-harness",
        find="ftkit.extensions.harness.tasks:find_tasks",
        load="ftkit.extensions.harness.harness:TaskSet",
        scorer="ftkit.extensions.harness.scorer:Scorer",
    ),
)
