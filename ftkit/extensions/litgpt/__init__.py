"""Models computed by LitGPT's code, directories in its layout, prompt styles."""

LIBRARIES = {"litgpt": "pip install --no-deps litgpt"}
MOVED = {
    "ftkit.models.architectures.families": "families",
    "ftkit.models.architectures.litgpt_architecture": "architecture",
    "ftkit.models.bodies.litgpt_body": "body",
}
