"""What a recipe's numbers rest on, proved on the user's own machine before hours are spent.

Nothing is imported here: the transformers process runs a module of this package and must not meet Megatron's patches.
"""
