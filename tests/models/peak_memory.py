"""Print the peak host memory of loading a checkpoint, divided by the size of its largest file.

`FOLDER load` measures the loader. `FOLDER naive` reads every tensor into host memory first, to show
that the measurement finds a loader that needs too much. On a CPU the loaded parameters are in host
memory too, so the script subtracts their size from the peak.
"""

import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

MEBI = 1 << 20
VOCAB, WIDTH = 24 * 1024, 1024  # embedding and head: 96 MiB each in float32
HF_CONFIG = {"model_type": "llama", "vocab_size": VOCAB, "hidden_size": WIDTH}
HF_CONFIG |= {"num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 2}
HF_CONFIG |= {"intermediate_size": 512, "max_position_embeddings": 64, "tie_word_embeddings": False}


def write_checkpoint(folder: Path) -> None:
    shapes = {"q": (WIDTH, WIDTH), "k": (256, WIDTH), "v": (256, WIDTH), "o": (WIDTH, WIDTH)}
    layer = {f"self_attn.{name}_proj": shape for name, shape in shapes.items()}
    layer |= {"mlp.gate_proj": (512, WIDTH), "mlp.up_proj": (512, WIDTH)}
    layer |= {"mlp.down_proj": (WIDTH, 512)}
    layer |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (WIDTH,))
    small = {f"model.layers.0.{name}.weight": shape for name, shape in layer.items()}
    small["model.norm.weight"] = (WIDTH,)
    table = np.full((VOCAB, WIDTH), 0.5, np.float32)
    save_file({"model.embed_tokens.weight": table}, folder / "model-1.safetensors")
    save_file({"lm_head.weight": table}, folder / "model-2.safetensors")
    ones = {name: np.ones(shape, np.float32) for name, shape in small.items()}
    save_file(ones, folder / "model-3.safetensors")


def status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def measure(folder: Path, *, naive: bool) -> float:
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from jpaged.models import loader, weight_plan
    from jpaged.models.registry import read_model_config

    loader.SLAB_BYTES = 4 * MEBI
    config = read_model_config(HF_CONFIG)
    jax.jit(lambda x: x + 1)(jnp.zeros(3)).block_until_ready()  # initialize JAX
    files = sorted(folder.glob("*.safetensors"))
    before = status_bytes("VmRSS")
    held = [load_file(file) for file in files] if naive else []
    model = weight_plan.plan_model(folder, config, dtype=jnp.bfloat16).load()
    assert "torch" not in sys.modules
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    assert len(held) in (0, len(files))
    extra = status_bytes("VmHWM") - before - num_bytes
    return extra / max(file.stat().st_size for file in files)


if __name__ == "__main__":
    print(measure(Path(sys.argv[1]), naive=sys.argv[2] == "naive"))
