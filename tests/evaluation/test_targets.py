"""Which adapters and which base model are evaluated, in which precision and with which prompt."""

import shutil
from dataclasses import replace
from pathlib import Path

import yaml
from helpers.files import read_json, tables_of, write_json
from helpers.refusals import refused
from helpers.runs import fake_run
from helpers.settings import parsed
from pytest import LogCaptureFixture, MonkeyPatch, fixture, mark
from transformers import AutoTokenizer

from gtpo.arguments import ModelArguments, PromptArguments, stored_prompt
from gtpo.evaluation import targets
from gtpo.evaluation.arguments import EvaluationArguments
from gtpo.evaluation.targets import (
    Asked,
    Targets,
    check_base,
    choose_4bit,
    choose_prompts,
    choose_targets,
    find_targets,
    label_among,
)
from gtpo.files import fingerprint
from gtpo.models.hub import TINY_BASE
from gtpo.models.load import build_policy, load_policy
from gtpo.models.source import model_source, same_base

TABLES = tables_of(__file__)
OLDER = ["outputs/older"]


def labels(found: Targets) -> list[str]:
    return [label_among(target, found) for target in found]


def base_of(names: list[str], model: str | None = None) -> str:
    """The base that is loaded for ``--runs`` and ``--model``, after its check."""
    found = find_targets(names, model)
    check_base(found)
    [base] = {target.base for target in found}
    return base


def test_without_runs_the_newest_finished_one_is_evaluated(outputs: Path, caplog: LogCaptureFixture) -> None:
    [newest] = find_targets([], None)
    assert labels([newest]) == ["demo-newer"]
    assert (newest.adapter, newest.checkpoint) == (Path("outputs/demo/newer/adapter"), "last")
    assert "outputs/demo/newer" in caplog.text
    for study in ("reproduce/tiny", "study"):  # what they train is not evaluated unasked
        shutil.copytree(outputs / "older", outputs / study / "gtpo-s1")
    shutil.rmtree(outputs / "demo")
    [best] = find_targets([], None, "best")
    assert (labels([best]), best.adapter, best.checkpoint) == (["older@best"], Path("outputs/older/best"), "best")
    shutil.rmtree(outputs / "older")
    with refused("no finished run"):
        find_targets([], None)


def test_runs_and_adapter_directories_and_base_are_targets(outputs: Path, tiny: Path) -> None:
    paths = ["outputs/older/adapter", "outputs/older/best", "outputs/demo/newer/adapter"]
    found = find_targets(["base", "outputs/older", "outputs/older/best", "outputs/demo/newer/"], None)
    assert labels(found) == [f"base-{tiny.name}", "older", "older-best", "demo-newer"]
    assert [target.adapter for target in found] == [None, *map(Path, paths)]
    [at_50] = find_targets(["outputs/unfinished"], None, "50")
    assert at_50.adapter == Path("outputs/unfinished/checkpoint-50")
    assert (labels([at_50]), at_50.checkpoint) == (["unfinished@50"], "50")
    [named] = find_targets(paths[:1], None)
    assert (labels([named]), named.adapter, named.checkpoint) == (["older"], Path(paths[0]), None)
    assert labels(find_targets([], "tiny")) == labels(find_targets(["base"], "tiny")) == ["base-tiny"]
    with refused("--model .. is unknown"):  # --model "$UNSET"
        find_targets([], "")


def test_model_names_an_adapter_or_a_run_too(outputs: Path, tiny: Path) -> None:
    for name in ("outputs/older", "outputs/older/adapter"):
        [target] = find_targets([], name)
        assert (labels([target]), target.adapter) == (["older"], Path("outputs/older/adapter"))
        assert target.base == str(tiny)
        with refused(f"--model {name} has an adapter: name it with --runs"):
            find_targets(["outputs/demo/newer"], name)
    [best] = find_targets([], "outputs/older", "best")
    assert best.adapter == Path("outputs/older/best")


@mark.parametrize(
    ("names", "checkpoint", "named"),
    TABLES["what_is_not_an_adapter_is_refused"],
)
def test_what_is_not_an_adapter_is_refused(outputs: Path, names: list[str], checkpoint: str, named: str) -> None:
    (outputs / "full" / "model").mkdir(parents=True)
    (outputs / "full" / "model" / "config.json").write_text("{}")
    with refused(named):
        find_targets(names, None, checkpoint)


def test_a_merged_model_is_no_base(outputs: Path, tiny: Path) -> None:
    merged = shutil.copytree(tiny, outputs / "older" / "merged")
    assert labels(find_targets([], str(merged))) == ["base-merged"]  # of no run
    fake_run(outputs / "older", {"model": "tiny"})
    assert labels(find_targets([], str(merged))) == ["model-older-merged"]
    edit_config(outputs / "demo/newer/adapter", base_model_name_or_path=str(merged))  # what it started from
    assert labels(find_targets(["base", "outputs/demo/newer"], None)) == ["base-merged", "demo-newer"]


def edit_json(path: Path, **changes: object) -> None:
    write_json(path, {**read_json(path), **changes})


def edit_config(adapter: Path | None, **changes: object) -> None:
    edit_json(Path(str(adapter)) / "adapter_config.json", **changes)


@mark.parametrize(
    "settings",
    [
        {"peft_type": "x"},
        {"base_model_name_or_path": None},
        {"r": 8, "rank_pattern": {"q_proj": 10**6}},
        {"layer_replication": [[0, 2]] * 9},
    ],
)
def test_adapters_of_another_kind_are_refused(outputs: Path, settings: dict) -> None:
    edit_config(outputs / "older" / "adapter", **settings)
    with refused("expected peft_type LORA, base_model_name_or_path, r to 4096, no layer_replication"):
        find_targets(OLDER, None)


def test_pickled_adapters_are_refused(outputs: Path) -> None:
    weights = outputs / "demo/newer/adapter/adapter_model.safetensors"
    weights.rename(weights.with_suffix(".bin"))
    with refused("adapter_model.bin is a pickle"):
        find_targets(["outputs/older/best", "outputs/demo/newer"], None)


def test_the_adapter_names_its_base_model(outputs: Path, tiny: Path) -> None:
    newer = "outputs/demo/newer"
    assert base_of(["base", *OLDER, newer]) == str(tiny)
    edit_config(Path(newer, "adapter"), base_model_name_or_path="meta-llama/Llama-3.1-8B-Instruct")
    for names in ([*OLDER, newer], [*OLDER, "outputs/older/best", newer]):  # the second and the third
        with refused(f"older/adapter was trained from {tiny}, {newer}/adapter from meta-llama/Llama-3.1-8B-Instruct"):
            find_targets(names, None)
    edit_config(Path(newer, "adapter"), base_model_name_or_path="elsewhere/outputs/tiny/base-1")
    with refused("was trained from elsewhere/outputs/tiny/base-1, which is not here"):
        base_of([newer])
    edit_config(Path("outputs/older/adapter"), base_model_name_or_path=f"/gone/outputs/tiny/{TINY_BASE.name}")
    for model in (None, "tiny"):  # the shipped base takes the place of a tiny base that is gone
        assert base_of(OLDER, model) == str(TINY_BASE)


def test_a_base_that_was_replaced_in_place_is_refused(outputs: Path, tiny: Path, tmp_path: Path) -> None:
    """Also other weights below another path, for a base that is gone; an adapter that names no weights is not."""
    base = shutil.copytree(tiny, tmp_path / "bases" / "small")
    policy, _ = build_policy(model_source(base), ModelArguments(lora_rank=4), "transformers", seed=0)
    policy.save_pretrained(outputs / "mine" / "adapter")
    mine = ["base", "outputs/mine"]
    original = fingerprint(base)
    assert check_base(find_targets(mine, None)) == original
    moved = str(base.rename(tmp_path / "small"))
    assert check_base(find_targets(mine, moved)) == original
    edit_json(Path(moved) / "config.json", rms_norm_eps=0.5)
    with refused(r"mine/adapter was trained from other files than .*small has now"):
        check_base(find_targets(mine, moved))
    [adapter] = find_targets(mine[1:], moved)
    assert check_base([replace(adapter, base="owner/small")]) == "owner/small"
    edit_config(adapter.adapter, auto_mapping=None)  # of an earlier revision
    assert check_base(find_targets(mine, moved)) == fingerprint(moved)


def test_model_names_a_copy_of_the_base(outputs: Path, tiny: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny, tmp_path / "copies" / tiny.name)
    with refused("--model"):
        find_targets(OLDER, str(copy))  # both exist, so it is another model
    edit_config(Path("outputs/older/adapter"), base_model_name_or_path=str(tmp_path / "moved" / tiny.name))
    assert base_of(OLDER, str(copy)) == str(copy)


ORIGINAL = "Qwen/Qwen2.5-3B-Instruct"
COPY = "unsloth/qwen2.5-3b-instruct-unsloth-bnb-4bit"


@mark.parametrize(
    "config",
    [
        {"base_model_name_or_path": COPY},  # as Unsloth alone
        {"base_model_name_or_path": ORIGINAL, "auto_mapping": {"loaded_from": COPY}},  # as our trainer
    ],
)
def test_other_weights_than_the_4bit_copy_are_named(
    config: dict, outputs: Path, gpu: None, caplog: LogCaptureFixture
) -> None:
    edit_config(Path("outputs/older/adapter"), **config)
    assert base_of(OLDER, COPY) == COPY and not caplog.messages
    assert base_of(OLDER, ORIGINAL) == ORIGINAL
    assert [record.levelname for record in caplog.records] == ["WARNING"] and COPY in caplog.text
    edit_config(Path("outputs/older/best"), base_model_name_or_path=ORIGINAL, auto_mapping=None)
    caplog.clear()
    assert base_of(["outputs/older/best", *OLDER], ORIGINAL) == ORIGINAL  # of two adapters the second one
    assert [message.partition(" was trained on ")[0] for message in caplog.messages] == ["outputs/older/adapter"]


def test_the_largest_rank_of_the_adapters(outputs: Path) -> None:
    names = ["base", "outputs/older", "outputs/demo/newer"]
    assert choose_targets(Asked(model="tiny")).lora_rank is None
    assert choose_targets(Asked(names)).lora_rank == 4
    edit_config(outputs / "older" / "adapter", rank_pattern={"v_proj": 9})
    assert choose_targets(Asked(names)).lora_rank == 9


@mark.parametrize(
    ("a", "b", "same"),
    TABLES["same_base"],
)
def test_same_base(here: Path, a: str, b: str, same: bool) -> None:
    for name in ("base-1", "base-2"):
        (here / "here" / "outputs" / "tiny" / name).mkdir(parents=True)
    assert same_base(a, b) is same
    assert same_base(b, a) is same


def test_the_papers_models_need_a_gpu(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "gpu_is_available", lambda: False)
    for name in ("llama", "Qwen/Qwen2.5-3B-Instruct", "unsloth/meta-llama-3.1-8b-instruct-unsloth-bnb-4bit"):
        with refused("needs a GPU"):
            find_targets([], name)
    assert find_targets([], "qwen", slow=True)[0].base == "Qwen/Qwen2.5-3B-Instruct"


@fixture
def trained(outputs: Path) -> Targets:
    """Adapters of a 4-bit run and of a 16-bit run, one outside a run, and the base."""
    for run, value in (("older", True), ("demo/newer", False)):
        fake_run(outputs / run, {"load_in_4bit": value})
    shutil.copytree(outputs / "older" / "adapter", outputs / "copied")
    return find_targets(["outputs/older", "outputs/demo/newer", "outputs/copied", "base"], None)


def test_the_base_has_the_precision_of_training(trained: Targets, gpu: None, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "is_installed", lambda package: package == "bitsandbytes")
    in_4bit, in_16bit, elsewhere, base = trained
    assert choose_4bit(None, [in_4bit, base]) is True
    for others in ([in_16bit, elsewhere, base], [base]):
        assert choose_4bit(None, others) is False
    assert choose_4bit(False, trained[:1]) is False and choose_4bit(True, trained[1:]) is True
    with refused("set --load_in_4bit"):
        choose_4bit(None, trained)
    assert choose_4bit(True, trained) is True


def test_a_4bit_adapter_without_gpu_is_a_warning(
    trained: Targets, monkeypatch: MonkeyPatch, caplog: LogCaptureFixture
) -> None:
    monkeypatch.setattr(targets, "gpu_is_available", lambda: False)
    assert choose_4bit(None, trained[:1]) is False
    assert "a GPU and bitsandbytes" in caplog.text


THINK = "<think> </think> <answer> </answer>"


@fixture
def prompted(outputs: Path) -> Targets:
    """A run of <think> without a system prompt, a run of an earlier revision, and the base model."""
    fake_run(outputs / "older", {"tags": THINK, "system_prompt": "none"})
    fake_run(outputs / "demo/newer", {"model": "tiny"})
    return find_targets(["outputs/older", "outputs/demo/newer", "base"], None)


def test_adapters_are_asked_as_they_were_trained(prompted: Targets, tiny: Path) -> None:
    think, earlier, base = prompted
    expected = PromptArguments(tags=THINK, system_prompt="none")
    assert choose_prompts({}, [think, earlier]) == [expected, PromptArguments()]
    assert choose_prompts({}, [base, think]) == [expected, expected]  # the base model as its run
    assert choose_prompts({}, [base]) == [PromptArguments()]
    merged = shutil.copytree(tiny, "outputs/older/merged")
    assert choose_prompts({}, find_targets([], merged)) == [expected]


def test_a_copy_is_asked_as_it_was_trained(
    outputs: Path, tiny: Path, monkeypatch: MonkeyPatch, caplog: LogCaptureFixture
) -> None:
    """The prompt and the precision lie in the files of the tokenizer: what is next to the copy does not count."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    monkeypatch.setattr("gtpo.models.load.build_policy", lambda *_, **__: (None, tokenizer))
    flags = ["--model", str(tiny), "--dataset", "arithmetic", "--tags", THINK, "--system_prompt", "Be brief."]
    settings = parsed(*flags, "--chat_template_kwargs", '{"style": "plain"}')
    settings.model.load_in_4bit = True
    load_policy(settings, "transformers")
    copy = shutil.copytree(outputs / "older" / "adapter", outputs / "older" / "copy")
    tokenizer.save_pretrained(copy)
    fake_run(outputs / "older", {"tags": "a b c d", "load_in_4bit": False})
    merged = shutil.copytree(tiny, outputs / "merged")
    AutoTokenizer.from_pretrained(copy).save_pretrained(merged)  # as merge_adapter does
    targets_of_copy = find_targets([str(copy)], None)
    of_merged = choose_prompts({}, find_targets([], str(merged)))
    assert choose_prompts({}, targets_of_copy) == of_merged == [settings.prompt]
    with refused("set --load_in_4bit"):
        choose_4bit(None, [*targets_of_copy, *find_targets(["outputs/demo/newer"], None)])
    caplog.clear()
    shutil.copytree(outputs / "older" / "adapter", outputs / "plain")  # of an earlier revision
    assert choose_prompts({}, find_targets([str(outputs / "plain")], None)) == [PromptArguments()]
    assert caplog.messages == [f"{outputs / 'plain'} does not name its prompt: flags and the paper's are used"]


def test_flags_decide_the_prompt_and_texts_are_no_files(prompted: Targets, tmp_path: Path) -> None:
    with refused("--tags"):
        choose_prompts({}, prompted)
    asked = EvaluationArguments(tags="a b c d", system_prompt="Be brief.").prompt
    assert choose_prompts(asked, prompted) == [PromptArguments(tags="a b c d", system_prompt="Be brief.")] * 3
    secret = tmp_path / "secret.txt"
    secret.write_text("of the user")
    fake_run(tmp_path / "outputs/older", {"system_prompt": str(secret), "chat_template": str(secret)})
    prompted = find_targets(OLDER, None)
    [prompt] = choose_prompts({}, prompted)
    assert (prompt.system_prompt, prompt.chat_template) == (str(secret), str(secret))
    assert PromptArguments(**stored_prompt(yaml.safe_load(yaml.safe_dump(vars(prompt))))) == prompt  # as for --regrade
    asked = EvaluationArguments(system_prompt=str(secret)).prompt
    assert choose_prompts(asked, prompted)[0].system_prompt == "of the user"
