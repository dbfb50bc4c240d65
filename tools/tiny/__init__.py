"""The bundled model: its questions, tokenizer, training and evaluation.

`world` and `dialogues` make questions with correct answers, `data` packs them into training rows,
and `model` is the forward pass in plain JAX. `train`, `evaluate` and `fp8_accuracy` are programs.
"""
