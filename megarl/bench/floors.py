"""The least that a model's work costs on a machine with these ceilings, whoever does it."""

from collections.abc import Sequence

from megarl.bench.ceilings import Ceilings
from megarl.media.item import MediaItem
from megarl.packing.cost import CostModel


class Floors:
    """Seconds for a policy model that one rank holds whole.

    Weights are those of the matrices of the layers and of the output layer; norms and the like count as nothing.  Of
    experts those count that one token visits: several tokens may visit the same.  Activations stay where they are.
    """

    def __init__(self, ceilings: Ceilings, model):
        language = model.language_model.config
        self._ceilings, self._cost = ceilings, CostModel.of(language, model.tower_config)
        self._item_bytes = language.params_dtype.itemsize
        self._head = language.hidden_size * model.language_model.vocab_size
        heads = language.num_query_groups or language.num_attention_heads
        self._kv_bytes = 2 * language.num_layers * heads * language.kv_channels * self._item_bytes

    def decode_step(self, requests: int, length: float) -> float:
        """One new token of each of `requests`, which attend to `length` tokens on average: all weights are read once,
        and all keys and values."""
        weights = (self._cost.language.matrices + self._head) * self._item_bytes
        operations = self._cost.language.operations(requests, length) + 2 * self._head * requests
        return self._ceilings.seconds(weights + requests * length * self._kv_bytes, operations)

    def prefill(self, prompts: Sequence[float], tokens: int | None = None) -> float:
        """Prompts of these lengths to the distribution of the first new token of each.

        Args:
            tokens: first tokens that are sampled; default: one of each prompt.
        """
        operations = sum(self._cost.language.operations(n, n / 2) for n in prompts)
        return self._ceilings.seconds(operations=operations + 2 * self._head * (tokens or len(prompts)))

    def generation(self, requests: int, prompt: float, new: int, of_a_prompt: int = 1) -> float:
        """Prompts of `prompt` tokens are read, once for all requests of each, then `new` tokens sampled for each
        request, the first by the reading itself."""
        read = self.prefill([prompt] * (requests // of_a_prompt), requests)
        return read + (new - 1) * self.decode_step(requests, prompt + new / 2)

    def training_step(self, sequences: int, prompt: float, new: int) -> float:
        """Forward and backward, which does twice as much: 6 N D and attention.  Only the places that predict a new
        token go through the output layer.  The optimizer counts as nothing."""
        operations = self._cost.language.operations(prompt + new, (prompt + new) / 2) + 2 * self._head * new
        return self._ceilings.seconds(operations=3 * sequences * operations)

    def encoding(self, items: Sequence[MediaItem]) -> float:
        """The layers of the vision tower."""
        return self._ceilings.seconds(operations=sum(map(self._cost.item, items)))
