"""Names of `import ftkit` that the extension brings."""

from ftkit.python_names import PythonName

_MODULES = {
    "api": ("Run", "attach", "finetune", "finetune_full"),
    "experiments": ("Experiments",),
    "plans": ("Plans", "plan"),
    "previews": ("preview",),
    "results": ("Chat", "chat", "evaluate", "export", "generate", "merge", "push"),
}

ROWS = [
    PythonName(
        name, f"ftkit.extensions.notebook.{module}", "ftkit.extensions.notebook.loading:shown"
    )
    for module, names in _MODULES.items()
    for name in names
]
