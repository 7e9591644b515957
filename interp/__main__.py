"""Start the command line, as `hookscope report` or `python -m interp report`. Its commands are in `interp.cli`."""

import os
import signal
import sys
import warnings

from interp.shadowed import require_own


def script() -> int:
    """Run the installed command `hookscope`."""
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    # A shell may have told its background processes to ignore Ctrl-C.
    is_interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    # During the imports Ctrl-C ends the process itself, because an exception there would end in a traceback.
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
    # At exit, Python would try again to write what it could not.
    if status:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


if __name__ == "__main__":
    sys.exit(script())
