"""Progress bars appear late, count correctly, and disappear at the end."""

import io
import threading
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


@pytest.mark.parametrize("how", ["pipe", "none", "closed", "keyword", "outer", "disabled", "rank"])
def test_nothing_is_written(progress, monkeypatch, how):
    stream = io.StringIO() if how == "pipe" else None if how == "none" else Terminal()
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
    display = progress.Display(progress.Count("texts", 3))
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


def test_a_notebook_is_watched(progress, monkeypatch):
    shell = types.SimpleNamespace(kernel=object())
    ipython = types.SimpleNamespace(get_ipython=lambda: shell)
    write_to(io.StringIO(), monkeypatch, IPython=ipython)
    assert progress._is_watched()
    # Without a kernel, it is IPython on a terminal. Its standard error is a file here.
    del shell.kernel
    assert not progress._is_watched()
