"""GRPO for vision-language models inside one Megatron job.

Where a picture becomes tokens: `megarl.media.expand.encode_prompt`.
Where a token gets its log-probability: `megarl.training.log_probs.token_log_probs` in training,
`megarl.rollout.sampling.sample` when it is sampled.
Where the weights change hands: `megarl.rollout.sync.WeightSync`, called in the loop after each update.
`megarl.run.build_parts` gives trainer and engine one module, or the engine one in a layout of its own.
"""
