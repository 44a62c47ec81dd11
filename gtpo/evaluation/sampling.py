"""Sampling of completions with vLLM or Transformers, behind one interface.

A completion is identified by (problem id, sample number), and its random seed is derived from it: an interrupted
evaluation resumes with the completions that it would have had without the interruption.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gtpo.arguments import PromptArguments
from gtpo.data.tokenizer import (
    PLAIN_TEMPLATE,
    assistant_prefill,
    encode_prompt,
    end_of_turn,
    end_tokens,
    leave_out_sampling,
    prepare_tokenizer,
)
from gtpo.errors import UsageError
from gtpo.evaluation.records import Row, Sampling
from gtpo.evaluation.storage import Key, Keys, Questions, Rows
from gtpo.models.backend import disable_flashinfer_sampler, gpu_is_available
from gtpo.models.load import load_adapter, load_base, load_tokenizer
from gtpo.models.source import ModelSource
from gtpo.runs.bars import TokenCounter, until_end

# Of the tokenizer that pads and decodes, for all targets: neither a target's template nor its end of a turn.
WITHOUT_TEMPLATE = PromptArguments(chat_template=PLAIN_TEMPLATE)


@dataclass(frozen=True)
class Request:
    """One completion to sample."""

    id: str  # of the problem
    sample: int  # 0 to k - 1
    prompt_ids: list[int]
    prefill: str = ""  # what the prompt contains of the completion (assistant_prefill)
    end_ids: tuple[int, ...] = ()  # tokens of the chat template that end it, in addition to those of the model

    @property
    def key(self) -> Key:
        return self.id, self.sample


Requests = Sequence[Request]
CountTokens = Callable[[int], object]  # called while completions are generated, with the tokens that were added


def load_prompt_tokenizer(sampler: "Sampler", adapter: Path | None, prompt: PromptArguments) -> Any:
    """The tokenizer that writes the prompts of one target: the one saved with the adapter, or the base model's.

    It is read anew: ``prompt`` changes its chat template, which is that of no other target.
    """
    from transformers import AutoTokenizer

    if adapter is None or not (adapter / "tokenizer_config.json").is_file():
        return load_tokenizer(sampler.base, prompt)
    tokenizer = AutoTokenizer.from_pretrained(adapter, trust_remote_code=False, local_files_only=True)
    prepare_tokenizer(tokenizer, str(adapter), None, prompt)
    return tokenizer


def make_requests(
    sampler: "Sampler",
    problems: Questions,
    sampling: Sampling,
    prompt: PromptArguments | None = None,
    tokenizer: Any = None,
) -> list[Request]:
    """k requests per problem, in the order of the benchmark; by default the paper's prompt and the base's tokenizer."""
    prompt = prompt or PromptArguments()
    tokenizer = tokenizer or load_prompt_tokenizer(sampler, None, prompt)
    prefill = assistant_prefill(tokenizer, prompt)
    end = end_of_turn(tokenizer)
    end_ids = () if end is None else (end,)
    requests = []
    for problem in problems:
        ids = encode_prompt(tokenizer, prompt.format.to_messages(problem.question), **prompt.template_kwargs)
        if len(ids) + sampling.max_new_tokens > sampler.context_length:
            raise UsageError(
                f"the prompt of {problem.id} has {len(ids)} tokens, more than the context length "
                f"{sampler.context_length} leaves beside --max_new_tokens {sampling.max_new_tokens}: lower that."
            )
        requests += [Request(problem.id, sample, ids, prefill, end_ids) for sample in range(sampling.k)]
    return requests


def derived_seed(seed: int, *names: str | int) -> int:
    """A 63-bit seed derived from ``seed`` and ``names``: the same in every process and on every machine."""
    text = "\n".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def to_row(
    request: Request,
    tokens: Sequence[int],
    finished: bool,
    tokenizer: Any,
) -> Row:
    """A completion as a row of the completion file; ``finished`` is False if max_new_tokens truncated it."""
    text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return {
        "id": request.id,
        "sample": request.sample,
        "completion": request.prefill + text,
        "tokens": len(tokens),
        "finished": finished,
    }


def plan_batches(requests: Requests, batch_size: int) -> list[list[Request]]:
    """Batches of prompts of similar length, longest first, so that a batch too large for the GPU fails at once.

    They depend on all requests and not on what is missing: after an interruption the batches are the same.
    """
    ordered = sorted(requests, key=lambda request: -len(request.prompt_ids))  # stable: ties keep the benchmark's order
    return [ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)]


class TransformersSampler:
    """``generate`` of Transformers, in batches; adapters with PEFT. float32 on a CPU; bfloat16 or 4 bits on a GPU."""

    def __init__(self, model: ModelSource, sampling: Sampling) -> None:
        self.base = model
        self.sampling = sampling
        self.model, self.tokenizer = load_base(model, sampling.load_in_4bit, prompt=WITHOUT_TEMPLATE)
        if gpu_is_available() and not getattr(self.model, "is_quantized", False):
            self.model.to("cuda")
        self.model.eval()
        self.context_length = int(self.model.config.get_text_config().max_position_embeddings)
        self.end_ids = end_tokens(self.model.generation_config, self.tokenizer)

    def sample(
        self,
        requests: Requests,
        done: Keys,
        adapter: Path | None,
        count_tokens: CountTokens = lambda tokens: None,
    ) -> Iterator[Rows]:
        """Yield the completions of the requests that are not done, a few at a time, in any order.

        ``requests`` are all of the benchmark, which determine the batches; the tokens of those not done are counted.
        """
        import torch

        model = load_adapter(self.model, adapter).eval() if adapter else self.model
        try:
            for batch in plan_batches(requests, self.sampling.batch_size or len(requests)):
                missing = [request.key not in done for request in batch]
                if not any(missing):
                    continue
                torch.manual_seed(
                    derived_seed(self.sampling.seed, *(part for request in batch for part in request.key))
                )
                end_ids = sorted({*self.end_ids, *batch[0].end_ids})
                rows = self._generate(model, batch, TokenCounter(missing, end_ids, count_tokens), end_ids)
                yield list(itertools.compress(rows, missing))
        finally:
            if adapter:
                self.model = model.unload()

    def _generate(
        self,
        model: Any,
        batch: Requests,
        counter: TokenCounter,
        end_ids: list[int],
    ) -> Rows:
        import torch
        from torch.nn.utils.rnn import pad_sequence
        from transformers import GenerationConfig

        from gtpo.forward.generation import generate

        greedy = self.sampling.temperature == 0
        rows_of_ids = [torch.tensor(request.prompt_ids, device=model.device) for request in batch]
        pad_id = self.tokenizer.pad_token_id
        ids = pad_sequence(rows_of_ids, batch_first=True, padding_value=pad_id, padding_side="left")
        mask = pad_sequence([torch.ones_like(row) for row in rows_of_ids], batch_first=True, padding_side="left")
        # `generate` takes what is not set from the model's generation config (Qwen: top_k 20, repetition penalty 1.05).
        self.model.generation_config = GenerationConfig(
            do_sample=not greedy,
            **({} if greedy else {"temperature": self.sampling.temperature, "top_p": self.sampling.top_p, "top_k": 0}),
            max_new_tokens=self.sampling.max_new_tokens,
            eos_token_id=end_ids,
            pad_token_id=pad_id,
        )
        with torch.inference_mode():
            # an adapter is in the layers of self.model
            output = generate(self.model, ids, mask, self.model.generation_config, counter)
        completions = output[:, ids.shape[1] :].tolist()
        return [
            to_row(request, *until_end(tokens, end_ids), self.tokenizer)
            for request, tokens in zip(batch, completions, strict=True)
        ]


class VLLMSampler:
    """One vLLM engine for all benchmarks and adapters; all requests of a benchmark are submitted together."""

    prompt_room = 4096  # tokens; a KV cache for the full context (Llama: 131,072) would not fit on a smaller GPU

    def __init__(
        self,
        model: ModelSource,
        sampling: Sampling,
        lora_rank: int | None,
        gpu_memory_utilization: float = 0.9,
    ) -> None:
        """Start the engine; ``lora_rank`` is the largest of the adapters, None without adapters."""
        disable_flashinfer_sampler()
        import torch
        from transformers import GenerationConfig
        from vllm import LLM

        from gtpo.forward.vllm_lora import lora_options

        self.base = model
        self.sampling = sampling
        dtype = "float32"
        if torch.cuda.is_available():
            dtype = "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
        lora = {} if lora_rank is None else lora_options(lora_rank)
        self.tokenizer = load_tokenizer(model, WITHOUT_TEMPLATE)
        longest = int(model.config.get_text_config().max_position_embeddings)
        self.context_length = min(longest, sampling.max_new_tokens + self.prompt_room)
        self.llm = LLM(
            model=model.base,
            trust_remote_code=False,
            dtype=dtype,
            quantization="bitsandbytes" if sampling.load_in_4bit else None,  # NF4, as in load_base
            generation_config="vllm",  # not the model's default sampling parameters
            max_model_len=self.context_length,
            gpu_memory_utilization=gpu_memory_utilization,
            seed=sampling.seed,
            **lora,
        )
        generation_config = None
        with suppress(OSError):  # it has none
            generation_config = GenerationConfig.from_pretrained(model.base)
            leave_out_sampling(generation_config, model.base)
        self.end_ids = end_tokens(generation_config, self.tokenizer)
        self.numbers: dict[Path, int] = {}  # of the adapters

    def sample(
        self,
        requests: Requests,
        done: Keys,
        adapter: Path | None,
        count_tokens: CountTokens = lambda tokens: None,
    ) -> Iterator[Rows]:
        """As :meth:`TransformersSampler.sample`."""
        from vllm.lora.request import LoRARequest

        lora = None
        if adapter:
            number = self.numbers.setdefault(adapter, len(self.numbers) + 1)
            lora = LoRARequest(f"adapter-{number}", number, str(adapter))
        missing = [request for request in requests if request.key not in done]
        params = [self._params(request) for request in missing]
        prompts = [{"prompt_token_ids": request.prompt_ids} for request in missing]
        # The two halves of LLM.generate, so that each completion is stored when it finishes and not after the last one.
        # enqueue returns vLLM's internal request ids, 7-1a2b3c4d; an output has the part before the dash.
        queued = self.llm.enqueue(prompts, params, lora_request=lora, use_tqdm=False)
        names = [name.partition("-")[0] for name in queued]
        waiting = dict(zip(names, missing, strict=True))
        engine = self.llm.llm_engine
        lengths = dict.fromkeys(names, 0)
        while engine.has_unfinished_requests():
            rows = []
            for output in engine.step():
                length = sum(len(completion.token_ids) for completion in output.outputs)
                count_tokens(length - lengths[output.request_id])
                lengths[output.request_id] = length
                if output.finished:
                    [completion] = output.outputs
                    request = waiting.pop(output.request_id)
                    stopped = completion.finish_reason == "stop"
                    rows.append(to_row(request, completion.token_ids, stopped, self.tokenizer))
            if rows:
                yield rows

    def _params(self, request: Request) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            max_tokens=self.sampling.max_new_tokens,
            stop_token_ids=sorted({*self.end_ids, *request.end_ids}),
            seed=derived_seed(self.sampling.seed, *request.key),
            detokenize=False,
        )


Sampler = TransformersSampler | VLLMSampler
