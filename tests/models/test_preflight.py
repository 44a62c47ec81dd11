"""The checks of a GPU machine, on a CPU: nvidia-smi, torch.cuda, the Hub, the PATH and the disk are replaced."""

import json
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
import trl
import trl.trainer.grpo_trainer
import trl.trainer.sft_trainer  # before subprocess and shutil are replaced
import yaml
from helpers.scripts import ROOT
from helpers.unsloth import FakeUnsloth
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

from gtpo.arguments import ModelArguments, Settings
from gtpo.cli import parse as cli
from gtpo.cli.parse import load_backend_from_flags, parse
from gtpo.errors import UsageError
from gtpo.models import backend, preflight
from gtpo.models.load import build_policy
from gtpo.models.memory import GIB, KNOWN
from gtpo.models.preflight import check_machine, checks, describe_checks, describe_dry_run
from gtpo.models.workload import Workload
from train_gtpo import SETTINGS

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
DISK = namedtuple("DISK", "total used free")


class Machine:
    """A GPU machine on which every check passes; a test changes one thing."""

    def __init__(self, cache: Path, headers: Path) -> None:
        self.driver = "580.65.06"
        self.capability, self.name = (8, 0), "NVIDIA A100"
        self.free, self.total = 79.0, 80.0  # GiB
        self.programs = {"nvidia-smi", "gcc", "nvcc", "ninja"}
        self.disk = 100e9
        self.cache, self.headers = cache, headers
        self.hub: BaseException | None = None  # what a request to the Hub raises
        self.access: BaseException | None = None
        self.requests: list[str] = []

    def head(self, url: str, timeout: float) -> None:
        self.requests.append("head")
        if self.hub:
            raise self.hub

    def auth_check(self, model: str) -> None:
        self.requests.append("auth_check")
        if self.access:
            raise self.access


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "Python.h").touch()
    machine = Machine(tmp_path / "hub", tmp_path / "include")

    def run(command: list[str], **options: Any) -> Any:
        assert command == ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return SimpleNamespace(stdout=f"{machine.driver}\n")

    for module in (backend, cli, preflight):
        monkeypatch.setattr(module, "gpu_is_available", lambda: True)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(shutil, "which", lambda name, path=None: name if name in machine.programs else None)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: DISK(0, 0, machine.disk))
    monkeypatch.setattr(sysconfig, "get_paths", lambda *_, **__: {"include": str(machine.headers)})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: machine.capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: machine.name)
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda *_: tuple(int(size * GIB) for size in (machine.free, machine.total))
    )
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(machine.cache))
    monkeypatch.setattr("huggingface_hub.get_session", lambda: machine)
    monkeypatch.setattr("huggingface_hub.auth_check", machine.auth_check)
    for download in ("hf_hub_download", "snapshot_download"):
        monkeypatch.setattr(f"huggingface_hub.{download}", lambda *_, **__: pytest.fail("a download"))
    for name in ("CC", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return machine


def settings_of(*argv: str, model: str = "llama") -> Settings:
    """The settings of a run on a GPU; a dry run, in which Transformers accepts bfloat16 on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "gpu_is_available", lambda: False)
        settings = parse("gtpo", (*SETTINGS, trl.GRPOConfig), ["--model", model, "--dry_run", *argv])
    settings.run.dry_run = False
    settings.given["use_cpu"] = False
    return settings


def faults(backend: str = "unsloth", *argv: str, model: str = "llama") -> list[tuple[str, bool]]:
    """The sentences of all checks that fail, each with whether it is fatal."""
    found = checks(Workload.of(settings_of(*argv, model=model).to_dict()), backend)
    return [(check.fault, check.fatal) for check in found if check.fault]


def response(status: int) -> httpx.Response:
    return httpx.Response(status, request=httpx.Request("GET", "https://huggingface.co"))


TRL_VLLM = ("--load_in_4bit", "false", "--use_vllm", "true")


@pytest.mark.parametrize(("chosen", "argv"), [("unsloth", ()), ("transformers", TRL_VLLM)])
def test_every_check_passes_in_this_order(chosen: str, argv: tuple[str, ...], machine: Machine) -> None:
    found = list(checks(Workload.of(settings_of(*argv).to_dict()), chosen))
    assert [check.name for check in found] == [
        *("driver", "compute capability", "C compiler", "Python headers"),
        *("GPU memory", "Hub", "access to the model", "disk"),
    ]
    assert [check for check in found if check.fault] == []


# ---- the machine ----


@pytest.mark.parametrize("driver", ["580.65.06", "595.10"])
def test_a_driver_of_cuda_13_passes(driver: str, machine: Machine) -> None:
    machine.driver = driver
    assert faults() == []


OLD_DRIVER = (
    "the NVIDIA driver is 550.54.15 and PyTorch 2.13 needs R580 or newer (CUDA 13): install it on the host, on Ubuntu "
    "with `sudo apt-get install nvidia-driver-580`, and reboot."
)


def test_an_older_driver_stops(machine: Machine) -> None:
    machine.driver = "550.54.15"
    assert faults() == [(OLD_DRIVER, True)]


def test_an_older_driver_passes_where_cuda_13_runs(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA forward compatibility; PyTorch for CUDA 12, which an installation replaces, says nothing."""
    machine.driver = "550.54.15"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert faults() == []
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert faults() == [(OLD_DRIVER, True)]


def test_a_driver_that_does_not_answer_stops(machine: Machine) -> None:
    machine.driver = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    (fault,) = faults()
    assert fault == (
        "nvidia-smi finds no NVIDIA driver or no GPU: use a machine with a GPU, or install driver R580 and reboot.",
        True,
    )


def test_an_older_driver_is_named_where_pytorch_sees_no_gpu(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """PyTorch says it in a warning only, and the run would start on the CPU or ask for a GPU."""
    machine.driver = "550.54.15"
    for module in (backend, cli, preflight):
        monkeypatch.setattr(module, "gpu_is_available", lambda: False)
    for argv in (["--model", "llama"], ["--model", "a/b", "--backend", "unsloth"]):
        with pytest.raises(UsageError, match="the NVIDIA driver is 550") as caught:
            load_backend_from_flags("gtpo", SETTINGS, argv)
            parse("gtpo", (*SETTINGS, trl.GRPOConfig), argv)
        assert str(caught.value) == OLD_DRIVER
    assert caplog.messages == []
    cli.preset_for("gtpo", "a/b")
    assert caplog.messages == [f"training runs on the CPU: {OLD_DRIVER}"]
    caplog.clear()
    cli.preset_for("gtpo", "tiny")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the CPU is what the user wants
    cli.preset_for("gtpo", "a/b")
    assert caplog.messages == []


def test_a_volta_gpu_stops(machine: Machine) -> None:
    machine.capability, machine.name = (7, 0), "Tesla V100"
    assert faults("unsloth", "--use_vllm", "false") == [
        (
            "this GPU has compute capability 7.0 and PyTorch, bitsandbytes and vLLM need 7.5 (T4) or newer: use "
            "another GPU, or set CUDA_VISIBLE_DEVICES= and train --model tiny on the CPU.",
            True,
        )
    ]


NO_COMPILER = (
    "there is no C compiler (CC, gcc or clang), and Triton and torch.compile need one: `unset CC`, or `sudo apt-get "
    "install build-essential`."
)


def test_a_missing_compiler_stops_unsloth_and_vllm(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.programs.discard("gcc")
    assert faults("unsloth", "--use_vllm", "false") == faults("transformers", *TRL_VLLM) == [(NO_COMPILER, True)]
    assert faults("transformers", "--load_in_4bit", "false", "--use_vllm", "false") == [(NO_COMPILER, False)]
    machine.programs.add("clang")
    assert faults() == []
    monkeypatch.setenv("CC", "cc-12 -pipe")
    assert faults() == [(NO_COMPILER, True)]
    machine.programs.add("cc-12")
    assert faults() == []


def test_missing_python_headers_stop(machine: Machine) -> None:
    (machine.headers / "Python.h").unlink()
    version = ".".join(map(str, sys.version_info[:2]))
    assert faults() == [
        (
            f"{machine.headers}/Python.h is missing, and Triton and torch.compile need it: `sudo apt-get install "
            f"python{version}-dev`.",
            True,
        )
    ]


def test_python_headers_are_searched_where_triton_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    schemes: list[str] = []
    monkeypatch.setattr(sysconfig, "get_default_scheme", lambda: "posix_local")  # Debian's own Python
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: schemes.append(scheme) or {"include": "/nowhere"})
    assert preflight.check_python_headers() is not None
    assert schemes == ["posix_prefix"]


def test_a_gpu_in_use_stops_where_the_weights_do_not_fit(machine: Machine) -> None:
    machine.free = 2.0
    (fault,) = faults()
    weights = preflight_parts()["weights"]
    assert fault == (
        f"the weights take {weights:.1f} GiB: choose another GPU or a smaller --model, or stop the processes that "
        "`nvidia-smi` lists; 2.0 of 80.0 GiB of GPU memory are free.",
        True,
    )


def preflight_parts(*argv: str) -> dict[str, float]:
    from gtpo.models.memory import estimate

    return estimate(KNOWN["llama"], Workload.of(settings_of(*argv).to_dict()))


def test_a_plan_beyond_the_free_memory_is_a_warning(machine: Machine) -> None:
    parts = preflight_parts()
    machine.free, machine.total = sum(parts.values()) - 0.1, 40.0
    assert faults() == [
        (
            f"the run is estimated to need {sum(parts.values()):.1f} GiB: lower --max_seq_length (`--dry_run` shows "
            "the parts), or stop the processes that `nvidia-smi` lists; "
            f"{machine.free:.1f} of 40.0 GiB of GPU memory are free.",
            False,
        )
    ]
    machine.free += 0.2
    assert faults() == []


def test_what_vllm_reserves_has_to_be_free(machine: Machine) -> None:
    machine.free = 31.5  # 40 % of 80 GiB are 32
    assert faults() == [
        (
            "vLLM reserves 32.0 GiB: add `--gpu_memory_utilization 0.39`, or stop the processes that `nvidia-smi` "
            "lists; 31.5 of 80.0 GiB of GPU memory are free.",
            False,
        )
    ]
    assert faults("unsloth", "--gpu_memory_utilization", "0.39") == faults("unsloth", "--use_vllm", "false") == []


# ---- the Hub ----


GATED = (
    f"{LLAMA} is gated and the Hub token of this machine has no access%s: accept its license on "
    f"https://huggingface.co/{LLAMA}, then `hf auth login` or `export HF_TOKEN=...`."
)
IN_4_BITS = ("unsloth",)
IN_16_BITS = ("transformers", "--load_in_4bit", "false")


def test_a_gated_model_without_access_stops(machine: Machine) -> None:
    machine.access = GatedRepoError("403", response=response(403))
    assert faults(*IN_16_BITS) == [(GATED % "", True)]
    why = " (training uses Unsloth's copy; evaluate.py and --merge load the original)"
    assert faults(*IN_4_BITS) == [(GATED % why, False)]


def test_a_model_that_is_not_on_the_hub_stops(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_shape", lambda model: None)
    machine.access = RepositoryNotFoundError("404", response=response(404))
    assert faults(*IN_16_BITS, model="Qwen/Qwen3-Nothing") == [
        ("the Hub has no model Qwen/Qwen3-Nothing, or it is private: correct --model, or `hf auth login`.", True)
    ]


def test_an_error_of_the_hub_itself_is_left_to_the_download(machine: Machine) -> None:
    machine.access = HfHubHTTPError("502", response=response(502))
    assert faults(*IN_16_BITS) == []


def test_without_the_hub_the_model_has_to_be_cached(machine: Machine) -> None:
    machine.hub = httpx.ConnectError("Name or service not known")
    sentence = (
        f"{LLAMA} is not in the cache of the Hub ({machine.cache}) and the Hub cannot be reached: check the network "
        f"and HF_HUB_OFFLINE, or `hf download {LLAMA}` on another machine and copy its cache."
    )
    assert faults(*IN_16_BITS) == faults(*IN_4_BITS) == [(sentence, True)]
    assert set(machine.requests) == {"head"}
    store(machine.cache, f"models--{LLAMA.replace('/', '--')}")
    assert faults(*IN_16_BITS) == faults(*IN_4_BITS) == []


def store(cache: Path, name: str, shards: int = 0, missing: int = 0) -> None:
    """A cached model: one file of weights, or an index and its shards without the first ``missing``."""
    snapshot = cache / name / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    names = [f"model-{i}.safetensors" for i in range(shards)] or ["model.safetensors"]
    if shards:
        index = {"weight_map": {f"layer.{i}": file for i, file in enumerate(names)}}
        (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    for file in names[missing:]:
        (snapshot / file).touch()


@pytest.mark.parametrize(
    ("name", "shards", "missing", "in_16_bits", "in_4_bits"),
    [
        ("models--meta-llama--Llama-3.1-8B-Instruct", 4, 0, True, True),
        ("models--meta-llama--Llama-3.1-8B-Instruct", 4, 1, False, False),
        ("models--meta-llama--Llama-3.1-8B-Instruct", 0, 1, False, False),
        ("models--unsloth--Llama-3.1-8B-Instruct-unsloth-bnb-4bit", 0, 0, False, True),
        ("models--unsloth--Meta-Llama-3.1-8B-Instruct-bnb-4bit", 0, 0, False, True),
        ("models--unsloth--Llama-3.1-8B-Instruct", 0, 0, False, False),
        ("models--meta-llama--Llama-3.1-8B", 0, 0, False, False),
    ],
)
def test_a_cached_model_needs_no_hub(
    name: str, shards: int, missing: int, in_16_bits: bool, in_4_bits: bool, machine: Machine
) -> None:
    store(machine.cache, name, shards, missing)
    machine.hub, machine.disk = OSError("HF_HUB_OFFLINE"), 0
    assert (faults(*IN_16_BITS) == []) is in_16_bits
    assert (faults(*IN_4_BITS) == []) is in_4_bits
    assert bool(machine.requests) is not (in_16_bits and in_4_bits)


def test_weights_larger_than_the_free_disk_stop(machine: Machine) -> None:
    machine.disk = 15.5e9
    assert faults(*IN_16_BITS) == [
        (
            f"the weights of {LLAMA} take 16.1 GB and {machine.cache} has 15.5 GB left: free some space, or `export "
            "HF_HOME=DIRECTORY` on a larger disk.",
            True,
        )
    ]
    machine.disk = 16.2e9
    assert faults(*IN_16_BITS) == []


@pytest.mark.parametrize(("run", "gigabytes"), [(IN_16_BITS, "16.1"), (IN_4_BITS, "5.7")])
def test_the_disk_is_compared_with_the_plan(run: tuple[str, ...], gigabytes: str, machine: Machine) -> None:
    """Llama-3.1-8B has 8.03 billion parameters; Unsloth's 4-bit copy is 5.7 GB."""
    machine.disk = 1e9
    ((fault, fatal),) = faults(*run)
    assert f"take {gigabytes} GB and {machine.cache} has 1.0 GB left" in fault and fatal


@pytest.mark.parametrize("model", ["tiny", "{directory}", "a/b/c", "./missing/model"])
def test_what_is_no_hub_id_is_not_looked_up(model: str, machine: Machine, tmp_path: Path) -> None:
    values = settings_of().to_dict() | {"model": model.format(directory=tmp_path)}
    list(checks(Workload.of(values), "unsloth"))
    assert machine.requests == []


# ---- when they run ----


def test_a_fatal_fault_stops_and_others_are_warnings(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.programs.discard("gcc")
    check_machine(settings_of("--load_in_4bit", "false", "--use_vllm", "false"), "transformers")
    assert caplog.messages == [f"warning: {NO_COMPILER}"]
    with pytest.raises(UsageError) as caught:
        check_machine(settings_of(), "unsloth")
    assert str(caught.value) == NO_COMPILER


def test_several_gpus_in_one_process_stop_a_script_before_its_model(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trl.GRPOConfig, "n_gpu", 2)
    settings = settings_of(*TRL_VLLM)
    with pytest.raises(UsageError, match=r"^2 GPUs are visible to one process and DataParallel is not supported"):
        check_machine(settings, "transformers")
    check_machine(settings, "unsloth")  # it uses one of them


def test_the_server_of_vllm_needs_a_gpu(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU TRL would wait for the server, and then raise that NCCL needs a CUDA device."""
    settings = settings_of(*TRL_VLLM, "--vllm_mode", "server", "--backend", "transformers")
    check_machine(settings, "transformers")
    monkeypatch.setattr(preflight, "gpu_is_available", lambda: False)
    with pytest.raises(
        UsageError, match=r"^--vllm_mode server needs a GPU, because TRL .* over NCCL: use --vllm_mode col"
    ):
        check_machine(settings, "transformers")
    settings.run.dry_run = True
    check_machine(settings, "transformers")


def test_a_run_on_a_cpu_and_a_dry_run_are_not_checked(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.programs.discard("gcc")
    settings = settings_of()
    settings.run.dry_run = True
    check_machine(settings, "unsloth")
    settings = settings_of()
    settings.given["use_cpu"] = True
    check_machine(settings, "unsloth")
    assert describe_checks(settings, "unsloth") == ""
    monkeypatch.setattr(preflight, "gpu_is_available", lambda: False)
    check_machine(settings_of(), "unsloth")


def test_dry_run_shows_the_checks(machine: Machine) -> None:
    machine.programs.discard("gcc")
    machine.free = 10.0
    ((memory, fatal),) = [fault for fault in faults() if fault[0] != NO_COMPILER]
    assert not fatal
    assert describe_checks(settings_of(), "unsloth") == (
        "# ok: driver, compute capability, Python headers, Hub, access to the model, disk\n"
        f"# error: {NO_COMPILER}\n"
        f"# warning: {memory}\n"
    )
    printed = describe_dry_run(settings_of(), "unsloth", 10, 0)
    lines = [line for line in printed.splitlines() if "outputs/" not in line]
    assert 80 < max(map(len, lines)) <= 100 and NO_COMPILER in printed.replace("\n#    ", "")
    assert yaml.safe_load(printed)["model"] == "llama"


def test_dry_run_without_a_gpu_names_the_command(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "gpu_is_available", lambda: False)
    assert describe_checks(settings_of(), "transformers") == (
        "# check the machine of the run first: python -m gtpo.models.preflight --model llama\n"
    )
    machine.driver = "550.54.15"
    assert describe_checks(settings_of(), "transformers") == f"# {OLD_DRIVER}\n"


@pytest.mark.parametrize("script", ["train_gtpo", "train_grpo", "train_sft"])
def test_scripts_check_before_they_download(
    script: str, machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither rows nor model are loaded, and nothing is written."""
    main = __import__(script).main
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--model", "llama", "--backend", "transformers"])
    settings = settings_of()
    settings.method = script.removeprefix("train_")
    monkeypatch.setattr(f"{script}.parse", lambda *_: settings)
    monkeypatch.setattr("gtpo.data.load.load_train", lambda *_: pytest.fail("rows were loaded"))
    monkeypatch.setattr("gtpo.models.load.build_policy", lambda *_: pytest.fail("the model was loaded"))
    machine.disk = 1e9
    with pytest.raises(UsageError, match=r"the weights of meta-llama/Llama-3\.1-8B-Instruct take 16\.1 GB and"):
        main()


# ---- the command ----


def command(machine: Machine, monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    monkeypatch.setattr(sys, "argv", ["preflight.py", *argv])
    try:
        preflight.main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_the_command_prints_the_checks_of_a_preset(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(machine, monkeypatch, "--model", "qwen") == 0
    assert capsys.readouterr().out == (
        "ok: driver, compute capability, C compiler, Python headers, GPU memory, Hub, access to the model, disk\n"
    )
    machine.disk = 1e9
    assert command(machine, monkeypatch) == 2
    assert f"error: the weights of {LLAMA} take 5.7 GB" in capsys.readouterr().out


def test_the_command_says_that_pytorch_sees_no_gpu(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The driver is new enough: PyTorch is a build for CPUs, or the GPU is hidden from it."""
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    for module in (backend, preflight):
        monkeypatch.setattr(module, "gpu_is_available", lambda: False)
    assert command(machine, monkeypatch) == 0
    sentence = (
        "warning: PyTorch 2.13.0+cpu sees no GPU (%s): `unset CUDA_VISIBLE_DEVICES`, or install PyTorch for CUDA."
    )
    assert sentence % "it may be a build for CPUs" in capsys.readouterr().out
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    command(machine, monkeypatch)
    assert sentence % "CUDA_VISIBLE_DEVICES hides it" in capsys.readouterr().out
    machine.driver = "550.54.15"
    command(machine, monkeypatch)
    assert "PyTorch, C compiler" in capsys.readouterr().out  # the driver is the reason


def test_the_command_needs_no_installed_packages(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The notebook calls it before 12 GB are installed, because the driver decides whether they run."""
    for installed in ((), ("yaml",)):  # of the packages it asks for
        for module in (preflight, backend):
            monkeypatch.setattr(module, "is_installed", lambda package, installed=installed: package in installed)
        machine.driver = "580.65.06"
        assert command(machine, monkeypatch) == 0
        assert capsys.readouterr().out == "ok: driver, C compiler, Python headers\n"
        machine.driver = "550.54.15"
        assert command(machine, monkeypatch) == 2
        assert capsys.readouterr().out == f"ok: C compiler, Python headers\nerror: {OLD_DRIVER}\n"


def test_the_command_on_a_machine_without_a_gpu() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PATH": str(Path(sys.executable).parent)}
    ended = subprocess.run(
        [sys.executable, "-m", "gtpo.models.preflight"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        "preflight.py: this machine has no NVIDIA GPU: run the checks on the machine that trains.\n"
    )


def test_the_command_runs_on_a_python_without_packages(tmp_path: Path) -> None:
    """``-S`` leaves out site-packages; an old driver is the one fault that does not depend on this machine."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 550.54.15\n")
    smi.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    command = [sys.executable, "-S", "-m", "gtpo.models.preflight", "--model", "qwen"]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (2, "")
    assert f"error: {OLD_DRIVER}" in ended.stdout.splitlines()
    nothing = [sys.executable, "-S", "-c", "import yaml"]
    assert "ModuleNotFoundError" in subprocess.run(nothing, env=environment, capture_output=True, text=True).stderr


@pytest.mark.parametrize("target", ["first-light"])
def test_a_gpu_command_checks_the_machine_before_it_installs(target: str) -> None:
    command = ["make", "--dry-run", "--always-make", f"PYTHON={sys.executable}", target]
    lines = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    preflight, install = ([i for i, line in enumerate(lines) if text in line] for text in ("preflight", "pip install"))
    assert preflight and install and preflight[0] < install[0]


# ---- the loaded policy ----


def engine(length: int) -> Any:
    return SimpleNamespace(llm_engine=SimpleNamespace(model_config=SimpleNamespace(max_model_len=length)))


@pytest.fixture
def arguments(tiny: Path, tmp_path: Path) -> ModelArguments:
    return ModelArguments(model=str(shutil.copytree(tiny, tmp_path / "model")), lora_rank=4, max_seq_length=1500)


def changed(unsloth: FakeUnsloth, change: Any) -> None:
    """Unsloth loads a model and tokenizer that ``change(model, tokenizer)`` has changed."""
    load = unsloth.from_pretrained

    def from_pretrained(**options: Any) -> tuple[Any, Any]:
        model, tokenizer = load(**options)
        change(model, tokenizer)
        return model, tokenizer

    unsloth.from_pretrained = from_pretrained  # type: ignore[method-assign]


def test_what_unsloth_has_loaded_as_asked_passes(
    unsloth: FakeUnsloth, arguments: ModelArguments, caplog: pytest.LogCaptureFixture
) -> None:
    changed(unsloth, lambda model, tokenizer: setattr(model, "vllm_engine", engine(1500)))
    build_policy(arguments, "unsloth", 0, use_vllm=True)
    assert caplog.messages == [f"loading {arguments.model}"]


def test_a_shorter_engine_stops(unsloth: FakeUnsloth, arguments: ModelArguments) -> None:
    """Unsloth prints it and goes on; vLLM then refuses the longest prompts in the middle of the run."""
    changed(unsloth, lambda model, tokenizer: setattr(model, "vllm_engine", engine(1499)))
    with pytest.raises(UsageError) as caught:
        build_policy(arguments, "unsloth", 0, use_vllm=True)
    assert str(caught.value) == (
        "vLLM has memory for 1499 tokens of prompt and completion, not for --max_seq_length 1500: raise "
        "--gpu_memory_utilization, or add `--max_seq_length 1499` and lower --max_prompt_length."
    )


# ---- vLLM does not start ----


def vllm_code(module: str, error: str) -> Any:
    """A function of a module of that name, which raises."""
    names = {"__name__": module}
    exec(f"def start(**options):\n    raise {error}", names)
    return names["start"]


@pytest.mark.parametrize("module", ["vllm.v1.engine.core", "unsloth_zoo.vllm_utils"])
def test_the_command_without_vllm_is_printed(
    module: str, unsloth: FakeUnsloth, arguments: ModelArguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train_gtpo.py", "--model", "llama", "--run_name", "gamma 0.5"])
    unsloth.from_pretrained = vllm_code(module, "RuntimeError('Engine core failed\\nsee above')")  # type: ignore[method-assign]
    with pytest.raises(UsageError) as caught:
        build_policy(arguments, "unsloth", 0, use_vllm=True)
    assert str(caught.value) == (
        "vLLM does not start (Engine core failed); train without it: python train_gtpo.py --model llama --run_name "
        "'gamma 0.5' --use_vllm false"
    )
    monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py", "-f", "kernel.json"])
    with pytest.raises(UsageError, match=r"train without it: --use_vllm false$"):
        build_policy(arguments, "unsloth", 0, use_vllm=True)


def test_another_error_of_the_loader_is_not_one_of_vllm(unsloth: FakeUnsloth, arguments: ModelArguments) -> None:
    unsloth.from_pretrained = vllm_code("unsloth.models.loader", "OSError('no such file')")  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="cannot load model"):
        build_policy(arguments, "unsloth", 0, use_vllm=True)


def test_a_single_process_warns(machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    machine.capability = (7, 5)
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(preflight, "IS_MAIN_PROCESS", False)
    check_machine(settings_of(), "unsloth")
    assert caplog.messages == []
