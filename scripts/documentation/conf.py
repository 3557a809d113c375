"""Settings of Sphinx for the site of the documents."""

from pathlib import Path

from ftkit import __version__

project = "ftkit"
version = release = __version__
html_title = f"ftkit {__version__}"
extensions = ["myst_parser"]
myst_enable_extensions = ["attrs_block"]
source_suffix = {".md": "markdown"}
root_doc = "index"
myst_heading_anchors = 6  # as on GitHub, for links to headings
suppress_warnings = ["misc.highlighting_failure"]  # examples may have "..." where JSON has none
smartquotes = False  # options begin with two hyphens
highlight_language = "none"

html_theme = "furo"
html_static_path = [str(Path(__file__).parent / "static")]
html_css_files = ["site.css"]
html_copy_source = True  # llms.txt names the Markdown of each page
html_show_sourcelink = False
html_show_copyright = False
# The beginning of each page found would be fetched, which a browser refuses to pages from files.
html_show_search_summary = False
html_use_index = False
html_permalinks_icon = "#"
pygments_style = "tango"
pygments_dark_style = "monokai"

linkcheck_timeout = 20
linkcheck_anchors = False
