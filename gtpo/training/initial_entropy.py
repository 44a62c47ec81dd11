"""<H>_ini of Section 5.2: the entropy of the untrained policy, measured once and stored with the run."""

import itertools
import json
import logging
import math

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback
from trl.trainer.utils import RepeatSampler

from gtpo.files import read_regular, write_atomically
from gtpo.processes import is_main_process
from gtpo.training.batch import Row, Trainer, isolated_rng, padded_batch
from gtpo.training.faults import non_finite_error, run_of
from gtpo_loss import completion_entropy, filter_is_on

logger = logging.getLogger(__name__)

PROMPTS = 100  # Section 6: "the first 100 samples of the training set"
CPU_SAMPLING_BATCH = 25  # completions at once on a CPU: the weights are read once for all of them


class InitialEntropy(TrainerCallback):
    """<H>_ini of a trainer's policy: ``--initial_entropy``, or measured before step 0, never on a trained policy.

    The measurement has its own random numbers: it gives the same value, and training samples the same groups, whenever
    it happens. Training starts with it; an evaluation before training needs it earlier.
    """

    value: float | None = None  # in nats, once it is measured

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        self.measure()  # a resumed run has loaded its checkpoint, and knows its step

    def measure(self) -> float:
        """<H>_ini in nats: the first call samples, or reads that of the run, and stores it; each other returns it.

        Every process has to make the first call. RunError if the value is NaN or infinite.
        """
        if self.value is None:
            self.value = self._stored_with_run()
        return self.value

    def _stored_with_run(self) -> float:
        trainer = self.trainer
        settings = trainer.gtpo
        path = run_of(trainer).initial_entropy
        if settings.initial_entropy is not None:
            record = {"initial_entropy": settings.initial_entropy, "given": True}
        elif trainer.state.global_step > 0:  # resumed
            record = json.loads(read_regular(path))
        else:
            record = self._sampled()
        value = float(record["initial_entropy"])
        if not math.isfinite(value):
            raise non_finite_error("the initial entropy", trainer)
        record["filter_on"] = filter_is_on(value, settings.entropy_filter)
        if is_main_process():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(record, indent=2))
            source = f"{record['prompts']} prompts" if "prompts" in record else "given"
            state = "on" if record["filter_on"] else "off"
            logger.warning("Initial entropy %.2f nats (%s), entropy filter %s", value, source, state)
        trainer.accelerator.wait_for_everyone()
        return value

    def _sampled(self) -> Row:
        entropies = self.sampled_entropies(self._first_rows())
        return {
            "initial_entropy": sum(entropies) / len(entropies),
            "prompts": len(entropies),
            "temperature": self.trainer.temperature,
            "per_prompt": entropies,
        }

    def _first_rows(self) -> list[Row]:
        """The first rows in the order of training: that of TRL's sampler with the run's seed, or of the stream."""
        trainer = self.trainer
        rows = trainer.train_dataset
        seed = trainer.args.seed
        if hasattr(rows, "__len__"):
            order = RepeatSampler(rows, 1, shuffle=trainer.shuffle_dataset, seed=seed)
            return [rows[i] for i in itertools.islice(order, PROMPTS)]
        stream = rows.shuffle(seed=seed) if trainer.shuffle_dataset else rows
        return list(itertools.islice(stream, PROMPTS))

    def sampled_entropies(self, rows: list[Row]) -> list[float]:
        """<H>_i of one completion per row, in the order of the rows, which are split over the processes."""
        trainer = self.trainer
        accelerator = trainer.accelerator
        ranks = accelerator.num_processes
        rank = accelerator.process_index
        share = -(-len(rows) // ranks)
        first = rank * share
        last = len(rows) - 1
        mine = [rows[min(i, last)] for i in range(first, first + share)]  # the same number on each
        chunk = self._rows_at_once(share)
        rows_at_once = trainer.args.per_device_train_batch_size
        entropies: list[float] = []
        with (
            isolated_rng(trainer.args.seed + rank, accelerator.device),
            torch.no_grad(),
            trainer.open_bar("initial entropy", len(mine)) as bar,
        ):
            for start in range(0, len(mine), chunk):
                questions = [row["prompt"] for row in mine[start : start + chunk]]
                prompt_ids, images, fields = trainer._tokenize_prompts(questions)
                completion_ids, _ = trainer._generate_single_turn(prompt_ids, images, fields, num_generations=1)
                batch = padded_batch(
                    prompt_ids, completion_ids, trainer.processing_class.pad_token_id, accelerator.device
                )
                _, token_entropy = trainer.scores(trainer.model_wrapped, batch, rows_at_once)
                mask = batch["completion_mask"]
                entropies += completion_entropy(token_entropy, mask).tolist()
                bar.count_completions([{"tokens": length} for length in mask.sum(1).tolist()])
        return gather_object(entropies)[: len(rows)]

    def _rows_at_once(self, share: int) -> int:
        """Completions that are sampled together; ``share`` are those of this process."""
        trainer = self.trainer
        if trainer.args.use_vllm:
            return share  # it makes its own batches: a call for each would wait for its longest completion
        of_training = trainer.args.generation_batch_size // trainer.accelerator.num_processes
        least = CPU_SAMPLING_BATCH if trainer.accelerator.device.type == "cpu" else 1
        return max(least, of_training)
