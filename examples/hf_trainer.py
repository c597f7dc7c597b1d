# SPDX-License-Identifier: Apache-2.0
"""Channel losses in transformers' Trainer with packed batches; trains a tiny random model on the CPU."""

import random
import sys

from segscatter import ChannelRegistry
from segscatter.hf import ChannelCollator, ChannelLossMixin
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class ChannelTrainer(ChannelLossMixin, Trainer):
    pass


registry = ChannelRegistry(["code", "math", "web"])
collator = ChannelCollator(DataCollatorWithFlattening(return_flash_attn_kwargs=True), registry)


def examples(n):
    """Each with the column "channel"; without it, or with None, an example counts in loss_None."""
    for _ in range(n):
        ids = [random.randrange(32) for _ in range(random.randint(4, 12))]
        yield {"input_ids": ids, "labels": ids, "channel": random.choice(["code", "math", "web", None])}


def main(output_dir):
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    trainer = ChannelTrainer(
        model=LlamaForCausalLM(config),
        args=TrainingArguments(
            output_dir,
            remove_unused_columns=False,  # keeps the column "channel"
            max_steps=4,
            logging_steps=2,
            eval_strategy="steps",
            eval_steps=4,
            report_to=["tensorboard"],
            use_cpu=True,
        ),
        data_collator=collator,
        train_dataset=list(examples(64)),
        eval_dataset=list(examples(16)),
        channel_registry=registry,
    )
    trainer.train()
    for entry in trainer.state.log_history:
        print(entry)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "channel-losses")
