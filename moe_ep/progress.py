"""Progress of what takes long, on stderr, so that stdout stays a command's own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, ProgressColumn


@contextmanager
def progress_bar(
    description: str, total: int, *columns: str | ProgressColumn, is_shown: bool = True
) -> Iterator[Callable[[int], object]]:
    """Yields `advance(amount done)`; draws a bar (rich's, or these columns) if it `is_shown`."""
    if not is_shown:
        yield lambda amount: None
        return
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(description, total=total)
        yield lambda amount: progress.advance(task, amount)
