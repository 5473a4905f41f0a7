"""Files that commands write at their end, asked for before they begin."""

import argparse
from pathlib import Path


def output_file(text: str) -> Path:
    """An option's path, as argparse's `type`. Raises its usage error where no file can be there."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no file in a folder that exists")
    return path
