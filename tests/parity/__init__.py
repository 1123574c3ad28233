"""`python -m tests.parity`: how far megarl is from transformers, family by family (docs/models.md)."""
