"""Names of `import ftkit` that the extension brings."""

from ftkit.python_names import PythonName

ROWS = [PythonName("compare", "ftkit.extensions.comparison.compare")]
