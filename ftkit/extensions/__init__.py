"""Extensions: what few runs need, each a folder beside the core, which never imports it.

The core finds what an extension brings in modules named after registries (`ftkit.utils.registry`):
``commands.py`` has its commands.
"""
