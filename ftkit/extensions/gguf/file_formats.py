"""The format of base models that this extension reads."""

from ftkit.models.pretrained.single_file import FileFormat

ROWS = (FileFormat("gguf", "GGUF", ".gguf", "ftkit.extensions.gguf.convert"),)
