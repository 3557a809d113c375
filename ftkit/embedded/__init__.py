"""Files that come with ftkit, so that a first run needs no download.

`quickstart` holds a tiny base model in Hugging Face layout (`model/`) and instructions in Alpaca
format (`data/train.json`, `data/val.json`). The scripts `make_quickstart_model` and
`make_quickstart_data` make them.
"""

from pathlib import Path


def path(name: str) -> Path:
    """The directory of the embedded set `name`, whether or not its files have been made."""
    return Path(__file__).parent / name
