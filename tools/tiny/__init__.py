"""The embedded model: its world, its tokenizer, its training and its evaluation.

`world` makes questions with true answers, `data` turns them into packed training rows, `model` is
the forward pass in plain JAX, `train` and `evaluate` are the two programs.
"""
