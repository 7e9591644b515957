"""A terminal in memory, for what is written to standard error, and progress bars that write to it
at once.
"""

import io
import re
import sys
import time
import types

from hooks.base import progress


def appear_soon(monkeypatch, delay, every):
    """Show bars after `delay` seconds and draw them every `every` seconds, in any environment."""
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(progress, "DELAY", delay)
    monkeypatch.setattr(progress, "EVERY", every)


def write_to(stream, monkeypatch, **modules):
    """Make a stream standard error for bars only. pytest replaces `sys.stderr` before a test
    begins.
    """
    system = types.SimpleNamespace(stderr=stream, modules={**sys.modules, **modules})
    monkeypatch.setattr(progress, "sys", system)


class Terminal(io.StringIO):
    """What programs write to a terminal, and what can be seen there afterwards."""

    def isatty(self):
        super().isatty()  # raises an error if it is closed
        return True

    @property
    def screen(self):
        """The lines that can be seen, without spaces at their ends."""
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
