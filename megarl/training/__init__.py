from megarl.platform import prepare as _prepare  # noqa: F401  (before Megatron)
