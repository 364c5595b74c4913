"""Signals that stop a command: it saves what was reached, as after Ctrl-C."""

from __future__ import annotations

import errno
import os
import signal
from typing import Any, NoReturn

_hung_up = False


def exit_code() -> int:
    """The exit code of a command that was stopped."""
    return 129 if _hung_up else 130


def stop_on_signals() -> None:
    """Treat SIGTERM and SIGHUP as Ctrl-C, unless they are ignored, as nohup has it."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _hang_up)


def _hang_up(*_: Any) -> NoReturn:
    """Stop, and write to no terminal that is gone: the error would take the place of the stop."""
    import termios

    global _hung_up
    _hung_up = True
    for output in (1, 2):
        try:
            termios.tcgetattr(output)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                os.dup2(os.open(os.devnull, os.O_WRONLY), output)
        except OSError:  # it was closed by whoever started this process
            pass
    raise KeyboardInterrupt
