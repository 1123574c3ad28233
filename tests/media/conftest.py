import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoProcessor, PreTrainedTokenizerFast
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from megarl.models.tiny_processor import build_tiny_processor

ASCII = "".join(map(chr, range(32, 127)))
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SPECIAL += ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- for part in message.content %}
        {%- if part.type == 'image' or 'image' in part %}
            {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
        {%- elif part.type == 'video' or 'video' in part %}
            {{- '<|vision_start|><|video_pad|><|vision_end|>' }}
        {%- elif 'text' in part %}
            {{- part.text }}
        {%- endif %}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The processor of the tiny recipes: a token a character."""
    folder = tmp_path_factory.mktemp("tiny")
    build_tiny_processor(
        folder,
        alphabet=ASCII,
        vocab_size=128,
        patch_size=4,
        merge_size=2,
        temporal_patch_size=2,
        min_pixels=64,
        max_pixels=1024,
    )
    return AutoProcessor.from_pretrained(folder)


@pytest.fixture(scope="session")
def qwen(tiny):
    """Qwen's byte-level BPE in small, with merges across spaces and punctuation, and its chat template."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    words = "user assistant system image pad vision start end im what is in the picture <| |>\n\n, and count:"
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator([words, " ".join(SPECIAL)] * 20, trainer)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    return Qwen3VLProcessor(tiny.image_processor, tokenizer, tiny.video_processor, QWEN_TEMPLATE)
