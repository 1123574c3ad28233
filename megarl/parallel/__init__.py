import megarl.platform.prepare  # noqa: F401  (before any module of this package imports Megatron)
