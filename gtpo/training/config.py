"""GTPOConfig: TRL's GRPOConfig with the settings of GTPO, as in ``examples/gtpo_trl.py``."""

from dataclasses import dataclass, field, fields
from typing import Any

import trl

from gtpo.arguments import GTPOArguments


@dataclass(init=False)
class GTPOConfig(GTPOArguments, trl.GRPOConfig):
    """The fields of GRPOConfig and of GTPOArguments, which are documented there; the defaults are the paper's.

    ``trl.GRPOConfig`` may be Unsloth's, whose own ``__init__`` a generated one would bypass.
    """

    loss_type: str = field(default="grpo", metadata={"help": "The 1/|o_i| of Eq. 11."})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        own = {item.name: kwargs.pop(item.name) for item in fields(GTPOArguments) if item.name in kwargs}
        self.__dict__.update(vars(GTPOArguments(**own)))
        kwargs.setdefault("loss_type", "grpo")
        trl.GRPOConfig.__init__(self, *args, **kwargs)

    def __post_init__(self) -> None:
        trl.GRPOConfig.__post_init__(self)
