"""Which adapters and which base model are evaluated, in which precision and with which prompt."""

import shutil
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
    Target,
    check_base,
    choose_4bit,
    choose_model,
    choose_prompts,
    find_targets,
    max_lora_rank,
    model_label,
    same_model,
)
from gtpo.files import fingerprint
from gtpo.models.hub import TINY_BASE
from gtpo.models.load import build_policy, load_policy

TABLES = tables_of(__file__)


def test_without_runs_the_newest_finished_one_is_evaluated(outputs: Path, caplog: LogCaptureFixture) -> None:
    assert find_targets([], None) == [Target("demo-newer", Path("outputs/demo/newer/adapter"), "last")]
    assert "outputs/demo/newer" in caplog.text
    for study in ("reproduce/tiny", "study"):  # what they train is not evaluated unasked
        shutil.copytree(outputs / "older", outputs / study / "gtpo-s1")
    shutil.rmtree(outputs / "demo")
    assert find_targets([], None, "best") == [Target("older@best", Path("outputs/older/best"), "best")]
    shutil.rmtree(outputs / "older")
    with refused("no finished run"):
        find_targets([], None)


def test_runs_and_adapter_directories_and_base_are_targets(outputs: Path) -> None:
    paths = ["outputs/older/adapter", "outputs/older/best", "outputs/demo/newer/adapter"]
    found = find_targets(["base", "outputs/older", "outputs/older/best", "outputs/demo/newer/"], None)
    assert [target.label for target in found] == ["", "older", "older-best", "demo-newer"]
    assert [target.adapter for target in found] == [None, *map(Path, paths)]
    at_50 = Target("unfinished@50", Path("outputs/unfinished/checkpoint-50"), "50")
    assert find_targets(["outputs/unfinished"], None, "50") == [at_50]
    assert find_targets(paths[:1], None) == [Target("older", Path(paths[0]))]
    assert find_targets([], "tiny") == [Target("")] == find_targets([], "")  # --model "$UNSET"


@mark.parametrize(
    ("names", "checkpoint", "named"),
    TABLES["what_is_not_an_adapter_is_refused"],
)
def test_what_is_not_an_adapter_is_refused(outputs: Path, names: list[str], checkpoint: str, named: str) -> None:
    (outputs / "full" / "model").mkdir(parents=True)
    (outputs / "full" / "model" / "config.json").write_text("{}")
    with refused(named):
        choose_model(find_targets(names, None, checkpoint), None)


def test_a_merged_model_is_no_base(outputs: Path) -> None:
    merged = outputs / "older" / "merged"
    assert model_label(str(merged), [Target("")]) == "base-merged"  # of no run
    fake_run(outputs / "older", {"model": "tiny"})
    assert model_label(str(merged), [Target("")]) == "model-older-merged"
    assert model_label(str(merged), [Target(""), Target("other", outputs)]) == "base-merged"  # what it started from


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
        choose_model(find_targets(["outputs/older"], None), None)


def test_pickled_adapters_are_refused(outputs: Path) -> None:
    weights = outputs / "demo/newer/adapter/adapter_model.safetensors"
    weights.rename(weights.with_suffix(".bin"))
    with refused("adapter_model.bin is a pickle"):
        find_targets(["outputs/older/best", "outputs/demo/newer"], None)


def test_the_adapter_names_its_base_model(outputs: Path, tiny: Path) -> None:
    older, newer = find_targets(["outputs/older", "outputs/demo/newer"], None)
    assert choose_model([Target(""), older, newer], None) == str(tiny)
    edit_config(newer.adapter, base_model_name_or_path="meta-llama/Llama-3.1-8B-Instruct")
    with refused("outputs/demo/newer"):
        choose_model([older, newer], None)
    edit_config(newer.adapter, base_model_name_or_path="elsewhere/outputs/tiny/base-1")
    with refused("elsewhere/outputs/tiny/base-1"):
        choose_model([newer], None)
    edit_config(older.adapter, base_model_name_or_path=f"/gone/outputs/tiny/{TINY_BASE.name}")
    for model in (None, "tiny"):  # the shipped base takes the place of a tiny base that is gone
        assert choose_model([older], model) == str(TINY_BASE)


def test_a_base_that_was_replaced_in_place_is_refused(outputs: Path, tiny: Path, tmp_path: Path) -> None:
    """Also other weights below another path, for a base that is gone; an adapter that names no weights is not."""
    base = shutil.copytree(tiny, tmp_path / "bases" / "small")
    policy, _ = build_policy(ModelArguments(model=str(base), lora_rank=4), "transformers", seed=0)
    policy.save_pretrained(outputs / "mine" / "adapter")
    [mine] = find_targets(["outputs/mine"], None)
    original = fingerprint(base)
    assert choose_model([mine], None) == str(base) and check_base(str(base), [Target(""), mine]) == original
    moved = str(base.rename(tmp_path / "small"))
    assert check_base(moved, [mine]) == original
    edit_json(Path(moved) / "config.json", rms_norm_eps=0.5)
    with refused(r"mine/adapter was trained from other files than .*small has now"):
        check_base(choose_model([mine], moved), [mine])
    assert check_base("owner/small", [mine]) == "owner/small"
    edit_config(mine.adapter, auto_mapping=None)  # of an earlier revision
    assert check_base(moved, [mine]) == fingerprint(moved)


def test_model_names_a_copy_of_the_base(outputs: Path, tiny: Path, tmp_path: Path) -> None:
    [older] = find_targets(["outputs/older"], None)
    copy = shutil.copytree(tiny, tmp_path / "copies" / tiny.name)
    with refused("--model"):
        choose_model([older], str(copy))  # both exist, so it is another model
    edit_config(older.adapter, base_model_name_or_path=str(tmp_path / "moved" / tiny.name))
    assert choose_model([older], str(copy)) == str(copy)


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
    [older] = find_targets(["outputs/older"], None)
    edit_config(older.adapter, **config)
    assert choose_model([older], COPY) == COPY and not caplog.messages
    assert choose_model([older], ORIGINAL) == ORIGINAL
    assert [record.levelname for record in caplog.records] == ["WARNING"] and COPY in caplog.text


def test_the_largest_rank_of_the_adapters(outputs: Path) -> None:
    found = find_targets(["base", "outputs/older", "outputs/demo/newer"], None)
    assert max_lora_rank(found[:1]) is None
    edit_config(found[1].adapter, rank_pattern=None)
    assert max_lora_rank(found) == 4
    edit_config(found[1].adapter, rank_pattern={"v_proj": 9})
    assert max_lora_rank(found) == 9


@mark.parametrize(
    ("a", "b", "same"),
    TABLES["same_model"],
)
def test_same_model(here: Path, a: str, b: str, same: bool) -> None:
    for name in ("base-1", "base-2"):
        (here / "here" / "outputs" / "tiny" / name).mkdir(parents=True)
    assert same_model(a, b) is same
    assert same_model(b, a) is same


def test_the_papers_models_need_a_gpu(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "gpu_is_available", lambda: False)
    for name in ("llama", "Qwen/Qwen2.5-3B-Instruct", "unsloth/meta-llama-3.1-8b-instruct-unsloth-bnb-4bit"):
        with refused("needs a GPU"):
            choose_model([Target("")], name)
    assert choose_model([Target("")], "qwen", slow=True) == "Qwen/Qwen2.5-3B-Instruct"


@fixture
def trained(outputs: Path) -> list[Target]:
    """Adapters of a 4-bit run and of a 16-bit run, one outside a run, and the base."""
    for run, value in (("older", True), ("demo/newer", False)):
        fake_run(outputs / run, {"load_in_4bit": value})
    shutil.copytree(outputs / "older" / "adapter", outputs / "copied")
    return find_targets(["outputs/older", "outputs/demo/newer", "outputs/copied", "base"], None)


def test_the_base_has_the_precision_of_training(trained: list[Target], gpu: None, monkeypatch: MonkeyPatch) -> None:
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
    trained: list[Target], monkeypatch: MonkeyPatch, caplog: LogCaptureFixture
) -> None:
    monkeypatch.setattr(targets, "gpu_is_available", lambda: False)
    assert choose_4bit(None, trained[:1]) is False
    assert "a GPU and bitsandbytes" in caplog.text


THINK = "<think> </think> <answer> </answer>"


@fixture
def prompted(outputs: Path) -> list[Target]:
    """A run of <think> without a system prompt, a run of an earlier revision, and the base model."""
    fake_run(outputs / "older", {"tags": THINK, "system_prompt": "none"})
    fake_run(outputs / "demo/newer", {"model": "tiny"})
    return [*find_targets(["outputs/older", "outputs/demo/newer"], None), Target("")]


def test_adapters_are_asked_as_they_were_trained(prompted: list[Target]) -> None:
    think, earlier, base = prompted
    expected = PromptArguments(tags=THINK, system_prompt="none")
    assert choose_prompts({}, [think, earlier]) == [expected, PromptArguments()]
    assert choose_prompts({}, [base, think]) == [expected, expected]  # the base model as its run
    assert choose_prompts({}, [base]) == [PromptArguments()]
    merged = Path("outputs/older/merged")
    merged.mkdir()
    assert choose_prompts({}, [base], str(merged)) == [expected]


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
    merged = outputs / "merged"
    AutoTokenizer.from_pretrained(copy).save_pretrained(merged)  # as merge_adapter does
    targets_of_copy = find_targets([str(copy)], None)
    assert choose_prompts({}, targets_of_copy) == choose_prompts({}, [Target("")], str(merged)) == [settings.prompt]
    with refused("set --load_in_4bit"):
        choose_4bit(None, [*targets_of_copy, *find_targets(["outputs/demo/newer"], None)])
    caplog.clear()
    shutil.copytree(outputs / "older" / "adapter", outputs / "plain")  # of an earlier revision
    assert choose_prompts({}, find_targets([str(outputs / "plain")], None)) == [PromptArguments()]
    assert caplog.messages == [f"{outputs / 'plain'} does not name its prompt: flags and the paper's are used"]


def test_flags_decide_the_prompt_and_texts_are_no_files(prompted: list[Target], tmp_path: Path) -> None:
    with refused("--tags"):
        choose_prompts({}, prompted)
    asked = EvaluationArguments(tags="a b c d", system_prompt="Be brief.").prompt
    assert choose_prompts(asked, prompted) == [PromptArguments(tags="a b c d", system_prompt="Be brief.")] * 3
    secret = tmp_path / "secret.txt"
    secret.write_text("of the user")
    fake_run(tmp_path / "outputs/older", {"system_prompt": str(secret), "chat_template": str(secret)})
    [prompt] = choose_prompts({}, prompted[:1])
    assert (prompt.system_prompt, prompt.chat_template) == (str(secret), str(secret))
    assert PromptArguments(**stored_prompt(yaml.safe_load(yaml.safe_dump(vars(prompt))))) == prompt  # as for --regrade
    asked = EvaluationArguments(system_prompt=str(secret)).prompt
    assert choose_prompts(asked, prompted[:1])[0].system_prompt == "of the user"
