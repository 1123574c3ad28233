"""Made-up prompts of given sizes."""

import torch

from megarl.data.prompt import Grid
from megarl.media.item import EncodedPrompt, MediaItem


def text_prompt(tokens: int, vocabulary: int) -> EncodedPrompt:
    """`tokens` random ids past the special tokens, so that transformers takes them for text as well."""
    mask = torch.zeros(tokens, dtype=torch.bool)
    places = torch.arange(tokens)
    return EncodedPrompt(None, torch.randint(16, vocabulary, (tokens,)), mask, places.expand(3, -1), tokens, ())


def media_prompt(item: MediaItem, tokens: int, model) -> EncodedPrompt:
    """`tokens` random ids after one picture or video."""
    count = item.feature_count(model.merge_size)
    mask = torch.zeros(count + tokens, dtype=torch.bool)
    mask[:count] = True
    ids = torch.randint(16, model.language_model.vocab_size, (count + tokens,))
    return EncodedPrompt(None, ids, mask, torch.arange(count + tokens).expand(3, -1), count + tokens, (item,))


def noise_item(name: str, grid: Grid, model) -> MediaItem:
    """A picture, or a video where the grid has several temporal patches, of noise."""
    vision = model.vision_transformer_config
    length = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    t, h, w = grid
    return MediaItem("video" if t > 1 else "image", torch.rand(t * h * w, length), grid, name.encode(), name)
