"""GRPO for vision-language models inside one Megatron job.

Where a picture becomes tokens: `megarl.media.expand.encode_prompt`.
Where a token gets its log-probability: `megarl.training.log_probs.token_log_probs` in training,
`megarl.rollout.sampling.Sampler` when it is sampled.
Where the weights change hands: `megarl.run.build_run` gives trainer and engine one module;
`megarl.rollout.engine.RolloutEngine.weights_changed` is what has to happen after an update.
"""
