"""Start the command line, as `hookscope report` or `python -m interp report`.

The commands are in `interp.cli`.
"""

import os
import signal
import sys
import warnings

from interp.shadowed import require_own


def script() -> int:
    """Run the installed command `hookscope`."""
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    # A shell may start its background processes with Ctrl-C ignored. Keep this setting.
    is_interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    # During the imports, Ctrl-C ends the process directly. An exception would print a traceback.
    if is_interruptible:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        require_own("hooks")
    except ImportError as error:
        print("error:", error, file=sys.stderr)
        return 1
    from interp.cli import command

    try:
        if is_interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        status = command.main()
        if is_interruptible:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    except KeyboardInterrupt:
        status = 130
    # After an error, discard the output that is left. Python would try to write it again at exit.
    if status:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


if __name__ == "__main__":
    sys.exit(script())
