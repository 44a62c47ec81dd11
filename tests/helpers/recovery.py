"""Kill a script, or fill the disk, at a file operation; recover as a user does; compare with an undisturbed run.

A scenario is a command and the state of its directory before it. After the fault the user runs the command that the
message names, or the same one again, then with the flags that its message names. Every file of the directory must end
as in the undisturbed run, which includes that nothing is left over: adapter, optimizer, scheduler, random state, best/,
metrics, completions. Each command runs under another hash seed than the one before it, as on a user's machine.
"""

import hashlib
import json
import re
import shlex
import shutil
import signal
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet
import yaml
from helpers.file_operations import Operation, read_log
from helpers.scripts import Ended, Fault, ScriptServer

from gtpo.models.tiny import save_untrained_tiny
from gtpo.runs.checkpoints import MANIFEST, damage

METHODS = {
    "gtpo": ["train_gtpo.py", "--G", "4", "--prompts_per_step", "1", "--max_completion_length", "8"],
    "grpo": ["train_grpo.py", "--G", "4", "--prompts_per_step", "1", "--max_completion_length", "8", "--beta", "0.04"],
    "sft": ["train_sft.py", "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "1"],
}
EVALUATION = ["evaluate.py", "--benchmarks", "arithmetic", "--limit", "3", "--k", "2", "--max_new_tokens", "8"]
SCENARIOS = ("start", "overwrite", "resume", "rotation", "evaluation")
FAULTS = {"kill": "k", "full": "f"}
TIMES = {"step_time", "tokens_per_second"}  # keys, in metrics and in the state of the trainer
BY_NAME = {  # only their presence is compared
    "report.html": "its SVG has random ids",
    "README.md": "the settings of config.yaml, where a resumed run has 0.0 for a default of 0",
}


class Point(NamedTuple):
    """A fault at an operation, and what came of it."""

    operation: Operation
    problem: str  # empty if the run recovered


def contents(directory: Path) -> dict[str, Any]:
    """Every file below a directory, comparable between two runs of the same command."""
    return {str(path.relative_to(directory)): _content(path) for path in sorted(directory.rglob("*")) if path.is_file()}


def _content(path: Path) -> Any:
    if path.name in BY_NAME:
        return True
    if path.name == MANIFEST:  # of a checkpoint: digests of files with times in them
        return damage(path.parent)
    try:
        if path.suffix == ".jsonl":
            return [_without_times(json.loads(line)) for line in path.read_text().splitlines()]
        if path.suffix == ".json":
            return _without_times(json.loads(path.read_text()))
        if path.suffix == ".yaml":
            return yaml.safe_load(path.read_text())
        if path.suffix == ".parquet":
            return pyarrow.parquet.read_table(path).to_pylist()
    except ValueError as error:  # pyarrow's errors too
        return f"unreadable: {error}"
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_times(item) for key, item in value.items() if key not in TIMES}
    return [_without_times(item) for item in value] if isinstance(value, list) else value


def build_small_model(directory: Path) -> Path:
    """An untrained base with one narrow layer and, beside it, ``rows.jsonl``: what a run of two seconds needs."""
    shape = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64}
    save_untrained_tiny(directory, **shape, num_attention_heads=2, num_key_value_heads=2, head_dim=16)
    rows = [{"prompt": f"What is {i} + {i}?", "answer": str(2 * i), "solution": f"{2 * i}"} for i in range(16)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


class Scenario:
    """A command on a directory: ``start``, ``overwrite``, ``resume``, ``rotation`` of a method, or ``evaluation``.

    Attributes:
        title: For tables and test ids.
        command: Script and flags.
        servers: Run the commands in turn; which one comes first is chosen by the number of the operation.
    """

    def __init__(self, name: str, method: str, servers: Sequence[ScriptServer], model: Path, work: Path) -> None:
        self.name, self.method, self.servers, self.model = name, method, servers, model
        self.turn = 0
        self.title = f"{method} {name}"
        self.work = work / self.title.replace(" ", "-")
        self.directory = self.work / "watched"  # the same path for all runs, because config.yaml contains it
        self.run = self.directory / "run"
        self.work.mkdir(parents=True)
        base = [*METHODS[method], "--model", str(model), "--dataset", str(model / "rows.jsonl"), "--lora_rank", "4"]
        base += ["--save_steps", "2", "--output_dir", str(self.run)]
        self.start = [*base, "--max_steps", "4"]
        self.command = {
            "start": self.start,
            "overwrite": [*self.start, "--overwrite"],
            "resume": [*self.start, "--resume"],
            "rotation": [*base, "--max_steps", "6", "--save_total_limit", "2"],
            "evaluation": [*EVALUATION, "--runs", str(self.work / "trained"), "--output_dir", str(self.run)],
        }[name]

    @cached_property
    def before(self) -> Path:
        """A copy of the directory as the command finds it."""
        before = self.work / "before"
        self.directory.mkdir()
        if self.name == "overwrite":  # a finished run with other settings, so that what is left of it is seen
            self._expect_success([*self.start, "--seed", "1"])
        elif self.name == "resume":  # killed before its second checkpoint is complete
            log = self._log(self.start)
            complete = [operation.number for operation in log if operation.path == "run/checkpoint-4/files.json"]
            shutil.rmtree(self.run)
            self._run(self.start, "k", complete[0])
        elif self.name == "evaluation":
            self._expect_success(self.start)
            self.run.rename(self.work / "trained")
        self.directory.rename(before)
        return before

    @cached_property
    def operations(self) -> list[Operation]:
        """The operations of the undisturbed command."""
        return self._undisturbed[0]

    @cached_property
    def expected(self) -> dict[str, Any]:
        """The files that the undisturbed command leaves."""
        return self._undisturbed[1]

    @cached_property
    def _undisturbed(self) -> tuple[list[Operation], dict[str, Any]]:
        self._reset()
        operations = self._log(self.command)
        return operations, contents(self.directory)

    def try_point(self, fault: str, number: int) -> Point:
        """Run the command with a fault (``kill`` or ``full``) at an operation, recover, and compare."""
        expected = self.expected
        self.turn = number
        self._reset()
        ended = self._run(self.command, FAULTS[fault], number)
        log = read_log(self.work / "operations.log")
        if len(log) < number:
            return Point(Operation(number, "-", "-"), f"not reached, exit code {ended.code}: {_last_line(ended)}")
        problem = self._disk_full_problem(ended) if fault == "full" else ""
        if fault == "kill" and ended.code != -signal.SIGKILL:
            problem = f"not killed, exit code {ended.code}"
        problem = problem or self._recover(ended) or _difference(expected, contents(self.directory))
        if problem:
            seeds = [str(self.servers[turn % len(self.servers)].hash_seed) for turn in range(number, self.turn)]
            problem += f" (PYTHONHASHSEED {', then '.join(seeds)})"
        return Point(log[number - 1], problem)

    def _disk_full_problem(self, ended: Ended) -> str:
        """What is wrong with how a full disk was told; an empty string if nothing is."""
        told = re.search("disk is full|No space left", ended.stderr)
        if "Traceback" in ended.stderr:
            return f"traceback: {_last_line(ended)}"
        if ended.code not in (0, 1) or not told:
            return f"exit code {ended.code}, not told: {_last_line(ended)}"
        if ended.code == 0 and not (self.run / "adapter" / "adapter_config.json").is_file():
            return "exit code 0 without an adapter"
        return "" if ended.code == 0 or _advised_command(ended) else f"no command: {_last_line(ended)}"

    def _recover(self, ended: Ended) -> str:
        """Run the command that the message names, or the same one, then with the flags that its message names.

        Returns:
            What the tries said, if none succeeds.
        """
        if advised := _advised_command(ended):
            again = self._run(advised)
            return "" if again.code == 0 else f"the advised command ended with {again.code}: {_last_line(again)}"
        said, tried = "", []
        for flag in ("", "--resume", "--overwrite"):
            if flag in self.command or flag not in said:
                continue
            again = self._run([*self.command, *([flag] if flag else [])])
            if again.code == 0:
                return ""
            said += _last_line(again)
            tried.append(f"{flag or 'again'}: exit code {again.code}, {_last_line(again)}")
        return "stuck: " + " | ".join(tried)

    def _reset(self) -> None:
        before = self.before
        shutil.rmtree(self.directory, ignore_errors=True)
        shutil.copytree(before, self.directory)

    def _run(self, command: list[str], kind: str = "", number: int = 0) -> Ended:
        log = str(self.work / "operations.log")
        fault = Fault(str(self.directory), kind, number, log) if kind else None
        server = self.servers[self.turn % len(self.servers)]
        self.turn += 1
        return server.run(self.work, *command, fault=fault)

    def _log(self, command: list[str]) -> list[Operation]:
        ended = self._run(command, "-")
        assert ended.code == 0, ended.stderr[-2000:]
        return read_log(self.work / "operations.log")

    def _expect_success(self, command: list[str]) -> None:
        ended = self._run(command)
        assert ended.code == 0, ended.stderr[-2000:]


def _last_line(ended: Ended) -> str:
    lines = [line for line in ended.stderr.replace("\r", "\n").splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _advised_command(ended: Ended) -> list[str]:
    """The command at the end of the last message, without ``python``; nothing if it names none."""
    found = re.search("then: python (.*)$", _last_line(ended))
    return shlex.split(found[1]) if ended.code and found else []


def _difference(expected: dict[str, Any], got: dict[str, Any]) -> str:
    """The files in which two directories differ; an empty string if they are the same."""
    parts = {
        "missing": expected.keys() - got.keys(),
        "left over": got.keys() - expected.keys(),
        "different": {name for name in expected.keys() & got.keys() if expected[name] != got[name]},
    }
    return "; ".join(f"{what}: {', '.join(sorted(names))}" for what, names in parts.items() if names)
