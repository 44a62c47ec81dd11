"""Jobs: which benchmarks, planned from the flags or found as stored completions."""

import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from helpers.files import write_settings
from helpers.refusals import refused
from pytest import LogCaptureFixture, MonkeyPatch, mark, raises

from gtpo.arguments import PromptArguments
from gtpo.cli.parse import parse_evaluation
from gtpo.data.load import load_benchmark
from gtpo.evaluation import jobs, sampling
from gtpo.evaluation.arguments import EvaluationArguments
from gtpo.evaluation.benchmarks import select_benchmarks
from gtpo.evaluation.jobs import find_stored_jobs, plan_evaluation, stop_on_signals
from gtpo.evaluation.records import Origin, Problems
from gtpo.files import fingerprint
from gtpo.models import backend
from gtpo.models.backend import GPU_PACKAGES
from gtpo.models.hub import TINY_BASE
from gtpo.prompts import SYSTEM_PROMPT

Store = Callable[..., Path]
Texts = dict[str, list[str]]

ROWS = load_benchmark("arithmetic")


def select(*names: str, **flags: Any) -> dict[str, str]:
    return {each.name: each.source for each in select_benchmarks(EvaluationArguments(list(names), **flags))}


@mark.parametrize(
    ("source", "name"),
    [
        *(("data/my.test.csv", "my.test"), ("mine.PARQUET", "mine"), ("gsm8k.csv", "gsm8k.csv"), ("gsm8k", "gsm8k")),
        *(("data/aime24.jsonl", "aime24.jsonl"), ("owner/aime99", "aime99"), ("openai/gsm8k", "openai-gsm8k")),
    ],
)
def test_each_benchmark_is_selected_once_under_its_own_name(source: str, name: str) -> None:
    assert select(source) == {name: source}
    assert list(select("math500", source, "math500").items()) == [("math500", "math500"), (name, source)]


def test_equal_names_and_flags_without_benchmark_are_refused() -> None:
    with refused("mine"):
        select("a/mine.csv", "b/mine.csv")
    for flag in ("prompt_column", "answer_column", "split", "dataset_config", "grader"):
        with refused(f"--{flag}"):
            select("gsm8k", **{flag: "task"})
        assert list(select("gsm8k", "mine.csv", **{flag: "task"})) == ["gsm8k", "mine"]


THINK = PromptArguments(system_prompt="none", tags="<think> </think> <answer> </answer>")


def test_a_job_for_every_target_and_benchmark(
    outputs: Path, tiny: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    flags = EvaluationArguments(
        ["arithmetic", "arithmetic_hard"],
        runs=["outputs/older", "base"],
        **{"limit": 3, "k": 2, "temperature": 0.5, "top_p": 0.9, "seed": 7, "max_new_tokens": 11, "batch_size": 5},
        checkpoint="best",
        output_dir=str(tmp_path),
    )
    monkeypatch.setattr("gtpo.evaluation.targets.choose_prompts", lambda *_: [PromptArguments(), THINK])
    jobs = plan_evaluation(flags).jobs
    labels = ("older@best", f"base-{tiny.name}")
    names = ("arithmetic", "arithmetic_hard")
    assert [job.path for job in jobs] == [tmp_path / label / f"{name}.jsonl" for label in labels for name in names]
    assert jobs[0].problems == Problems(ROWS[:3])
    best = Path("outputs/older/best")
    assert [job.adapter for job in jobs] == [best, best, None, None]
    assert jobs[1].title == "older@best, Arithmetic, 4 to 5 steps"
    settings = jobs[0].head.settings.write()
    assert settings.pop("problems_hash") != jobs[1].head.settings.problems_hash
    assert settings.pop("model") == jobs[1].head.settings.model != str(tiny)  # a hash of the weights
    assert settings.pop("adapter") is not None
    assert settings == {  # written to every completion file: a new name here makes stored completions unusable
        **{"benchmark": "arithmetic", "problems": 3, "backend": "transformers", "k": 2, "temperature": 0.5},
        **{"top_p": 0.9, "seed": 7, "max_new_tokens": 11, "batch_size": 5, "load_in_4bit": False},
        **{"tags": "<reasoning> </reasoning> <answer> </answer>", "system_prompt": SYSTEM_PROMPT},
        **{"chat_template": None, "chat_template_kwargs": None},
    }
    assert jobs[2].head.settings.prompt == THINK
    origin = jobs[0].head.origin
    assert replace(origin, environment={}, data={}) == Origin(str(tiny), str(best), "best")
    assert origin.environment["packages"]["transformers"]


def test_several_greedy_samples_are_refused() -> None:
    with refused("--temperature 0 samples the same completion 2 times: add --k 1"):
        EvaluationArguments(["arithmetic"], temperature=0, k=2)


@mark.parametrize(
    ("temperature", "top_p", "said"),
    [
        (1.0, 0.8, ["--temperature 0.3, and is sampled with 1.0", "--top_p 0.9, and is sampled with 0.8"]),
        (0.3, 0.9, []),
        (0.0, 1.0, []),  # greedy says what it is
    ],
)
def test_other_sampling_than_in_training_is_named(
    temperature: float, top_p: float, said: list[str], outputs: Path, tmp_path: Path, caplog: LogCaptureFixture
) -> None:
    settings = {"model": "tiny", "temperature": 0.3, "top_p": 0.9} | vars(PromptArguments())
    write_settings(outputs / "older" / "config.yaml", settings)
    flags = {"temperature": temperature, "top_p": top_p, "k": 1, "output_dir": str(tmp_path)}
    plan_evaluation(EvaluationArguments(["arithmetic"], runs=["base", "outputs/older"], **flags))
    assert caplog.messages == [f"outputs/older/adapter was trained with {text}" for text in said]


def test_a_run_called_like_its_base_is_refused(outputs: Path, tiny: Path) -> None:
    """Both would be stored in base-NAME/, and --overwrite would show the run's scores twice."""
    name = f"base-{tiny.name}"
    (outputs / "older").rename(outputs / name)
    flags = EvaluationArguments(["arithmetic"], runs=["base", f"outputs/{name}"], overwrite=True)
    with refused(f"two of --runs are called {name}"):
        plan_evaluation(flags)


def test_a_signal_says_how_to_continue(monkeypatch: MonkeyPatch, caplog: LogCaptureFixture) -> None:
    monkeypatch.setattr("sys.argv", ["evaluate.py", "--k", "8"])
    stopped: dict[int, Callable] = {}
    monkeypatch.setattr(signal, "signal", stopped.__setitem__)
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_DFL)
    stop_on_signals()
    assert stopped.keys() == {signal.SIGTERM, signal.SIGHUP}
    with raises(SystemExit, match="143"):
        stopped[signal.SIGTERM](signal.SIGTERM, None)
    assert caplog.messages == ["\nstopped by SIGTERM; continue with: python evaluate.py --k 8"]
    stopped.clear()
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_IGN)  # as under nohup
    stop_on_signals()
    assert not stopped


def test_vllm_gets_its_flags_and_has_no_batch_size(
    outputs: Path, tiny: Path, tmp_path: Path, gpu: None, monkeypatch: MonkeyPatch
) -> None:
    started: list[tuple] = []
    monkeypatch.setattr(jobs, "check_backend", lambda _: None)
    monkeypatch.setattr(sampling, "VLLMSampler", lambda *arguments: started.append(arguments) or object())
    flags = EvaluationArguments(["arithmetic"], runs=["outputs/older"], gpu_memory_utilization=0.5)
    plan = plan_evaluation(flags)
    assert plan.sampling.batch_size is None and plan.jobs[0].head.settings.sampling.batch_size is None
    assert plan.load() is plan.load()
    [(model, *others)] = started
    assert (model.base, model.adapter) == (str(tiny), None)
    assert others == [plan.sampling, 4, 0.5]


@mark.parametrize("has_gpu", [True, False])
@mark.parametrize("model", ["tiny", *sorted(map(str, TINY_BASE.parent.glob("base-*"))), "an own one"])
def test_auto_is_vllm_on_a_gpu_but_for_the_tiny_base(
    model: str, has_gpu: bool, tiny: Path, here: Path, monkeypatch: MonkeyPatch
) -> None:
    """By its name and by its path; without vLLM of the tested version the others are refused."""
    is_own = model == "an own one"
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(backend, "installed_version", GPU_PACKAGES.get)
    flags = EvaluationArguments(["arithmetic"], model=str(tiny) if is_own else model)
    [job] = plan_evaluation(flags).jobs
    assert job.head.settings.backend == ("vllm" if is_own and has_gpu else "transformers")
    monkeypatch.setattr(backend, "installed_version", lambda package: None)
    with refused("vllm .* is needed") if is_own and has_gpu else nullcontext():
        plan_evaluation(flags)


def test_stored_jobs_are_those_of_the_benchmarks(store: Store, texts_by_hand: Texts, tmp_path: Path) -> None:
    path = store(texts_by_hand)
    other = path.rename(path.with_name("gsm8k.jsonl"))
    store(texts_by_hand, "another")
    other.with_name("notes.jsonl").write_text("not completions\nof a benchmark\n")
    flags = EvaluationArguments(regrade=True, benchmarks=["arithmetic"], output_dir=str(tmp_path))
    [job] = find_stored_jobs(flags)
    assert (job.path, job.problems) == (tmp_path / "another" / "arithmetic.jsonl", Problems(ROWS[:3]))
    other.unlink()
    job.path.write_text(job.path.read_text().replace(job.head.settings.problems_hash, ""))
    with refused("--data_dir"):  # other problems
        find_stored_jobs(EvaluationArguments(regrade=True, output_dir=str(tmp_path)))


def test_regrade_reads_the_stored_or_given_data_directory(
    store: Store, texts_by_hand: Texts, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    store(texts_by_hand, about={"data": {"source": "arithmetic", "data_dir": "was"}})
    read: list[str | None] = []
    monkeypatch.setattr(
        "gtpo.evaluation.benchmarks.load_benchmark",
        lambda name, data_dir: read.append(data_dir) or load_benchmark(name),
    )
    argv = ["--regrade", "--output_dir", str(tmp_path)]
    for more in ([], ["--data_dir", "is"]):
        find_stored_jobs(*parse_evaluation(EvaluationArguments, [*argv, *more]))
    assert read == ["was", "is"]


def test_regrade_names_an_adapter_that_was_trained_again(
    outputs: Path, store: Store, texts_by_hand: Texts, tmp_path: Path, caplog: LogCaptureFixture
) -> None:
    adapter = outputs / "older" / "adapter"
    for label, weights in (("now", fingerprint(adapter)), ("before", "of other weights")):
        path = store(texts_by_hand, label, settings={"adapter": weights}, about={"adapter": str(adapter)})
    find_stored_jobs(EvaluationArguments(regrade=True, output_dir=str(tmp_path)))
    [message] = caplog.messages
    assert message.startswith(f"{path}: the weights have changed since these completions")


def test_regrade_and_compare_refuse_what_is_stored() -> None:
    for mode in (["--regrade"], ["--compare", "a", "b"]):
        for flag in ("--checkpoint=last", "--max-new-tokens=1", "--overwrite"):
            flags, given = parse_evaluation(EvaluationArguments, [*mode, flag])
            with refused(flag.partition("=")[0].replace("-", "_").strip("_")):
                flags.check_given(given)
    flags, given = parse_evaluation(EvaluationArguments, ["--regrade", "--grader", "math_verify", "--split", "test"])
    flags.check_given(given)
