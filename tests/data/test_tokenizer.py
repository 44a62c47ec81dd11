"""Padding tokens, chat templates and prompts of tokenizers as models bring them."""

import re
import resource
import signal
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from helpers.refusals import refused
from pytest import LogCaptureFixture
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig

from gtpo.arguments import GTPOArguments, PromptArguments
from gtpo.data.load import Problem
from gtpo.data.tokenizer import assistant_prefill, check_answer_is_kept, encode_prompt, end_of_turn, prepare_tokenizer
from gtpo.evaluation.records import Sampling
from gtpo.evaluation.sampling import TransformersSampler, make_requests, to_row
from gtpo.models import load as models
from gtpo.models.source import model_source
from gtpo.training.trainer import GTPOTrainer

CHATML = (  # as SmolLM2's: the EOS token ends every turn
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA = (  # has no system role
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for message in messages %}{{ '[' + message['role'] + ']' + message['content'] | trim + '[end]' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[model]' }}{% endif %}"
)
DROPS_SYSTEM = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ '[' + message['role'] + ']' }}"
    "{{ message['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '[model]' }}{% endif %}"
)
TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]


def byte_level(specials: list[str], template: str | None = CHATML, **roles: str) -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes, as the ones of GPT-2, Llama 3, Qwen and SmolLM2, with these special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens([AddedToken(token, normalized=False) for token in specials])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, **roles)
    tokenizer.chat_template = template
    return tokenizer


def smollm2(template: str = CHATML, tags: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """One with the special tokens of SmolLM2, and these."""
    return byte_level(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", *tags],
        template,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
    )


def with_template(template: str | None) -> PreTrainedTokenizerFast:
    roles = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    return byte_level([*roles.values()], template, **roles)


# ---- padding ----


@pytest.mark.parametrize(
    ("specials", "roles", "expected"),
    [
        ("<s> </s> <|finetune_right_pad_id|>", {"eos_token": "</s>"}, "<|finetune_right_pad_id|>"),  # Llama 3
        ("<|im_start|> <|im_end|> <x> <|vision_pad|>", {"eos_token": "<|im_end|>"}, "<x>"),  # Qwen's base
        ("</s> <repo_name>", {"eos_token": "</s>", "pad_token": "</s>"}, "<repo_name>"),
        ("<unk> <s> </s>", {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}, "<unk>"),  # Llama 2
        ("<|endoftext|>", {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}, "<|endoftext|>"),  # GPT-2
        ("<|im_start|> <|im_end|> <|end|>", {"eos_token": "<|im_end|>"}, "<|im_end|>"),  # of the template, and an end
    ],
)
def test_a_free_token_pads(specials: str, roles: dict[str, Any], expected: str, caplog: LogCaptureFixture) -> None:
    tokenizer = byte_level(specials.split(), **roles)
    prepare_tokenizer(tokenizer, "some/model")
    assert tokenizer.pad_token == expected
    assert f"padding is {expected}" in caplog.text


def test_the_choice_is_saved_and_not_made_again(tmp_path: Path, caplog: LogCaptureFixture) -> None:
    tokenizer = smollm2()
    prepare_tokenizer(tokenizer, "some/model")
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    caplog.clear()
    prepare_tokenizer(loaded, str(tmp_path))
    assert (loaded.pad_token, loaded.eos_token, caplog.text) == ("<|endoftext|>", "<|im_end|>", "")
    assert loaded.chat_template == CHATML


def test_a_token_without_embedding_does_not_pad() -> None:
    tokenizer = byte_level(["</s>", "<a>", "<pad>"], eos_token="</s>")
    prepare_tokenizer(tokenizer, "some/model", vocab_size=len(tokenizer) - 1)
    assert tokenizer.pad_token == "<a>"


def test_a_token_for_unknown_characters_does_not_pad() -> None:
    words = WordLevel({"<unk>": 0, "</s>": 1, "two": 2}, unk_token="<unk>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="<unk>", eos_token="</s>")
    tokenizer.chat_template = "two"
    prepare_tokenizer(tokenizer, "some/model")
    assert tokenizer.pad_token == "</s>"


# ---- where only EOS can pad ----


def only_eos(pad: str) -> PreTrainedTokenizerFast:
    """Ten words, of which EOS is one in ten of a random model's tokens; the template writes EOS into the prompts."""
    vocabulary = {word: i for i, word in enumerate(["<eos>", "<free>", *"abcdefgh"])}
    model = Tokenizer(WordLevel(vocabulary, unk_token="a"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    model.add_special_tokens(["<eos>", "<free>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token="<eos>", pad_token=pad, unk_token="a", padding_side="left"
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] + ' <eos>' }}{% endfor %}"
    return tokenizer


def random_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=10, eos_token_id=0, initializer_range=0.4, **shape))


PROMPTS = ["a", "b c d e f g", "c c", "d h a b"]


def trained_with(pad: str, directory: Path) -> tuple[Any, ...]:
    """Weights, logs and completions."""
    completions = []

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        completions.extend(completion_ids)
        return [float(ids.count(3)) - 0.1 * len(ids) for ids in completion_ids]

    sampling = {"num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 8, "max_steps": 3}
    on_cpu: dict[str, Any] = {"bf16": False, "use_cpu": True, "report_to": "none", "save_strategy": "no"}
    on_cpu |= {"learning_rate": 0.05, "logging_steps": 1, "loss_type": "grpo", "gradient_checkpointing": False}
    trainer = GTPOTrainer(
        model=random_model(),
        processing_class=only_eos(pad),
        reward_funcs=[reward],
        args=GRPOConfig(output_dir=str(directory), **sampling, **on_cpu),
        gtpo=GTPOArguments(initial_entropy=0.1, entropy_threshold=2.0),
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": prompt}] for prompt in PROMPTS]}),
    )
    trainer.train()
    timed = re.compile("time|per_second|flos")
    logs = [{name: row[name] for name in row if not timed.search(name)} for row in trainer.state.log_history]
    return dict(trainer.model.state_dict()), logs, completions


def test_padding_with_eos_trains_the_same_policy(tmp_path: Path) -> None:
    """The masks distinguish padding from text: with another id of the padding token everything is bit-identical."""
    free, free_logs, sampled = trained_with("<free>", tmp_path / "free")
    eos, eos_logs, same = trained_with("<eos>", tmp_path / "eos")
    assert {ids[-1] == 0 for ids in sampled} == {True, False}
    assert same == sampled and eos_logs == free_logs
    assert all(torch.equal(free[name], eos[name]) for name in free)
    assert all(row["grad_norm"] > 0 for row in free_logs[:3])


def test_evaluation_samples_the_same_where_padding_is_eos(tmp_path: Path) -> None:
    for part in (random_model(), only_eos("<free>")):
        part.save_pretrained(tmp_path)
    sampling = Sampling(k=8, max_new_tokens=16, batch_size=32)
    sampler = TransformersSampler(model_source(tmp_path), sampling)
    problems = [Problem(str(i), prompt, "a") for i, prompt in enumerate(PROMPTS)]
    requests = make_requests(sampler, problems, sampling)
    [free] = sampler.sample(requests, set(), None)
    sampler.tokenizer.pad_token = "<eos>"
    [eos] = sampler.sample(requests, set(), None)
    assert eos == free and {row["finished"] for row in free} == {True, False}


# ---- chat templates ----


@pytest.mark.parametrize("template", [GEMMA, DROPS_SYSTEM], ids=["raises", "drops it"])
def test_without_a_system_role_its_text_begins_the_question(
    template: str, tmp_path: Path, caplog: LogCaptureFixture
) -> None:
    tokenizer = with_template(template)
    merged = [{"role": "user", "content": "Be brief.\n\n2 + 2?"}]
    again = [{"role": "assistant", "content": "4"}, {"role": "user", "content": "And 3?"}]
    expected = [tokenizer.apply_chat_template(t, tokenize=False) for t in (merged, merged + again, again)]
    prepare_tokenizer(tokenizer, "some/model")
    assert "system role" in caplog.text
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)  # the adapter's tokenizer does it as well
    assert [loaded.apply_chat_template(t, tokenize=False) for t in (TURNS, TURNS + again, again)] == expected
    prepare_tokenizer(loaded, "some/model")
    assert loaded.chat_template == tokenizer.chat_template


@pytest.mark.parametrize("bos", ["", "<bos>"])
def test_without_a_template_the_prompt_is_plain_text(bos: str, caplog: LogCaptureFixture) -> None:
    """It begins with BOS where the tokenizer's texts do."""
    tokenizer = with_template(None)
    if bos:
        adds = TemplateProcessing("<bos> $A", special_tokens=[("<bos>", tokenizer.bos_token_id)])
        tokenizer._tokenizer.post_processor = adds
    prepare_tokenizer(tokenizer, "some/model")
    assert "--chat_template" in caplog.text
    prompt = f"{bos}Be brief.\n\nQuestion: 2 + 2?\n\nAnswer:\n"
    assert tokenizer.decode(encode_prompt(tokenizer, TURNS)) == prompt
    full = tokenizer.apply_chat_template([*TURNS, {"role": "assistant", "content": "4"}], tokenize=False)
    assert full == prompt + "4<eos>"  # what SFT learns ends the completion


HOSTILE = {  # what a template does -> it, and what is said
    "loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "more than 0.2 seconds",
    ),
    "fills the memory": ("{{ 'x' * 3000000000 }}", "it takes too much memory"),
    "takes more than a GiB": ("{{ ('x' * 1500000000)|length }}", "it takes too much memory"),
    "is long": ("{% for i in range(1800) %}{{ 'x' * 10000 }}{% endfor %}", "it writes 18,000,"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_template_has_limits_of_time_memory_and_length(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the tokenizer is read, and where the second prompt of a benchmark is rendered; then all is as before."""
    monkeypatch.setattr("gtpo.data.tokenizer.TEMPLATE_SECONDS", 0.2)
    program, said = HOSTILE[kind]
    before = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGVTALRM)
    source = rf"chat template \(--chat_template, or that of .*\): .*({said})"
    with refused(source):
        prepare_tokenizer(with_template(CHATML + program), "some/model")
    tokenizer = with_template(CHATML + "{% if 'eggs' in messages[-1].content %}" + program + "{% endif %}")
    prepare_tokenizer(tokenizer, "some/model")
    sampler = SimpleNamespace(context_length=999)
    problems = [Problem("a", "1 + 1?", "2"), Problem("b", "Six eggs?", "6")]
    assert len(make_requests(sampler, problems[:1], Sampling(k=1, max_new_tokens=9), tokenizer=tokenizer)) == 1
    with refused(source):
        make_requests(sampler, problems, Sampling(k=1, max_new_tokens=9), tokenizer=tokenizer)
    assert (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGVTALRM)) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


THINKS = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<eos>{% endfor %}" + (
    "{% if add_generation_prompt %}[assistant]{% if enable_thinking is not defined or enable_thinking %}<think>\n"
    "{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def test_what_the_template_has_written_of_the_completion() -> None:
    tokenizer = with_template(THINKS)
    prompt = PromptArguments(tags="<think> </think> <answer> </answer>")
    assert assistant_prefill(tokenizer, prompt) == "<think>\n"
    assert assistant_prefill(tokenizer, PromptArguments()) == ""
    names_tags = CHATML.replace("message['content']", "message['content'] + ' Use <think> and <answer>.'")
    assert assistant_prefill(smollm2(names_tags), prompt) == ""
    prompt.chat_template_kwargs = {"enable_thinking": False}
    assert assistant_prefill(tokenizer, prompt) == "<think>\n\n</think>\n\n"
    long, short = (len(encode_prompt(tokenizer, TURNS, enable_thinking=on)) for on in (False, True))
    assert long - short == len("\n</think>\n\n")


def test_evaluation_stores_the_whole_completion(tmp_path: Path) -> None:
    """A run trained with <think> is not scored 0.0 because its template writes the opening tag."""
    prompt = PromptArguments(tags="<think> </think> <answer> </answer>", system_prompt="none")
    tokenizer = with_template(THINKS)
    problems = [Problem("a", "1 + 1?", "2")]
    sampler = SimpleNamespace(context_length=999)
    [request] = make_requests(sampler, problems, Sampling(k=1, max_new_tokens=9), prompt, tokenizer)
    assert tokenizer.decode(request.prompt_ids) == "[user]1 + 1?<eos>[assistant]<think>\n"
    written = tokenizer.encode("2</think><answer>2</answer>", add_special_tokens=False)
    row = to_row(request, written, True, tokenizer)
    assert row["completion"] == "<think>\n2</think><answer>2</answer>" and row["tokens"] == len(written)
    assert prompt.format.follows_format(row["completion"])


def test_a_turn_ends_with_the_token_of_the_template() -> None:
    base = byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], eos_token="<|endoftext|>")
    assert end_of_turn(base) == base.convert_tokens_to_ids("<|im_end|>") != base.eos_token_id
    assert end_of_turn(with_template(DROPS_SYSTEM)) is None
    model = random_model()
    assert model.generation_config.eos_token_id == 0
    models._stop_at_end_of_turn(model, base)
    assert model.generation_config.eos_token_id == sorted([0, base.eos_token_id, end_of_turn(base)])


def test_sft_is_refused_where_the_template_drops_the_reasoning() -> None:
    """The templates of DeepSeek-R1 keep what follows </think> only."""
    template = CHATML.replace("message['content']", "message['content'].split('</think>')[-1]")
    tokenizer = smollm2(template)
    answer = {"role": "assistant", "content": "<think>2</think><answer>2</answer>"}
    prompt = PromptArguments(tags="<think> </think> <answer> </answer>")
    with refused("<think>"):
        check_answer_is_kept(tokenizer, [*TURNS, answer], prompt)
    check_answer_is_kept(smollm2(), [*TURNS, answer], prompt)


@pytest.mark.parametrize(
    ("call", "shown"),
    [
        ("strftime_now('%d %b %Y')", "26 Jul 2024"),  # as Llama 3.2
        ('strftime_now( "%Y-%m-%d" )', "2024-07-26"),  # as Mistral
    ],
)
def test_the_date_of_a_template_is_always_the_same(call: str, shown: str, caplog: LogCaptureFixture) -> None:
    tokenizer = smollm2(f"{{% if strftime_now is defined %}}{{{{ 'Today: ' + {call} }}}}{{% endif %}}{CHATML}")
    prepare_tokenizer(tokenizer, "owner/name")
    assert tokenizer.apply_chat_template(TURNS, tokenize=False).startswith(f"Today: {shown}<|im_start|>")
    assert "owner/name writes the date" in caplog.text


def test_a_date_of_computed_format_is_refused() -> None:
    with refused("--chat_template"):
        prepare_tokenizer(smollm2("{% set how = '%Y' %}{{ strftime_now(how) }}" + CHATML), "owner/name")
