"""Learning the distributions of another model, the teacher."""

MOVED = {"ftkit.objectives.distillation": "distillation"}
