"""A fake Unsloth: the real one cannot be imported without a GPU."""

from typing import Any


class FakeUnsloth:
    """The parts of unsloth that the project uses: it patches trl on import and loads models."""

    def __init__(self) -> None:
        self.__spec__ = None
        self.options: dict[str, Any] = {}
        self.FastLanguageModel = self
        self.rows: int | None = None  # of the embedding, which it resizes

    def from_pretrained(self, **options: Any) -> tuple[Any, Any]:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.options |= options
        model = AutoModelForCausalLM.from_pretrained(options["model_name"])
        if self.rows is not None:
            model.resize_token_embeddings(self.rows)
        model.config._name_or_path = "unsloth/its-own-copy-bnb-4bit"
        return model, AutoTokenizer.from_pretrained(options["model_name"])

    def get_peft_model(self, model: Any, **options: Any) -> Any:
        from peft import LoraConfig, get_peft_model

        self.options |= options
        return get_peft_model(model, LoraConfig(r=options["r"], target_modules=options["target_modules"]))
