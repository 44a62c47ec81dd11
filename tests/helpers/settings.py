"""The settings of a command line, as the train scripts parse them."""

from trl import GRPOConfig, SFTConfig

from gtpo.arguments import Settings
from gtpo.cli.parse import parse, read_command_line
from train_grpo import SETTINGS as OF_GRPO
from train_gtpo import SETTINGS as OF_GTPO
from train_sft import SETTINGS as OF_SFT

OURS: dict[str, tuple[type, ...]] = {"gtpo": OF_GTPO, "grpo": OF_GRPO, "sft": OF_SFT}
OF_TRL = {"gtpo": GRPOConfig, "grpo": GRPOConfig, "sft": SFTConfig}
CLASSES = {method: (*classes, OF_TRL[method]) for method, classes in OURS.items()}


def parsed(*argv: str, method: str = "gtpo") -> Settings:
    """The settings of ``train_METHOD.py *argv``."""
    return parse(read_command_line(method, OURS[method], argv), [OF_TRL[method]])
