"""Progress of long analyses: a bar on a terminal or in a notebook, and lines elsewhere.

1. The outermost analysis, or loop, opens a display in its context. Analyses and loops inside it
   open no further display.
2. A loop counts its steps, at the cost of one addition per step. Only the outermost loop is shown.
   If an analysis runs a loop with the same title again, the display adds its steps to the steps of
   the earlier loops. The total is then unknown, and the display shows no share.
3. A thread draws the count: first after two seconds, then twice per second. So a bar also appears
   during a long step.
4. If standard error is a file or a pipe, the thread writes lines to it instead: after 10 seconds,
   and then after longer and longer times. A line contains the share that is done, and an estimate
   of the time that is left.
5. The end of the analysis, or an error in it, closes the display, and the thread removes the bar.
"""

import functools
import multiprocessing
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, ParamSpec, Protocol, TypeVar, runtime_checkable

from hooks.base.decorators import explains_calls
from hooks.base.scoped import Scoped

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

DELAY = 2.0
"""The seconds until a bar appears."""

EVERY = 0.5
"""The seconds between two frames."""

TIMES_OF_LINES = (10, 30, 60)
"""The seconds after which the first lines are written.

Each later line is written after twice the time, but at least once per hour.
"""

_LONGEST_WAIT = 3600

# The number of columns after a bar.
_ROOM = 4

# The number of columns of a bar in a notebook.
_COLUMNS_OF_CELL = 70


class Count:
    """The completed steps of a loop. A call adds steps.

    Args:
        title: the title of the bar.
        total: the number of steps, or the amount of work; None if it is unknown.
        unit: the name of a step. If it is empty, the bar shows only the title and the time. If it
            is `tok`, large counts are abbreviated, as in 12.3k.
        first: the number of steps that were completed before.
        stays: whether the bar appears immediately and is not removed at the end.

    Attributes:
        done: the completed steps, or the completed work.
        before: the completed steps of earlier loops of the same analysis with this title; None if
            this is the first loop.
        note: a text after the bar.

    >>> count = Count("texts", total=3)
    >>> count()
    >>> count(2)
    >>> count.done
    3
    """

    def __init__(
        self,
        title: str,
        total: float | None = None,
        *,
        unit: str = "it",
        first: int = 0,
        stays: bool = False,
    ) -> None:
        self.title = title
        self.total = total
        self.unit = unit
        self.first = first
        self.stays = stays
        self.done: float = first
        self.before: float | None = None
        self.note = ""
        self.started = time.time()

    def __call__(self, steps: float = 1) -> None:
        """Add completed steps."""
        self.done += steps

    @property
    def shown(self) -> float:
        """The steps on the display: of this loop and of earlier loops with its title."""
        return self.done + (self.before or 0)

    @property
    def total_shown(self) -> float | None:
        """The total on the display; None if it is unknown, or if the analysis repeats the loop."""
        return self.total if self.before is None else None

    @property
    def rate(self) -> float:
        """The number of steps per second so far."""
        return (self.done - self.first) / max(time.time() - self.started, 1e-9)


class Display:
    """One line for the outermost analysis of a context, drawn by a thread.

    Args:
        whole: the count of the whole analysis, which is shown while no loop counts.
        screen: the place of the bar.

    Attributes:
        count: the loop that is shown.
    """

    def __init__(self, whole: Count, screen: "_Screen") -> None:
        self.whole = whole
        self.count: Count | None = None
        self.screen = screen
        self._done: dict[str, float] = {}
        self._closed = threading.Event()
        # The thread does not keep the display alive. If the display disappears, for example after
        # an interrupt, the thread ends.
        arguments = (weakref.ref(self), self._closed, screen, screen.waits(whole.stays))
        self._thread = threading.Thread(target=_draw, args=arguments, daemon=True)
        self._thread.start()

    def begin(self, count: Count) -> None:
        """Show a loop. It continues the count of an earlier loop with the same title."""
        count.before = self._done.get(count.title)
        self.count = count

    def end(self, count: Count) -> None:
        """Show the whole analysis again after a loop, and keep the number of its steps."""
        self._done[count.title] = count.shown
        self.count = None

    def close(self) -> None:
        """Remove the bar. No further text is written."""
        self._closed.set()
        self._thread.join()


_OPEN: Scoped[Display | bool] = Scoped("progress", True)
"""The display of a context or, without a display, whether the context may open one."""


@contextmanager
def progress_bar(title: str, total: float | None = None, **options: Any) -> Iterator[Count]:
    """Count the steps of a loop, and show a bar unless a loop around this loop already has one.

    Args:
        title: the title of the bar.
        total: the number of steps, or the amount of work; None if it is unknown.
        options: the other arguments of `Count`, such as `unit`.

    >>> with progress_bar("texts", total=3) as count:
    ...     for text in range(3):
    ...         count()
    >>> count.done
    3
    """
    count = Count(title, total, **options)
    outer = _OPEN.get()
    with _display(count) as display:
        ours = display if display and display.count is None else None
        if ours:
            ours.begin(count)
        try:
            yield count
        finally:
            # The display belongs to an analysis around this loop, whose next loop may use it.
            if ours and ours is outer:
                ours.end(count)


def progress_of(items: Iterable[T], title: str, total: int | None = None) -> Iterator[T]:
    """Yield items and count them. An item is complete when the next item is read.

    If an error stops the reading before the last item, this function does not remove the bar. So
    the analysis that reads the items must have the decorator `shows_progress`, which does.

    >>> [*progress_of([3, 1], "numbers", total=2)]
    [3, 1]
    """
    with progress_bar(title, total) as count:
        for item in items:
            yield item
            count()


def shows_progress(analysis: Callable[P, R]) -> Callable[P, R]:
    """Return an analysis that shows its progress, unless its keyword `progress` is False."""

    explained = explains_calls(analysis)

    @functools.wraps(analysis)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with _display(Count(analysis.__name__, unit=""), bool(kwargs.get("progress", True))):
            return explained(*args, **kwargs)

    return run


@contextmanager
def without_bar() -> Iterator[None]:
    """Remove the bar inside a `with` statement, for messages on the terminal."""
    display = _OPEN.get()
    if not isinstance(display, Display):
        yield
        return
    with display.screen.lock:
        display.screen.clear()
        yield


@contextmanager
def _display(whole: Count, wanted: bool = True) -> Iterator[Display | None]:
    """Yield the open display of this context, or a new display, or None if nothing is shown."""
    outer = _OPEN.get()
    if isinstance(outer, Display) and wanted:
        yield outer
        return
    screen = _screen() if outer and wanted else None
    if screen is None:
        with _OPEN.set(False):
            yield None
    else:
        display = Display(whole, screen)
        try:
            with _OPEN.set(display):
                yield display
        finally:
            display.close()


def _screen() -> "_Screen | None":
    """Return the place where this process shows its progress; None if it shows none.

    Only the first of several processes shows its progress, because they share a terminal.
    """
    if os.environ.get("TQDM_DISABLE", "") not in ("", "0"):
        return None
    if multiprocessing.parent_process() is not None or os.environ.get("RANK", "0") != "0":
        return None
    try:
        if _is_notebook():
            return _Cell()
        return _Terminal() if sys.stderr.isatty() else _Lines()
    # The stream is missing or closed.
    except (AttributeError, ValueError):
        return None


def _is_notebook() -> bool:
    """Return whether this code runs in a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


@runtime_checkable
class _Screen(Protocol):
    """The place where progress is shown: a terminal, a cell of a notebook or a file."""

    lock: threading.RLock

    def waits(self, stays: bool) -> Iterator[float]:
        """Yield the seconds before each frame.

        Args:
            stays: whether the first frame appears immediately, if this is a place for a bar.
        """

    def draw(self, count: Count, title: str) -> None:
        """Draw a frame."""

    def clear(self) -> None:
        """Remove the bar until the next frame."""

    def end(self) -> None:
        """Remove the bar, or leave its last frame."""


def _waits_of_bar(stays: bool) -> Iterator[float]:
    """Yield the seconds before each frame of a bar.

    Args:
        stays: whether the first frame appears immediately.
    """
    yield 0 if stays else DELAY
    while True:
        yield EVERY


class _Cell:
    """The place of one bar in a notebook: an output of the cell, which is empty at the end.

    A bar of ipywidgets would leave its text in the saved notebook.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.waits = _waits_of_bar
        self._output: Any = None
        self._stays = False

    def draw(self, count: Count, title: str) -> None:
        """Draw a frame in the output of the cell."""
        from tqdm import tqdm

        line = tqdm.format_meter(
            n=count.shown,
            total=count.total_shown,  # type: ignore[arg-type]  # a float is allowed
            elapsed=time.time() - count.started,
            ncols=_COLUMNS_OF_CELL,
            prefix=title,
            unit=count.unit,
            unit_scale=count.unit == "tok",
            bar_format=_format(count),
            postfix=count.note,
            initial=count.first + (count.before or 0),
        )
        self._stays = count.stays
        self._show(line)

    def clear(self) -> None:
        """Do nothing, because messages do not overwrite the output."""

    def end(self) -> None:
        """Clear the output of the cell, unless the bar stays visible at its end (`stays`)."""
        if self._output is not None and not self._stays:
            self._show("")

    def _show(self, line: str) -> None:
        """Display a line in the output of the cell, or replace the line that is displayed there."""
        from IPython import display

        data = {"text/plain": line}
        if self._output is None:
            shows: Any = display.display
            self._output = shows(data, raw=True, display_id=True)
        else:
            self._output.update(data, raw=True)


class _Terminal:
    """A place for one progress bar on a terminal: a line of standard error."""

    def __init__(self) -> None:
        # Import it here, because the import is slow.
        from tqdm import tqdm

        self.lock = threading.RLock()
        self.waits = _waits_of_bar
        self._kind: Callable[..., Any] = tqdm
        self._stream: IO[str] = sys.stderr
        self._bar: Any = None
        self._count: Count | None = None

    def draw(self, count: Count, title: str) -> None:
        """Draw a frame, with a new bar for a different count."""
        if count is not self._count:
            self.end()
            self._bar, self._count = self._begun(count, title), count
        self._bar.n = count.shown
        self._bar.total = count.total_shown
        self._bar.set_postfix_str(count.note, refresh=False)
        self._bar.refresh()

    def clear(self) -> None:
        """Remove the bar until the next frame."""
        if self._bar is not None:
            self._bar.clear()

    def end(self) -> None:
        """Remove the bar, or leave its last frame."""
        bar, self._bar, self._count = self._bar, None, None
        if bar is None:
            return
        bar.close()
        if not bar.leave and not bar.pos:
            # The terminal may have written "^C" after the bar.
            self._stream.write(f"\r{' ' * (_columns(self._stream) + _ROOM - 1)}\r")
            self._stream.flush()

    def _begun(self, count: Count, title: str) -> Any:
        """Return a new bar for a count."""
        bar = self._kind(
            desc=title,
            total=count.total_shown,
            initial=count.first + (count.before or 0),
            unit=count.unit,
            unit_scale=count.unit == "tok",
            leave=count.stays,
            disable=False,
            # With a delay, tqdm draws no frame when the bar is made, before `draw` sets the count.
            delay=1e-9,
            bar_format=_format(count),
            file=self._stream,
            ncols=_columns(self._stream),
        )
        bar.start_t = count.started
        return bar


class _Lines:
    """A place for lines of progress: standard error that is a file or a pipe."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._stream: IO[str] = sys.stderr
        self._started = time.time()

    def waits(self, stays: bool) -> Iterator[float]:
        """Yield the seconds before each line, which grow."""
        written = 0.0
        for seconds in TIMES_OF_LINES:
            yield seconds - written
            written = seconds
        while True:
            wait = min(written, _LONGEST_WAIT)
            yield wait
            written += wait

    def draw(self, count: Count, title: str) -> None:
        """Write a line, unless the analysis began less than ten seconds ago."""
        seconds = time.time() - self._started
        if seconds >= TIMES_OF_LINES[0]:
            self._stream.write(f"{_line(count, title, seconds)}\n")
            self._stream.flush()

    def clear(self) -> None:
        """Do nothing, because a message is a line of its own."""

    def end(self) -> None:
        """Do nothing, because lines stay."""


def _line(count: Count, title: str, seconds: float) -> str:
    """Return the progress of a count as one line.

    Args:
        count: the count.
        title: the names of the analysis and of the loop.
        seconds: the seconds since the analysis began.

    >>> count = Count("texts", total=7)
    >>> count(2)
    >>> count.started -= 30
    >>> _line(count, "harvest: texts", 40.0)
    'harvest: texts: 29% done after 40 s, about 75 s left'
    """
    elapsed = _duration(seconds)
    if not count.unit:
        return f"{title}: runs for {elapsed}"
    if count.total_shown:
        parts = [f"{title}: {count.shown / count.total_shown:.0%} done after {elapsed}"]
        if count.done > count.first:
            left = max(count.total_shown - count.shown, 0)
            parts.append(f"about {_duration(left / count.rate)} left")
    else:
        unit = "steps" if count.unit == "it" else count.unit
        parts = [f"{title}: {count.shown:,.0f} {unit} after {elapsed}"]
    return ", ".join([*parts, count.note] if count.note else parts)


def _duration(seconds: float) -> str:
    """Return a time in seconds, minutes or hours.

    >>> _duration(89), _duration(600), _duration(9000)
    ('89 s', '10 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _columns(stream: IO[str]) -> int:
    """Return the number of columns for a bar.

    The columns after the bar are for "^C", which would otherwise begin a new line.
    """
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    # The stream is not a terminal.
    except (AttributeError, OSError, ValueError):
        columns = 80
    return max(20, columns - _ROOM)


def _format(count: Count) -> str | None:
    """Return the format of a bar, or None for the default format of `tqdm`."""
    if not count.unit:
        return "{desc}: {elapsed}"
    # A float as a total measures work. The number has many digits, so it is not shown.
    if isinstance(count.total_shown, float):
        return "{l_bar}{bar}| [{elapsed}<{remaining}]"
    return None


def _draw(
    display_of: Callable[[], Display | None],
    closed: threading.Event,
    screen: _Screen,
    waits: Iterator[float],
) -> None:
    """Draw the count of a display until the display is closed or deleted."""
    try:
        is_closed = closed.wait(next(waits))
        while (display := display_of()) is not None:
            whole = display.whole
            count = display.count or display.whole
            # Do not keep the display alive during the wait.
            del display
            if count.stays or not is_closed:
                title = count.title if count is whole else f"{whole.title}: {count.title}"
                with screen.lock:
                    screen.draw(count, title)
            if is_closed:
                break
            is_closed = closed.wait(next(waits))
    # The terminal no longer exists.
    except (OSError, ValueError):
        pass
    finally:
        with suppress(OSError, ValueError):
            screen.end()
