"""The import in a process of its own, which can be stopped."""

import sys
import tempfile

from ftkit.errors import UserError
from ftkit.extensions.foreign_checkpoints.commands import ImportOptions
from ftkit.utils.confinement import confined
from ftkit.utils.files import discard_partial
from ftkit.utils.yaml_files import STANDARD_INPUT


def import_confined(options: ImportOptions) -> int:
    """Run `import_run` of the module `command` in a child; return the exit code.

    A foreign checkpoint is read by torch and by formats of many programs, so no single check of
    ours could promise that a small file stays small.

    Raises:
        UserError: as `import_run` does, or the child has come to a limit; nothing is left behind.
    """
    source, out = options.source.expanduser(), options.out.expanduser()
    with tempfile.TemporaryFile() as given:
        if str(STANDARD_INPUT) in options.config:  # the child is not in the terminal's foreground
            given.write(sys.stdin.buffer.read())
            given.seek(0)
        try:
            code: int = confined(
                "ftkit.extensions.foreign_checkpoints.command:import_in_child",
                *(str(source), str(out)),
                *(options.config, options.overwrite, options.keys),
                file=source,
                stdin=given,
                shows_output=True,
            )
        except UserError:
            # The child may have been killed: this process removes what it left.
            discard_partial(out)
            raise
    return code
