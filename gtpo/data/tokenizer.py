"""The tokenizer of a policy: its padding token, its chat template, and conversations as token ids."""

import logging
import math
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import date
from pathlib import Path
from typing import Any

from gtpo.arguments import PromptArguments, Values
from gtpo.errors import UsageError, last_line

logger = logging.getLogger(__name__)

Messages = Sequence[Values]  # turns: role and content

CLOCK = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
DATE = date(2024, 7, 26)  # Llama 3's own where a template has no clock
PAD_TOKENS = ["<|finetune_right_pad_id|>", "<|reserved_special_token_0|>", "<|endoftext|>", "<pad>", "[PAD]"]
ROLES = ["bos_token", "eos_token", "sep_token", "cls_token", "mask_token"]  # their text occurs in prompts
RARE = "\x00\u0378\U0001f9ff\ue000"  # characters that few vocabularies have

TEMPLATE_SECONDS = 5.0  # of the processor for one conversation; templates take milliseconds
TEMPLATE_MEMORY = 2**30  # bytes
TEMPLATE_LENGTH = 2**24  # characters of a rendered conversation

FOLD_SYSTEM = (  # before the template of a model without a system role
    "{%- if messages[0]['role'] == 'system' and messages|length > 1 and messages[1]['role'] == 'user' -%}"
    "{%- set messages = [{'role': 'user', 'content': messages[0]['content'] + '\\n\\n' + messages[1]['content']}]"
    " + messages[2:] -%}"
    "{%- endif -%}"
)
PLAIN_TEMPLATE = (  # of a model without a template
    "{%- for message in messages -%}"
    "{{- '' if loop.first else '\\n\\n' -}}"
    "{%- if message['role'] == 'user' -%}{{- 'Question: ' -}}"
    "{%- elif message['role'] == 'assistant' -%}{{- 'Answer:\\n' -}}{%- endif -%}"
    "{{- message['content'] -}}"
    "{%- if message['role'] == 'assistant' -%}{{- eos_token -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '\\n\\nAnswer:\\n' -}}{%- endif -%}"
)

_SYSTEM = "Answer in one word."
_PROBE = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": "1 + 1 = ?"}]


def prepare_tokenizer(
    tokenizer: Any, path: str, vocab_size: int | None = None, prompt: PromptArguments | None = None
) -> None:
    """Give a tokenizer what training and evaluation need, in place: a padding token and a chat template.

    A template without a system role gets one that puts the system text before the first user turn. Each choice is
    logged, and saved with the tokenizer. ``path`` is where it comes from, for messages; ``vocab_size`` are the rows of
    the model's embedding, of which a tokenizer can have more tokens; ``prompt`` may replace the chat template.
    """
    if tokenizer.eos_token_id is None:
        raise UsageError(f"the tokenizer of {path} has no EOS token: set eos_token in its tokenizer_config.json.")
    prompt = prompt or PromptArguments()
    tokenizer.chat_template = prompt.chat_template or tokenizer.chat_template
    arguments = prompt.template_kwargs
    if tokenizer.chat_template is None:
        adds_bos = tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
        tokenizer.chat_template = "{{- bos_token -}}" * adds_bos + PLAIN_TEMPLATE
        logger.warning("%s has no chat template: prompts are `Question: ... Answer:` (--chat_template)", path)
    template = tokenizer.get_chat_template()
    if "strftime_now(" in template:  # a run resumed on another day, and its evaluation, ask the same
        template = CLOCK.sub(lambda call: repr(DATE.strftime(call[2])), template)
        if "strftime_now(" in template:
            raise UsageError(f"the chat template of {path} computes how it writes the date: name a --chat_template.")
        tokenizer.chat_template = template
        logger.warning("the chat template of %s writes the date: it is always that of %s", path, DATE)
    text = ""
    with suppress(UsageError):
        text = render(tokenizer, _PROBE, add_generation_prompt=True, **arguments)
    if _SYSTEM not in text:
        tokenizer.chat_template = FOLD_SYSTEM + template
        render(tokenizer, _PROBE, add_generation_prompt=True, **arguments)  # a template that fails on this too is told
        logger.warning("the chat template of %s has no system role: the system prompt begins the first question", path)
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
        token = free_token(tokenizer, vocab_size)
        tokenizer.pad_token = token or tokenizer.eos_token
        free = "" if token else "; no other token is free, and the masks distinguish padding from EOS"
        logger.warning("the tokenizer of %s pads with EOS or nothing: padding is %s%s", path, tokenizer.pad_token, free)


def free_token(tokenizer: Any, vocab_size: int | None = None) -> str | None:
    """A token for padding that occurs in no prompt and no completion; None if every token may.

    Tokens from ``vocab_size`` on have no row in the model's embedding; None: all have one.
    """
    turns = [*_PROBE, {"role": "assistant", "content": "2"}]
    template = tokenizer.get_chat_template() + render(tokenizer, turns, add_generation_prompt=True)
    vocabulary = tokenizer.get_vocab()
    used = {getattr(tokenizer, role) for role in ROLES}
    if tokenizer.unk_token_id in tokenizer.encode(RARE, add_special_tokens=False):
        used.add(tokenizer.unk_token)  # no fallback to bytes: it replaces unknown characters
    special = [
        token.content
        for _, token in sorted(tokenizer.added_tokens_decoder.items())
        if token.special and not re.search("end|eo[stm]", token.content)
    ]
    for text in (*PAD_TOKENS, *special, "<unk>"):
        if vocabulary.get(text, math.inf) < (vocab_size or math.inf) and text not in used and text not in template:
            return text
    return None


def render(tokenizer: Any, messages: Messages, /, **options: Any) -> str:
    """A conversation as text, by the tokenizer's chat template. UsageError if it fails, or takes too much."""
    try:
        with _bounded():
            text: str = tokenizer.apply_chat_template(messages, **{**options, "tokenize": False})
        if len(text) > TEMPLATE_LENGTH:
            raise ValueError(f"it writes {len(text):,} characters")
    except Exception as error:  # a template raises anything
        source = f"chat template (--chat_template, or that of {tokenizer.name_or_path})"
        what = "it takes too much memory" if isinstance(error, MemoryError) else last_line(error)
        raise UsageError(f"{source}: {what}.") from error
    return text


@contextmanager
def _bounded() -> Iterator[None]:
    """Limits of processor time and memory: a template is a program, and may be a stranger's.

    Jinja's sandbox bounds neither. The timer repeats, because Jinja ignores errors of an expression that it evaluates
    while it compiles; it is of the main thread, as signals are.
    """
    with ExitStack() as limits:
        if threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer"):
            limits.callback(signal.signal, signal.SIGVTALRM, signal.signal(signal.SIGVTALRM, _is_late))
            signal.setitimer(signal.ITIMER_VIRTUAL, TEMPLATE_SECONDS, TEMPLATE_SECONDS)
            limits.callback(signal.setitimer, signal.ITIMER_VIRTUAL, 0)
        pages = Path("/proc/self/statm")
        if pages.is_file():  # Linux; elsewhere the length alone is bounded
            import resource  # Windows has none

            used = int(pages.read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
            before, hard = resource.getrlimit(resource.RLIMIT_AS)
            smallest = min(limit for limit in (used + TEMPLATE_MEMORY, before, hard) if limit >= 0)
            resource.setrlimit(resource.RLIMIT_AS, (smallest, hard))
            limits.callback(resource.setrlimit, resource.RLIMIT_AS, (before, hard))
        yield


def _is_late(number: int, frame: Any) -> None:
    raise TimeoutError(f"it takes more than {TEMPLATE_SECONDS:g} seconds")


def encode_prompt(tokenizer: Any, messages: Messages, /, **options: Any) -> list[int]:
    """The token ids of a conversation up to the answer, by the tokenizer's chat template and its arguments."""
    text = render(tokenizer, messages, **{"add_generation_prompt": True, **options})
    return tokenizer.encode(text, add_special_tokens=False)


def assistant_prefill(tokenizer: Any, prompt: PromptArguments) -> str:
    """What the chat template has already written of the completion, from the first tag on; mostly nothing.

    Templates of reasoning models end the prompt with ``<think>`` and a newline: the completion lacks the opening tag,
    and is scored with it.
    """
    asked = render(tokenizer, _PROBE, **prompt.template_kwargs)  # a template may name the tags after a question
    text = render(tokenizer, _PROBE, add_generation_prompt=True, **prompt.template_kwargs)
    added = text.removeprefix(asked).rpartition(_PROBE[-1]["content"])[2]
    tags = "|".join(map(re.escape, prompt.format_tags))
    found = re.search(f"(?s)({tags}).*", added)
    return found[0] if found else ""


def check_answer_is_kept(tokenizer: Any, messages: Messages, prompt: PromptArguments) -> None:
    """Refuse a chat template that leaves tags of an answer out: SFT would train on another text.

    Templates of reasoning models drop the text between ``<think>`` and ``</think>`` in earlier turns, or in all.
    """
    text = render(tokenizer, messages, **prompt.template_kwargs)
    for tag in prompt.format_tags:
        if tag in messages[-1]["content"] and tag not in text:
            raise UsageError(
                f"the chat template of {tokenizer.name_or_path} leaves {tag} out of an answer, so SFT would not learn "
                "it: name another with --chat_template, or other --tags."
            )


def end_of_turn(tokenizer: Any) -> int | None:
    """The special token that the chat template writes after an answer; None where it writes text or nothing."""
    answer = "It is two"
    try:
        text = render(tokenizer, [*_PROBE, {"role": "assistant", "content": answer}])
    except UsageError:  # a template that writes prompts only
        return None
    rest = text.rpartition(answer)[2].strip()
    first = next(iter(tokenizer.encode(rest, add_special_tokens=False)), None)
    found = tokenizer.added_tokens_decoder.get(first)
    return first if found and found.special else None


def end_tokens(generation_config: Any, tokenizer: Any) -> list[int]:
    """The tokens that end a completion: those of the generation config (Llama has three) and the tokenizer's EOS."""
    ends = getattr(generation_config, "eos_token_id", None)
    listed = ends if isinstance(ends, list) else [ends]
    return sorted({*listed, tokenizer.eos_token_id} - {None})


_KEPT = (  # fields of a generation config that add nothing to sampling, or that TRL sets
    "bos_token_id eos_token_id pad_token_id max_length max_new_tokens use_cache cache_implementation cache_config "
    "do_sample temperature top_k top_p min_p repetition_penalty disable_compile transformers_version _commit_hash "
    "_from_model_config output_attentions output_hidden_states output_scores output_logits return_dict_in_generate"
)


def leave_out_sampling(generation_config: Any, path: str) -> None:
    """Unset, in place, what a model's own generation config adds to sampling, such as ``no_repeat_ngram_size``.

    Neither the loss nor the settings of a run know it: training and evaluation would sample from another distribution
    than the one that is scored. What TRL sets itself (temperature, top_k, ...) stays for those who use a saved model.
    """
    for name, value in sorted(generation_config.to_diff_dict().items()):
        if name not in _KEPT.split() and value not in (None, False):
            setattr(generation_config, name, None)
            logger.warning("%s: generation_config.json adds %s %s: left out of sampling", path, name, value)
