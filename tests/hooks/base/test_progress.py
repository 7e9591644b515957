"""Progress bars appear late, count correctly, and disappear at the end."""

import io
import threading
import time
import types
import warnings

import pytest

from tests.terminal import Terminal, appear_soon, write_to


@pytest.fixture
def progress(monkeypatch):
    """The module `progress`, with bars that appear almost at once."""
    from hooks.base import progress

    appear_soon(monkeypatch, delay=0.01, every=0.005)
    return progress


@pytest.fixture
def terminal(monkeypatch):
    """Standard error as a terminal."""
    terminal = Terminal()
    write_to(terminal, monkeypatch)
    return terminal


def test_a_bar_appears_during_a_long_first_step_and_counts_to_the_end(progress, terminal):
    with progress.progress_bar("texts", total=3) as count:
        for done in range(3):
            assert terminal.wait_for(f"{done}/3")
            count()
        assert terminal.wait_for("texts: 100%")
        assert len(terminal.screen) == 1
    assert terminal.screen == []


def test_a_bar_waits_for_two_seconds(monkeypatch, terminal):
    from hooks.base import progress

    assert progress.DELAY == 2
    waits = []

    class Event(threading.Event):
        def wait(self, timeout=None):
            waits.append(timeout)
            return super().wait(timeout)

    monkeypatch.setattr(progress.threading, "Event", Event)
    with progress.progress_bar("texts", total=3) as count:
        count(3)
    assert 2 in waits
    assert terminal.getvalue() == ""


def test_items_are_counted_as_done_when_the_next_one_is_read(progress, terminal):
    @progress.shows_progress
    def analysis():
        for number in progress.progress_of([5, 7], "numbers", 2):
            assert terminal.wait_for(f"{number // 7}/2")

    analysis()
    assert terminal.screen == []


def test_work_is_shown_in_percent(progress, terminal):
    with progress.progress_bar("work", total=10 / 3) as count:
        count(5 / 3)
        assert terminal.wait_for("work:  50%")
        assert "3.33" not in terminal.screen[0]


def test_an_analysis_shows_its_name_until_something_is_counted(progress, terminal):
    @progress.shows_progress
    def analysis():
        assert terminal.wait_for("analysis: 00:00")
        with progress.progress_bar("texts", total=7) as count:
            count(2)
            assert terminal.wait_for("analysis: texts:  29%")
        with progress.progress_bar("layers", total=5):
            assert terminal.wait_for("analysis: layers:   0%")
            assert len(terminal.screen) == 1

    analysis()
    assert terminal.screen == []


def test_only_the_outermost_loop_is_shown(progress, terminal):
    @progress.shows_progress
    def inner():
        with progress.progress_bar("inner", total=5) as count:
            count(4)
            assert terminal.wait_for(f"{outer_count.done}/11")

    @progress.shows_progress
    def outer():
        nonlocal outer_count
        with progress.progress_bar("outer", total=11) as outer_count:
            for _ in range(3):
                inner()
                outer_count()

    outer_count = None
    outer()
    assert "inner" not in terminal.getvalue()
    assert "4/5" not in terminal.getvalue()
    assert terminal.screen == []


def test_a_loop_that_begins_again_continues_its_count_without_a_share(progress, terminal):
    @progress.shows_progress
    def analysis():
        for n_steps, shown in ((3, "100%"), (4, "7it"), (8, "15it")):
            with progress.progress_bar("steps", total=n_steps) as count:
                count(n_steps)
                assert terminal.wait_for(f"analysis: steps: {shown}")
                assert "%" not in terminal.screen[0] or n_steps == 3
                lines.append(progress._line(count, "steps", 30.0))

    lines = []
    analysis()
    # 3 + 4 steps, and then 7 + 8.
    assert lines[0].startswith("steps: 100% done after 30 s")
    assert lines[1:] == ["steps: 7 steps after 30 s", "steps: 15 steps after 30 s"]


@pytest.mark.parametrize("how", ["none", "closed", "keyword", "outer", "disabled", "rank"])
def test_nothing_is_written(progress, monkeypatch, how):
    stream = None if how == "none" else Terminal()
    write_to(stream, monkeypatch)
    if how == "disabled":
        monkeypatch.setenv("TQDM_DISABLE", "1")
    if how == "rank":
        monkeypatch.setenv("RANK", "2")
    if how == "closed":
        stream.close()
    started = []
    monkeypatch.setattr(progress.threading, "Thread", lambda **options: started.append(options))

    @progress.shows_progress
    def analysis(progress=True):
        with module.progress_bar("texts", total=3) as count:
            count(3)
        return count.done

    @progress.shows_progress
    def around(progress=True):
        return analysis()

    module = progress
    silent = {"keyword": {"progress": False}}.get(how, {})
    assert (around(progress=False) if how == "outer" else analysis(**silent)) == 3
    assert started == []
    assert stream is None or stream.closed or stream.getvalue() == ""


def test_an_analysis_inside_can_be_silent(progress, terminal):
    @progress.shows_progress
    def analysis(progress=True):
        with module.progress_bar("inner", total=3):
            assert terminal.wait_for("around: 00:00")

    @progress.shows_progress
    def around():
        analysis(progress=False)
        with module.progress_bar("later", total=3):
            assert terminal.wait_for("around: later")

    module = progress
    around()
    assert "inner" not in terminal.getvalue()


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_error_removes_the_bar(progress, terminal, kind):
    threads = threading.active_count()

    @progress.shows_progress
    def analysis():
        for _ in progress.progress_of(range(3), "texts", 3):
            assert terminal.wait_for("0/3")
            raise kind("here")

    # The traceback keeps the iterator alive, and with it the bar, while the error is printed.
    with pytest.raises(kind) as caught:
        analysis()
    terminal.write("error: here")
    assert terminal.screen == ["error: here"]
    del caught
    written = terminal.getvalue()
    with progress.progress_bar("others", total=2):
        assert terminal.wait_for("0/2")
    assert terminal.getvalue().startswith(written)
    alive = [thread for thread in threading.enumerate() if type(thread) is threading.Thread]
    assert len([thread for thread in alive if thread.daemon]) <= threads


def test_a_display_that_nobody_closes_ends(progress, terminal):
    display = progress.Display(progress.Count("texts", 3), progress._Terminal())
    assert terminal.wait_for("0/3")
    thread = display._thread
    del display
    thread.join(5)
    assert not thread.is_alive()
    assert terminal.screen == []


def test_a_warning_has_a_line_of_its_own(progress, terminal):
    from hooks.base import warn

    @progress.shows_progress
    def analysis():
        with progress.progress_bar("texts", total=3) as count:
            assert terminal.wait_for("0/3")
            warn("text 5 is short")
            assert terminal.screen[0] == "warning: text 5 is short"
            count()
            assert terminal.wait_for("1/3")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: terminal.write(f"warning: {message}\n")
        analysis()
    assert terminal.screen == ["warning: text 5 is short"]


def test_a_bar_that_stays(progress, terminal, monkeypatch):
    monkeypatch.setattr(progress, "DELAY", 60)
    with progress.progress_bar("training", 5, unit="step", first=2, stays=True) as count:
        assert terminal.wait_for("2/5")
        count(3)
        count.note = "loss 1.25"
    assert len(terminal.screen) == 1
    assert "5/5" in terminal.screen[0]
    assert "loss 1.25" in terminal.screen[0]


def test_a_notebook_has_a_bar_in_its_cell(progress, monkeypatch):
    shell = types.SimpleNamespace(kernel=object())
    ipython = types.SimpleNamespace(get_ipython=lambda: shell)
    write_to(io.StringIO(), monkeypatch, IPython=ipython)
    assert isinstance(progress._screen(), progress._Cell)
    # Without a kernel, it is IPython on a terminal. Its standard error is a file here.
    del shell.kernel
    assert isinstance(progress._screen(), progress._Lines)


class Clock(threading.Event):
    """A clock that a wait moves forward. The analysis ends after some seconds.

    Args:
        seconds: the seconds after which the analysis ends.
        work: a function that is called at each time with the seconds since the beginning.
    """

    def __init__(self, seconds, work):
        super().__init__()
        self.now, self.end, self.work, self.began = 1e9, 1e9 + seconds, work, 1e9

    def time(self):
        return self.now

    def wait(self, timeout=None):
        self.now = min(self.now + timeout, self.end)
        self.work(self.now - self.began)
        return self.now == self.end


def lines_of(
    progress, monkeypatch, seconds, work=lambda seconds, count: None, stays=False, **options
):
    """Return the times and the lines that an analysis of some seconds writes to a pipe."""
    clock, stream = Clock(seconds, lambda now: work(now, count)), io.StringIO()
    monkeypatch.setattr(progress, "time", clock)
    write_to(stream, monkeypatch)
    count = progress.Count("texts", stays=stays, **options)
    display = types.SimpleNamespace(whole=progress.Count("sweep", unit=""), count=count)
    screen = progress._screen()
    progress._draw(lambda: display, clock, screen, screen.waits(stays))
    return stream.getvalue().splitlines()


def test_outside_of_a_terminal_lines_are_written_at_growing_times(progress, monkeypatch):
    def work(now, count):
        count.done = now / 10

    lines = lines_of(progress, monkeypatch, 1000, work, total=100)
    # 0.1 texts per second.
    assert lines == [
        "sweep: texts: 1% done after 10 s, about 16 min left",
        "sweep: texts: 3% done after 30 s, about 16 min left",
        "sweep: texts: 6% done after 60 s, about 16 min left",
        "sweep: texts: 12% done after 2 min, about 15 min left",
        "sweep: texts: 24% done after 4 min, about 13 min left",
        "sweep: texts: 48% done after 8 min, about 9 min left",
        "sweep: texts: 96% done after 16 min, about 40 s left",
    ]


def test_long_runs_write_a_line_each_hour(progress, monkeypatch):
    lines = lines_of(progress, monkeypatch, 24 * 3600, total=10)
    times = [line.partition("after ")[2] for line in lines]
    assert times[:12] == [
        *("10 s", "30 s", "60 s", "2 min", "4 min", "8 min", "16 min", "32 min", "64 min"),
        *("2.1 h", "3.1 h", "4.1 h"),
    ]
    # Without a finished step, nothing is known about the time that is left.
    assert lines[0] == "sweep: texts: 0% done after 10 s"


@pytest.mark.parametrize("stays", [False, True])
def test_the_first_ten_seconds_write_nothing(progress, monkeypatch, stays):
    def work(now, count):
        count.done = now

    for seconds in (0.5, 9.9):
        assert lines_of(progress, monkeypatch, seconds, work, stays, total=10) == []
    assert lines_of(progress, monkeypatch, 11, work, total=11) == [
        "sweep: texts: 91% done after 10 s, about 1 s left"
    ]


def test_lines_of_counts_without_a_total_and_of_continued_runs(progress, monkeypatch):
    def work(now, count):
        count.done = count.first + 100 * now
        count.note = "loss 1.25"

    (line,) = lines_of(progress, monkeypatch, 11, work, unit="tok")
    assert line == "sweep: texts: 1,000 tok after 10 s, loss 1.25"
    # 1,000 of the 2,000 steps that were missing are done.
    (line,) = lines_of(progress, monkeypatch, 11, work, total=5000, first=3000)
    assert line == "sweep: texts: 80% done after 10 s, about 10 s left, loss 1.25"
    (line,) = lines_of(progress, monkeypatch, 11, unit="")
    assert line == "sweep: texts: runs for 10 s"


def test_an_analysis_writes_lines_to_a_pipe(progress, monkeypatch, capsys):
    # The first line appears after 0.01 seconds instead of 10.
    monkeypatch.setattr(progress, "TIMES_OF_LINES", (0.01, 0.02, 30))
    stream = io.StringIO()
    write_to(stream, monkeypatch)

    @progress.shows_progress
    def analysis(progress=True):
        with module.progress_bar("texts", total=4) as count:
            count()
            wait_for(lambda: stream.getvalue().count("\n") == 2 or not progress)

    module = progress
    analysis()
    analysis(progress=False)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert all(line.startswith("analysis: texts: 25% done after 0 s, about 0 s") for line in lines)
    assert capsys.readouterr() == ("", "")


def wait_for(is_true):
    """Wait at most five seconds until a function returns True."""
    end = time.monotonic() + 5
    while not is_true() and time.monotonic() < end:
        time.sleep(0.002)
