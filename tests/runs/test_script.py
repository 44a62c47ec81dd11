"""How a script prints: warnings above its progress bar; into a pipe that is closed."""

import logging
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.scripts import ROOT, RunScript, run_process, user_environment
from pytest import CaptureFixture, MonkeyPatch

from gtpo import processes
from gtpo.grading.user_functions import load_rewards
from gtpo.reports.summary import RunMessages
from gtpo.runs import script


def test_a_warning_is_a_line_above_the_bar() -> None:
    """Control characters are escaped: a warning may quote a file of somebody else."""
    code = """
import logging, sys
from tqdm import tqdm
from gtpo.runs.script import run_script
def main():
    with tqdm(total=2, ncols=40, ascii=True, bar_format="{desc}{n_fmt}/{total_fmt}", desc="bar ") as bar:
        logging.getLogger("gtpo.anything").warning("%d rows\\n\\x1b]0;title\\x07 dropped", 3)
        logging.getLogger("gtpo.anything").info("not shown")
        bar.update(2)
run_script(main)
"""
    argv = [sys.executable, "-c", code]
    shown = subprocess.run(argv, cwd=ROOT, env=user_environment(), capture_output=True, check=True).stderr.decode()
    lines = [line.split("\r")[-1].rstrip() for line in shown.split("\n") if line]
    assert lines.index("3 rows") + 1 == lines.index(r"\x1b]0;title\x07 dropped") and lines[-1] == "bar 2/2"
    assert "not shown" not in shown


def test_after_the_first_step_errors_are_the_runs(monkeypatch: MonkeyPatch) -> None:
    """Exit code 1: what has been trained is there. What optimizer and schedule refuse comes before."""
    monkeypatch.setattr(processes, "_training", False)
    monkeypatch.setenv("RANK", "1")  # which says nothing
    RunMessages(None, 0).on_train_begin(None, None, None)  # type: ignore[arg-type]
    assert processes.training_has_begun()


def test_windows_is_refused(monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit, match="2"):
        script.run_script(lambda: pytest.fail("it ran"))
    assert "WSL2" in capsys.readouterr().err


@pytest.mark.parametrize("size", [10, 10**6], ids=["in the buffer", "written at once"])
def test_a_closed_pipe_ends_the_script_without_a_word(size: int) -> None:
    code = "import time\nfrom gtpo.runs.script import run_script as run\n"
    code += f"run(lambda: (time.sleep(0.2), print('a' * {size})))"
    argv = [sys.executable, "-c", code]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(argv, cwd=ROOT, env=user_environment(), **pipes) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.parametrize(("begun", "code"), [("pass", 2), ("processes.training_begins()", 1)])
def test_an_error_is_one_line_with_its_traceback_file(
    begun: str, code: int, tmp_path: Path, run_script: RunScript
) -> None:
    path = tmp_path / "fails.py"
    path.write_text(f"""
from gtpo import processes
from gtpo.reports.summary import RunMessages
from gtpo.runs import script
def main():
    {begun}
    raise ValueError("first line\\nthe reason\\x1b[31m")
script.run_script(main)
""")
    before = f"import tempfile; tempfile.tempdir = {str(tmp_path)!r}; sys.path.insert(1, {str(ROOT)!r})"
    shown = run_script(tmp_path, str(path), before=before, code=code).stderr
    (stored,) = tmp_path.glob("gtpo-*.log")
    assert "the reason\\x1b[31m" in shown and str(stored) in shown
    assert shown.count("\n") == 1 and "raise ValueError" not in shown
    assert "Traceback" in stored.read_text() and "first line" in stored.read_text()
    assert "Traceback" in run_script(tmp_path, str(path), "--debug", before=before, code=1).stderr


def test_the_traceback_of_your_code_is_above_the_line(here: Path, capsys: CaptureFixture[str]) -> None:
    """Not that of a name that is mistyped."""
    Path("own.py").write_text("import json\n\nlimit = json.loads('no')\n")
    said = {}
    for name in ("own.py:f", "no_such_module:f"):
        with pytest.raises(SystemExit, match="2"):
            script.run_script(partial(load_rewards, [name], {}, []))
        said[name] = capsys.readouterr().err.splitlines()
    *above, last = said["own.py:f"]
    assert above[0].startswith("Traceback") and "    limit = json.loads('no')" in above
    assert "--reward own.py:f cannot be imported: JSONDecodeError: Expecting value" in last
    assert last.endswith("(own.py, line 3).")
    [line] = said["no_such_module:f"]
    assert line.endswith("cannot be imported: ModuleNotFoundError: No module named 'no_such_module'.")


def test_warnings_survive_a_library_that_sets_up_logs() -> None:
    """Unsloth does when it is imported."""
    source = (
        "import logging\nfrom gtpo.runs.script import log_to_stderr\nlog_to_stderr()\n"
        "logging.basicConfig(format='[%(name)s|%(levelname)s]%(message)s')\n"
        "logging.getLogger('gtpo.models.load').warning('loading tiny')"
    )
    assert run_process([sys.executable, "-c", source]).stderr == "loading tiny\n"


def test_what_only_trl_can_rename_is_not_named() -> None:
    source = (
        "import warnings\nfrom gtpo.runs.script import log_to_stderr\nlog_to_stderr()\n"
        "for name in ('gradient_checkpointing_kwargs', 'is_gradient_checkpointing', 'learning_rate'):\n"
        "    warnings.warn(f'`{name}` is deprecated', FutureWarning)"
    )
    shown = run_process([sys.executable, "-c", source]).stderr
    assert "`learning_rate` is deprecated" in shown and "gradient" not in shown


def run_main(main: str, code: int, processes: str = "2") -> subprocess.CompletedProcess[str]:
    """A script with this main, as one of several processes."""
    source = f"""
import atexit, sys
from gtpo.runs.script import run_script
class Late:
    def __del__(self): print("the end", file=sys.__stdout__)
late = Late()
atexit.register(print, "handler")
run_script({main})
"""
    environment = user_environment() | {"WORLD_SIZE": processes}
    return run_process([sys.executable, "-c", source], env=environment, code=code)


@pytest.mark.parametrize(
    ("processes", "main", "code"),
    [
        ("", "exit", 0),
        ("1", "lambda: print('trained')", 0),
        ("2", "lambda: print('trained')", 0),
        ("2", "lambda: sys.exit(143)", 143),
        ("2", "lambda: print(undefined)", 2),
    ],
)
def test_one_of_several_processes_skips_the_interpreters_end(processes: str, main: str, code: int) -> None:
    """In which a thread of Gloo may abort; the handlers of atexit, wandb's among them, have run."""
    lines = run_main(main, code, processes).stdout.splitlines()
    assert lines[-1] == ("handler" if processes == "2" else "the end") and "handler" in lines


@pytest.mark.parametrize("why", ["'no data'", "OSError('no data')"])
def test_one_of_several_processes_prints_its_last_text(why: str) -> None:
    """As an objective of a user's may: sys.exit("no data"), sys.exit(error)."""
    assert run_main(f"lambda: sys.exit({why})", code=1).stderr == "no data\n"


def test_one_of_several_processes_keeps_its_exit_code() -> None:
    """As a daemon starts it, without a stdout."""
    run_main("lambda: (setattr(sys, 'stdout', None), sys.exit(143))", code=143)


def test_a_warning_before_the_first_bar_is_printed_too(monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]) -> None:
    """Where tqdm is not imported, as by --help."""
    monkeypatch.delitem(sys.modules, "tqdm", raising=False)
    record = logging.LogRecord("gtpo.any", logging.WARNING, "file.py", 1, "%d rows\n\x1b[31m dropped", (3,), None)
    script._AboveTheBar().emit(record)
    assert capsys.readouterr().err == "3 rows\n\\x1b[31m dropped\n" and "tqdm" not in sys.modules
