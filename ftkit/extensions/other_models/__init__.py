"""Models beside the trained one: the reference of preference objectives, teachers."""

MOVED = {
    "ftkit.evaluation.references": "references",
    "ftkit.models.divergence": "divergence",
    "ftkit.models.pretrained.second_model": "second_model",
    "ftkit.objectives.reference": "reference",
    "ftkit.objectives.reference_values": "reference_values",
}
