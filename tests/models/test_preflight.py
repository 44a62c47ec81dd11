"""The checks of a GPU machine, on a CPU: nvidia-smi, torch.cuda, the Hub and the PATH are replaced."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
import trl
import trl.trainer.grpo_trainer
import trl.trainer.sft_trainer  # noqa: F401  # before subprocess is replaced
from helpers.files import tables_of
from helpers.refusals import refused
from helpers.scripts import run_process
from helpers.settings import parsed
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalTokenNotFoundError, RepositoryNotFoundError
from pytest import LogCaptureFixture, MonkeyPatch

from gtpo.arguments import Settings
from gtpo.cli import parse as cli
from gtpo.cli.parse import load_backend_of, read_command_line
from gtpo.models import backend, preflight
from gtpo.models.memory import GIB
from gtpo.models.preflight import check_machine, checks, describe_dry_run
from train_gtpo import SETTINGS

TABLES = tables_of(__file__)

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


@dataclass
class Machine:
    """A GPU machine on which every check passes; a test changes one thing."""

    cache: Path
    driver: str = "580.65.06"
    capability: tuple[int, int] = (8, 0)
    free: float = 79.0  # GiB
    total: float = 80.0
    hub: BaseException | None = None  # what a request to the Hub raises
    access: BaseException | None = None
    user: BaseException | None = None  # what a request for the user of the token raises
    requests: list[str] = field(default_factory=list)

    def head(self, url: str, timeout: float) -> None:
        self.requests.append("head")
        if self.hub:
            raise self.hub

    def auth_check(self, model: str) -> None:
        self.requests.append("auth_check")
        if self.access:
            raise self.access

    def whoami(self) -> dict[str, str]:
        self.requests.append("whoami")
        if self.user:
            raise self.user
        return {"name": "me"}


def see_gpu(monkeypatch: MonkeyPatch, seen: bool) -> None:
    for module in (backend, cli, preflight):
        monkeypatch.setattr(module, "gpu_is_available", lambda: seen)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: MonkeyPatch) -> Machine:
    machine = Machine(tmp_path / "hub")
    machine.cache.mkdir()

    replacements: dict[str, Any] = {
        "subprocess.run": lambda command, **_: SimpleNamespace(stdout=f"{machine.driver}\n"),
        "shutil.which": lambda name, path=None: name,
        "torch.cuda.get_device_capability": lambda *_: tuple(machine.capability),
        "torch.cuda.mem_get_info": lambda *_: (int(machine.free * GIB), int(machine.total * GIB)),
        "huggingface_hub.constants.HF_HUB_CACHE": str(machine.cache),
        "huggingface_hub.get_session": lambda: machine,
        "huggingface_hub.auth_check": machine.auth_check,
        "huggingface_hub.whoami": machine.whoami,
        "gtpo.models.preflight.is_installed": lambda package: True,  # vLLM
    }
    for name, value in replacements.items():
        monkeypatch.setattr(name, value)
    see_gpu(monkeypatch, True)
    monkeypatch.setenv("HF_HUB_CACHE", str(machine.cache))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return machine


def settings_of(*argv: str, model: str = "llama") -> Settings:
    """The settings of a run on a GPU; a dry run, in which Transformers accepts bfloat16 on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "gpu_is_available", lambda: False)
        settings = parsed("--model", model, "--dry_run", *argv)
    settings.run.dry_run = False
    settings.given["use_cpu"] = False
    return settings


def faults(backend: str = "unsloth", *argv: str, model: str = "llama") -> list[preflight.Check]:
    """The checks that fail."""
    return [check for check in checks(settings_of(*argv, model=model), backend) if check.fault]


def names_of(found: list[preflight.Check]) -> list[tuple[str, bool]]:
    """Name, and whether it is fatal."""
    return [(check.name, check.fatal) for check in found]


def response(status: int) -> httpx.Response:
    return httpx.Response(status, request=httpx.Request("GET", "https://huggingface.co"))


# ---- the machine ----


OLD = "550.54.15"
IN_4_BITS = ("unsloth",)
IN_16_BITS = ("transformers", "--load_in_4bit", "false", "--use_vllm", "false")
TRL_VLLM = ("transformers", "--load_in_4bit", "false", "--use_vllm", "true")
RUNS = {"4 bits": IN_4_BITS, "16 bits": IN_16_BITS, "TRL": TRL_VLLM}


def test_an_older_driver_is_named_without_a_gpu(
    machine: Machine, monkeypatch: MonkeyPatch, caplog: LogCaptureFixture
) -> None:
    """PyTorch says it in a warning only, and the run would start on the CPU or ask for a GPU."""
    machine.driver = OLD
    see_gpu(monkeypatch, False)
    for argv in (["--model", "llama"], ["--model", "a/b", "--backend", "unsloth"]):
        with refused(f"{OLD}.*R580"):
            load_backend_of(read_command_line("gtpo", argv), SETTINGS)
            parsed(*argv)
    cli.preset_for("gtpo", "a/b")
    assert [OLD in message for message in caplog.messages] == [True]
    cli.preset_for("gtpo", "tiny")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the CPU is what the user wants
    cli.preset_for("gtpo", "a/b")
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(("change", "run", "name", "fatal", "words"), TABLES["a_fault_of_the_machine"])
def test_a_fault_of_the_machine(
    change: dict[str, Any], run: str, name: str | None, fatal: bool, words: str, machine: Machine, monkeypatch: Any
) -> None:
    cuda = change.get("cuda", "12.8")
    monkeypatch.setattr(torch.version, "cuda", cuda)  # an installation replaces this PyTorch
    vars(machine).update(change)
    found = faults(*RUNS[run])
    assert names_of(found) == ([(name, fatal)] if name else [])
    assert words in "".join(str(check.fault) for check in found)


# ---- the Hub ----


@pytest.mark.parametrize(
    ("error", "status", "model", "expected"),
    [
        (
            GatedRepoError,
            403,
            "llama",
            {IN_16_BITS: [("access to the model", True)], IN_4_BITS: [("access to the model", False)]},
        ),
        (RepositoryNotFoundError, 404, "Qwen/Qwen3-Nothing", {IN_16_BITS: []}),  # left to the download
        (HfHubHTTPError, 502, "llama", {IN_16_BITS: []}),
    ],
)
def test_access_to_a_model(
    error: Any, status: int, model: str, expected: dict[Any, Any], machine: Machine, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr("gtpo.models.memory.hub_is_reachable", lambda: False)  # no config.json of the other one
    machine.access = error(str(status), response=response(status))
    for run, found in expected.items():
        assert names_of(faults(*run, model=model)) == found


@pytest.mark.parametrize("cached", [True, False])
def test_access_is_asked_where_a_download_can_follow(cached: bool, machine: Machine) -> None:
    """Not for a cached model, which a token without access may train, and not without the Hub."""
    machine.access = GatedRepoError("403", response=response(403))
    if cached:
        snapshot = machine.cache / f"models--{LLAMA.replace('/', '--')}"
        for part, text in (("refs/main", "0123"), ("snapshots/0123/config.json", "{}")):
            (snapshot / part).parent.mkdir(parents=True)
            (snapshot / part).write_text(text)
    assert names_of(faults(*IN_16_BITS)) == ([] if cached else [("access to the model", True)])
    machine.hub = httpx.ConnectError("Name or service not known")
    machine.requests.clear()
    assert faults(*IN_16_BITS) == []
    assert machine.requests == ([] if cached else ["head"])


@pytest.mark.parametrize("model", ["tiny", "{directory}", "a/b/c", "./missing/model"])
def test_what_is_no_hub_id_is_not_looked_up(model: str, machine: Machine, tmp_path: Path) -> None:
    settings = settings_of()
    settings.model.model = model.format(directory=tmp_path)
    list(checks(settings, "unsloth"))
    assert machine.requests == []


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (OSError("no route"), "no route: `hf auth login`"),
        (LocalTokenNotFoundError("Token is required.\nMore."), "Token is required: `hf auth login`"),
        (None, None),
    ],
)
@pytest.mark.parametrize("has_gpu", [False, True])
def test_an_upload_is_checked_before_the_training(
    has_gpu: bool, error: Exception | None, sentence: str | None, machine: Machine, monkeypatch: MonkeyPatch
) -> None:
    see_gpu(monkeypatch, has_gpu)
    machine.user = error
    settings = settings_of("--push_to_hub", "true", model="tiny")
    if sentence:
        with refused(f"--push_to_hub: {sentence}"):
            check_machine(settings, "transformers")
    else:
        check_machine(settings, "transformers")
        assert machine.requests == ["whoami"]
    machine.requests.clear()
    check_machine(settings_of(model="tiny"), "transformers")
    assert machine.requests == []


# ---- when they run ----


def test_a_fatal_fault_stops_and_others_are_warnings(
    machine: Machine, monkeypatch: MonkeyPatch, caplog: LogCaptureFixture
) -> None:
    machine.free = 31.5
    check_machine(settings_of(), "unsloth")
    assert len(caplog.messages) == 1 and "vLLM reserves 32.0 GiB" in caplog.text
    monkeypatch.setenv("RANK", "1")
    check_machine(settings_of(), "unsloth")
    assert len(caplog.messages) == 1
    machine.free = 2.0
    with refused("2.0 of 80.0 GiB"):
        check_machine(settings_of(), "unsloth")


def test_cpu_and_dry_run_are_not_checked(machine: Machine, monkeypatch: MonkeyPatch) -> None:
    machine.free = 0
    settings = settings_of()
    settings.run.dry_run = True
    check_machine(settings, "unsloth")
    settings = settings_of()
    settings.given["use_cpu"] = True
    check_machine(settings, "unsloth")
    assert "error" not in describe_dry_run(settings, "unsloth", 10)
    see_gpu(monkeypatch, False)
    check_machine(settings_of(), "unsloth")


@pytest.mark.parametrize("script", ["train_gtpo", "train_grpo", "train_sft"])
def test_scripts_check_before_they_download(
    script: str, machine: Machine, monkeypatch: MonkeyPatch, here: Path
) -> None:
    """Neither rows nor model are loaded, and nothing is written."""
    main = __import__(script).main
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--model", "llama", "--backend", "transformers"])
    settings = settings_of()
    settings.method = script.removeprefix("train_")
    monkeypatch.setattr(f"{script}.parse", lambda *_: settings)
    monkeypatch.setattr("gtpo.data.load.load_train", lambda *_: pytest.fail("rows were loaded"))
    monkeypatch.setattr("gtpo.models.load.build_policy", lambda *_: pytest.fail("the model was loaded"))
    machine.free = 2.0
    with refused("2.0 of 80.0 GiB"):
        main()


# ---- the command ----


def test_a_fatal_check_is_printed_and_exits_with_2(
    machine: Machine, monkeypatch: MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*argv: str) -> tuple[int, list[str]]:
        """Exit code, and how each line begins."""
        monkeypatch.setattr(sys, "argv", ["preflight.py", *argv])
        code = 0
        try:
            preflight.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        return code, [line.partition(": ")[0] for line in capsys.readouterr().out.splitlines()]

    assert command("--model", "qwen") == (0, ["ok"])
    machine.access = GatedRepoError("403", response=response(403))
    assert command() == (0, ["ok", "warning"])  # Unsloth trains on its own copy
    machine.driver = OLD
    see_gpu(monkeypatch, False)
    assert command() == (2, ["error", "warning"])


def test_the_command_runs_on_a_python_without_packages(tmp_path: Path) -> None:
    """``-S`` leaves out site-packages; an old driver is the one fault that does not depend on this machine."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho {OLD}\n")
    smi.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    command = [sys.executable, "-S", "-m", "gtpo.models.preflight", "--model", "qwen"]
    ended = run_process(command, env=environment, code=2)
    assert ended.stderr == ""
    assert f"error: the NVIDIA driver is {OLD}" in ended.stdout
    nothing = [sys.executable, "-S", "-c", "import yaml"]
    assert "ModuleNotFoundError" in run_process(nothing, env=environment, code=1).stderr


def test_first_light_checks_the_machine_before_it_installs() -> None:
    command = ["make", "--dry-run", "--always-make", f"PYTHON={sys.executable}", "first-light"]
    lines = run_process(command).stdout.splitlines()
    preflight, install = ([i for i, line in enumerate(lines) if text in line] for text in ("preflight", "pip install"))
    assert preflight and install and preflight[0] < install[0]
