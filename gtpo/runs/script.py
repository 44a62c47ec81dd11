"""How a script runs and exits: one line for invalid input, exit codes, a full disk."""

import errno
import logging
import os
import sys
import tempfile
import traceback
import warnings
from argparse import ArgumentError
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from gtpo.errors import CodeError, RunError, UsageError, last_line, printable
from gtpo.processes import leave, training_has_begun


def run_script(main: Callable[[], object]) -> NoReturn:
    """Run a script's main and exit. An error is one line, below the traceback if it is of the user's code.

    ``--debug`` shows the traceback of any error instead.

    Exit codes: 2 for invalid input, and for other errors before the training; 1 for a run that had to stop; 130, 143,
    129 or 140 after Ctrl-C, SIGTERM, SIGHUP or SIGUSR2; 141, without a word, if the output pipe is closed, as by
    ``| head``.
    """
    log_to_stderr()
    debug = "--debug" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--debug"]
    if sys.platform == "win32":
        _exit("Windows is not supported: run it in WSL2, a Linux inside Windows.", 2)
    try:
        main()
        sys.stdout.flush()
    except SystemExit as ended:
        leave(ended.code)
    except KeyboardInterrupt:
        _exit(f"interrupted; continue with: {_how_to_continue()}", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise Python fails at its exit
        leave(141)
    except Exception as error:
        if debug:
            raise
        _exit(*_end_of(error))
    leave(0)


def _end_of(error: Exception) -> tuple[str, int]:
    """The line that ends a script after the current error, and its exit code; the traceback is printed or written."""
    if error.__cause__ and isinstance(error, RunError | CodeError):
        _print_traceback(error.__cause__)
    if isinstance(error, RunError | UsageError | ArgumentError):
        return printable(" ".join(str(error).split())), 1 if isinstance(error, RunError) else 2
    if fault := _fault_of_the_disk(error):
        return fault, 1
    where = _write_traceback()
    return f"{last_line(error)}. {where} has the traceback; --debug shows it.", 1 if training_has_begun() else 2


def _print_traceback(error: BaseException) -> None:
    """That of Python, above the line that ends the run."""
    _close_bars()
    for line in "".join(traceback.format_exception(error)).splitlines():
        print(printable(line), file=sys.stderr)


def _write_traceback() -> str:
    """The path of a file with the traceback of the current error."""
    with tempfile.NamedTemporaryFile("w", prefix="gtpo-", suffix=".log", delete=False, encoding="utf-8") as file:
        traceback.print_exc(file=file)
    return file.name


def log_to_stderr() -> None:
    """Print warnings as they are, above a progress bar; before a library is imported that sets up the logs."""
    logging.basicConfig(format="%(message)s", handlers=[_AboveTheBar()])
    # TRL 1.16 has the name that Transformers 5.24 calls deprecated
    warnings.filterwarnings("ignore", "`(is_)?gradient_checkpointing", FutureWarning)


def _how_to_continue() -> str:
    from gtpo.runs.directory import how_to_continue  # these import more than `--help` needs
    from gtpo.runs.start import held_run

    return how_to_continue(held_run())


class _AboveTheBar(logging.Handler):
    """Print warnings to stderr, control characters escaped; a progress bar is cleared first and drawn again below."""

    def emit(self, record: logging.LogRecord) -> None:
        text = "\n".join(map(printable, self.format(record).splitlines()))
        if "tqdm" in sys.modules:
            sys.modules["tqdm"].tqdm.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr)


def _close_bars() -> None:
    """Otherwise one is drawn again over a message."""
    if "tqdm" in sys.modules:
        for bar in list(sys.modules["tqdm"].tqdm._instances):
            bar.close()


def _exit(message: str, code: int) -> NoReturn:
    _close_bars()
    script = Path(sys.argv[0])
    name = script.parent.name if script.name == "__main__.py" else script.name
    print(f"{name}: {message}", file=sys.stderr)
    leave(code)


def _fault_of_the_disk(error: Exception) -> str | None:
    """What is wrong with the disk and what to do; None for another error.

    PyTorch and safetensors report a short write in other words.
    """
    number = getattr(error, "errno", None)
    if number == errno.EROFS:
        return f"the file system is read-only ({error}): name another directory with --output_dir"
    text = str(error)
    full = ("No space left on device", "PytorchStreamWriter failed", "unexpected pos", "iostream error")
    if number in (errno.ENOSPC, errno.EDQUOT) or any(words in text for words in full):
        return f"the disk is full ({error}); free some space, then: {_how_to_continue()}"
    return None
