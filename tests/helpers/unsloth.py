"""A stand-in for Unsloth, which cannot be imported without a GPU."""

from typing import Any

from transformers import AutoTokenizer


class StandIn:
    """What unsloth offers: it patches trl when it is imported, and loads models."""

    def __init__(self, patches_trl: bool = True) -> None:
        self.__spec__ = None
        self.asked: dict[str, Any] = {}
        self.FastLanguageModel = self
        self.patches_trl = patches_trl

    def from_pretrained(self, **options: Any) -> tuple[Any, Any]:
        from transformers import AutoModelForCausalLM

        self.asked |= options
        model = AutoModelForCausalLM.from_pretrained(options["model_name"])
        model.config._name_or_path = "unsloth/its-own-copy-bnb-4bit"
        return model, AutoTokenizer.from_pretrained(options["model_name"])

    def get_peft_model(self, model: Any, **options: Any) -> Any:
        from peft import LoraConfig, get_peft_model

        self.asked |= options
        return get_peft_model(model, LoraConfig(r=options["r"], target_modules=options["target_modules"]))
