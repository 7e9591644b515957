"""A terminal in memory, for tests of progress bars and of other text in standard error."""

import io
import re
import sys
import time
import types

from hooks.base import progress


def appear_soon(monkeypatch, delay, every):
    """Show bars after `delay` seconds, and draw them every `every` seconds.

    Environment variables that switch bars off are removed.
    """
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(progress, "DELAY", delay)
    monkeypatch.setattr(progress, "EVERY", every)


def write_to(stream, monkeypatch, **modules):
    """Let progress bars write to a stream instead of `sys.stderr`.

    `sys.stderr` is not replaced, because pytest keeps an object of its own there.
    """
    system = types.SimpleNamespace(stderr=stream, modules={**sys.modules, **modules})
    monkeypatch.setattr(progress, "sys", system)


class Terminal(io.StringIO):
    """A text stream like a terminal. `screen` is the text that a person would see at the end."""

    def isatty(self):
        # This raises an error if the stream is closed.
        super().isatty()
        return True

    @property
    def screen(self):
        """The visible lines, without spaces at their ends."""
        lines, row, column = [""], 0, 0
        for part in re.split(r"(\r|\n|\x1b\[A)", self.getvalue()):
            if part == "\r":
                column = 0
            elif part == "\n":
                row, column = row + 1, 0
            elif part == "\x1b[A":
                row -= 1
            else:
                lines += [""] * (row + 1 - len(lines))
                line = lines[row].ljust(column)
                lines[row] = line[:column] + part + line[column + len(part) :]
                column += len(part)
        return [line.rstrip() for line in lines if line.strip()]

    def wait_for(self, text):
        """Wait until a text is visible, and return whether it appeared within five seconds."""
        end = time.monotonic() + 5
        while time.monotonic() < end:
            if text in "\n".join(self.screen):
                return True
            time.sleep(0.002)
        return False
