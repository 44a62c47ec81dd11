"""The settings of a command line, as the train scripts parse them."""

from trl import GRPOConfig, SFTConfig

from gtpo.arguments import Settings
from gtpo.cli.parse import parse, read_command_line
from train_grpo import SETTINGS as OF_GRPO
from train_gtpo import SETTINGS as OF_GTPO
from train_sft import SETTINGS as OF_SFT

CLASSES: dict[str, tuple[type, ...]] = {
    "gtpo": (*OF_GTPO, GRPOConfig),
    "grpo": (*OF_GRPO, GRPOConfig),
    "sft": (*OF_SFT, SFTConfig),
}


def parsed(*argv: str, method: str = "gtpo") -> Settings:
    """The settings of ``train_METHOD.py *argv``."""
    return parse(read_command_line(method, argv), CLASSES[method])
