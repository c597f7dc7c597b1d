# SPDX-License-Identifier: Apache-2.0
"""Channel losses in Megatron-Bridge: pretrain(config, forward_step, callbacks=[ChannelLosses()])."""

from megatron.bridge.training import gpt_step
from megatron.bridge.training.callbacks import Callback
from segscatter import ChannelLossTracker, ChannelRegistry
from segscatter.megatron import BatchTap, data_parallel_group, log_channel_losses, wrap_loss_func

tracker = ChannelLossTracker(ChannelRegistry(["code", "math", "web"]), group=data_parallel_group)


def forward_step(state, data_iterator, model, return_schedule_plan=False):
    batches = BatchTap(data_iterator)  # Bridge drops the key "channels" of the batch
    output, loss_func = gpt_step.forward_step(state, batches, model, return_schedule_plan)
    batch = batches.batch or {}
    packed = "cu_seqlens_q" in batch or "cu_seqlens" in batch
    return output, wrap_loss_func(
        loss_func,
        tracker,
        batch.get("channels"),
        loss_mask=loss_func.args[0],  # this rank's part of it
        packed_seq_params=batch if packed else None,
    )


class ChannelLosses(Callback):
    def on_train_step_start(self, context):
        tracker.begin_step()

    def on_train_step_end(self, context):
        tracker.discard_step() if context.skipped_iter else tracker.commit_step()
        state = context.state
        log_channel_losses(
            tracker,
            state.train_state.step + 1,  # the step is counted after this callback
            state.cfg.logger.log_interval,
            tensorboard=state.tensorboard_logger,
            wandb=state.wandb_logger,
        )

    def on_eval_end(self, context):
        state = context.state
        log_channel_losses(
            tracker,
            state.train_state.step,
            tensorboard=state.tensorboard_logger,
            wandb=state.wandb_logger,
            mode="eval",
            prefix="eval_loss_",
        )
