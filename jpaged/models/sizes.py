"""The sizes of a model that determine the engine's pool and programs."""

from dataclasses import dataclass, replace

from jpaged.models.config import ModelConfig


@dataclass(frozen=True)
class JaxModelSizes:
    """The sizes of a user's model, or of one device's shard of it. The attributes have the same
    names as in `ModelConfig`.

    Attributes:
        vocab_size: Number of logits per token.
        hidden_size: Width of the hidden states.
        num_layers: Number of layers of the pool.
        num_kv_heads: Number of KV heads of each layer of the pool. In a shard, the number on one
            device.
        head_size: Width of one head of the pool.
        max_position_embeddings: Maximum number of tokens of a sequence.
        kv_cache_dtype: Dtype of the pool.
        eos_token_ids: Tokens that end a text.
        batch_invariant: Whether a token's bits must not depend on the other tokens of a step.
        tensor_parallel_size: Number of devices of a shard; 1 for the whole model.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_kv_heads: int
    head_size: int
    max_position_embeddings: int
    kv_cache_dtype: str
    eos_token_ids: tuple[int, ...] = ()
    batch_invariant: bool = False
    tensor_parallel_size: int = 1

    def shard(self, count: int) -> "JaxModelSizes":
        """Return the sizes of the model on one device, if `count` devices split the KV heads.

        Raises:
            ValueError: `count` does not divide the number of KV heads.
        """
        if self.num_kv_heads % count:
            raise ValueError(
                f"count={count} does not divide num_kv_heads={self.num_kv_heads}: pass a divisor"
            )
        num_kv_heads = self.num_kv_heads // count
        return replace(self, num_kv_heads=num_kv_heads, tensor_parallel_size=count)

    @property
    def num_embedding_rows(self) -> int:
        """Number of logits per token on each device.

        The property has the name that it has in `ModelConfig`. Every device has the logits of the
        whole vocabulary, even if the embedding is split over the devices.
        """
        return self.vocab_size

    @property
    def size_summary(self) -> str:
        """Text that lists the model's sizes, for an error about memory."""
        return (
            f"the JaxModel has num_layers={self.num_layers}, hidden_size={self.hidden_size}, "
            f"vocab_size={self.vocab_size}"
        )


ModelSizes = ModelConfig | JaxModelSizes
